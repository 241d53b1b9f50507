"""Where a training batch gets its context features from: computed online, or once a row and then from memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.training.step import context_taps


def feature_bytes(tokens: int, taps: int, hidden: int, itemsize: int) -> int:
    """Bytes that the features of so many tokens take."""
    return tokens * taps * hidden * itemsize


class OnlineFeatures:
    """Runs the target on every batch: no memory, the target's forward pass in every step."""

    def __init__(self, target, layers: tuple[int, ...]):
        self._target, self._layers = target, layers

    def __call__(self, tokens_BT: np.ndarray, rows_B: np.ndarray) -> jax.Array:
        """Features [B, T, M, D] of the batch, in the target's dtype."""
        del rows_B
        return context_taps(self._target, jnp.asarray(tokens_BT), layers=self._layers)


class RememberedFeatures:
    """Runs the target once a row and keeps the result in host memory, in the target's dtype.

    A row always runs alone, and once for each length it is padded to (now and then a row fills up a batch of the next
    length). So its features are the same bits whenever they are computed: a resumed run, which starts with an empty
    memory, continues exactly.
    """

    def __init__(self, target, layers: tuple[int, ...]):
        self._target, self._layers = target, layers
        self._rows: dict[tuple[int, int], np.ndarray] = {}

    def __call__(self, tokens_BT: np.ndarray, rows_B: np.ndarray) -> jax.Array:
        """Features [B, T, M, D] of the batch; rows_B are the rows' numbers in the data set."""
        return jnp.asarray(np.stack([self._row(*pair) for pair in zip(tokens_BT, rows_B.tolist(), strict=True)]))

    def _row(self, tokens_T: np.ndarray, row: int) -> np.ndarray:
        key = (row, len(tokens_T))
        if key not in self._rows:
            taps_1TMD = context_taps(self._target, jnp.asarray(tokens_T[None]), layers=self._layers)
            self._rows[key] = np.asarray(taps_1TMD[0])
        return self._rows[key]


def make_features(cache: str, target, layers: tuple[int, ...]) -> OnlineFeatures | RememberedFeatures:
    """The source for `training.feature_cache`: "none" or "memory"."""
    return RememberedFeatures(target, layers) if cache == "memory" else OnlineFeatures(target, layers)

"""Where a training batch gets its context features from: computed online, or once a row and then from memory."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.training.step import context_taps, hidden_and_taps


class Features(NamedTuple):
    """taps [B, T, M, D]; hidden [B, T, D], the final hidden states, or None where nobody asked for them."""

    taps: jax.Array
    hidden: jax.Array | None


def feature_bytes(tokens: int, taps: int, hidden: int, itemsize: int) -> int:
    """Bytes that the features of so many tokens take."""
    return tokens * taps * hidden * itemsize


class OnlineFeatures:
    """Runs the target on every batch: no memory, the target's forward pass in every step."""

    def __init__(self, target, layers: tuple[int, ...], *, with_hidden: bool = False):
        self._target, self._layers, self._with_hidden = target, layers, with_hidden

    def __call__(self, tokens_BT: np.ndarray, rows_B: np.ndarray) -> Features:
        """Features of the batch, in the target's dtype."""
        del rows_B
        return _run(self._target, tokens_BT, self._layers, self._with_hidden)


class RememberedFeatures:
    """Runs the target once a row and keeps the result in host memory, in the target's dtype.

    A row always runs alone, and once for each length it is padded to (now and then a row fills up a batch of the next
    length). So its features are the same bits whenever they are computed: a resumed run, which starts with an empty
    memory, continues exactly.
    """

    def __init__(self, target, layers: tuple[int, ...], *, with_hidden: bool = False):
        self._target, self._layers, self._with_hidden = target, layers, with_hidden
        self._rows: dict[tuple[int, int], Features] = {}

    def __call__(self, tokens_BT: np.ndarray, rows_B: np.ndarray) -> Features:
        """Features of the batch; rows_B are the rows' numbers in the data set."""
        rows = [self._row(*pair) for pair in zip(tokens_BT, rows_B.tolist(), strict=True)]
        return jax.tree.map(lambda *leaves: jnp.asarray(np.stack(leaves)), *rows)

    def _row(self, tokens_T: np.ndarray, row: int) -> Features:
        key = (row, len(tokens_T))
        if key not in self._rows:
            one = _run(self._target, tokens_T[None], self._layers, self._with_hidden)
            self._rows[key] = jax.tree.map(lambda leaf: np.asarray(leaf[0]), one)
        return self._rows[key]


def _run(target, tokens_BT: np.ndarray, layers: tuple[int, ...], with_hidden: bool) -> Features:
    if not with_hidden:
        return Features(context_taps(target, jnp.asarray(tokens_BT), layers=layers), None)
    hidden_BTD, taps_BTMD = hidden_and_taps(target, jnp.asarray(tokens_BT), layers=layers)
    return Features(taps_BTMD, hidden_BTD)


def make_features(
    cache: str, target, layers: tuple[int, ...], *, with_hidden: bool = False
) -> OnlineFeatures | RememberedFeatures:
    """The source for `training.feature_cache`: "none" or "memory"."""
    kind = RememberedFeatures if cache == "memory" else OnlineFeatures
    return kind(target, layers, with_hidden=with_hidden)

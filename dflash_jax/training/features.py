"""Where a training batch gets its context features from: computed online, once a row and then from memory, or read
from files that data/features.py wrote."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from dflash_jax.data.feature_store import StoredSplit
from dflash_jax.data.pipeline import Batch, collate
from dflash_jax.data.rows import TrainingRow
from dflash_jax.sharding import rows_to_devices, to_devices
from dflash_jax.training.step import context_taps, hidden_and_taps

GROUP_ROWS = 4  # rows that the target runs together
LENGTH_STEP = 32  # their lengths are rounded up to a multiple of it, so that few programs are compiled


class Features(NamedTuple):
    """taps [B, T, M, D]; hidden [B, T, D], the final hidden states, or None where nobody asked for them."""

    taps: jax.Array
    hidden: jax.Array | None


FeatureSource = Callable[[Batch], Features]  # of a batch, whose rows may be packed


def feature_bytes(tokens: int, taps: int, hidden: int, itemsize: int) -> int:
    """Bytes that the features of so many tokens take."""
    return tokens * taps * hidden * itemsize


class OnlineFeatures:
    """Runs the target on every batch: no memory, the target's forward pass in every step."""

    def __init__(self, target, layers: tuple[int, ...], *, with_hidden: bool = False, scan: bool = False):
        self._target, self._layers, self._with_hidden, self._scan = target, layers, with_hidden, scan

    def __call__(self, batch: Batch) -> Features:
        """Features of the batch, in the target's dtype."""
        return _run(self._target, batch, self._layers, self._with_hidden, self._scan)


class RememberedFeatures:
    """Runs the target once for every row and keeps the result in host memory, in the target's dtype.

    Rows run in groups of similar length that depend on the rows alone, the whole group when one of it is asked for. So
    a row's features are the same bits whenever they are computed: a resumed run, which starts with an empty memory,
    continues exactly. Behind a row's end they are zero; nothing reads them there.
    """

    def __init__(
        self,
        target,
        layers: tuple[int, ...],
        rows: Sequence[TrainingRow],
        lengths: Sequence[int],
        *,
        with_hidden: bool = False,
    ):
        self._target, self._layers, self._with_hidden = target, layers, with_hidden
        self._rows, self._lengths = rows, lengths
        by_length = np.argsort(lengths, kind="stable").tolist()
        groups = [by_length[first : first + GROUP_ROWS] for first in range(0, len(by_length), GROUP_ROWS)]
        self._group_of = {row: group for group in groups for row in group}
        self._known: dict[int, Features] = {}

    def __call__(self, batch: Batch) -> Features:
        """Features of the batch, in the target's dtype."""
        T = batch["tokens_BT"].shape[1]
        packs = [[self._row(row) for row in rows] for rows in _packed_rows(batch)]
        laid_out = [jax.tree.map(lambda *leaves: _in_a_row(leaves, T), *pack) for pack in packs]
        return to_devices(jax.tree.map(lambda *leaves: np.stack(leaves), *laid_out))

    def _row(self, row: int) -> Features:
        if row not in self._known:
            self._run_group(self._group_of[row])
        return self._known[row]

    def _run_group(self, group: list[int]) -> None:
        longest = -(-max(self._lengths[row] for row in group) // LENGTH_STEP) * LENGTH_STEP
        batch = collate(self._rows, group + group[:1] * (GROUP_ROWS - len(group)), longest)
        features = _run(self._target, batch, self._layers, self._with_hidden)
        on_host = jax.tree.map(np.asarray, features)
        for slot, row in enumerate(group):
            self._known[row] = _cut(on_host, slot, self._lengths[row])


class StoredFeatures:
    """Reads the features of each row from its shard. Behind a row's end they are zero; nothing reads them there."""

    def __init__(self, stored: StoredSplit, *, with_hidden: bool = False):
        self._stored, self._with_hidden = stored, with_hidden

    def __call__(self, batch: Batch) -> Features:
        """Features of the batch, in the stored dtype."""
        (B, T), packs, schema = batch["tokens_BT"].shape, _packed_rows(batch), self._stored.schema

        def on_devices(name: str, *sizes: int) -> jax.Array:
            @functools.cache  # several devices may hold the same rows
            def read(start: int | None, stop: int | None) -> np.ndarray:
                rows = [[self._stored.read(name, row) for row in pack] for pack in packs[start:stop]]
                return np.stack([_in_a_row(pack, T) for pack in rows])

            return rows_to_devices((B, T, *sizes), lambda rows: read(rows.start, rows.stop))

        taps_BTMD = on_devices("taps", len(schema.layers), schema.hidden_size)
        return Features(taps_BTMD, on_devices("hidden", schema.hidden_size) if self._with_hidden else None)


def _packed_rows(batch: Batch) -> list[list[int]]:
    """Of each row of the batch the places of its documents in the data set; one, where rows are not packed."""
    rows_BP = batch.get("row_index_BP", batch["row_index_B"][:, None])
    return [[row for row in rows if row >= 0] for rows in rows_BP.tolist()]


def _cut(features: Features, slot: int, length: int) -> Features:
    """One row of a batch up to its end, as a copy that keeps nothing else alive."""
    return jax.tree.map(lambda leaf: leaf[slot, :length].copy(), features)


def _in_a_row(leaves: Sequence[np.ndarray], length: int) -> np.ndarray:
    """The arrays one behind the other, padded with zeros to `length`."""
    missing = length - sum(map(len, leaves))
    return np.concatenate([*leaves, np.zeros((missing, *leaves[0].shape[1:]), leaves[0].dtype)])


def _run(target, batch: Batch, layers: tuple[int, ...], with_hidden: bool, scan: bool = False) -> Features:
    tokens_BT, starts_BT = to_devices((batch["tokens_BT"], batch.get("starts_BT")))
    if not with_hidden:
        return Features(context_taps(target, tokens_BT, starts_BT, layers=layers, scan=scan), None)
    hidden_BTD, taps_BTMD = hidden_and_taps(target, tokens_BT, starts_BT, layers=layers, scan=scan)
    return Features(taps_BTMD, hidden_BTD)


def make_features(
    cache: str,
    target,
    layers: tuple[int, ...],
    rows: Sequence[TrainingRow],
    lengths: Sequence[int],
    *,
    with_hidden: bool = False,
    scan: bool = False,
) -> FeatureSource:
    """The source for `training.feature_cache`: "none" or "memory"; batches name rows by their place in `rows`."""
    if cache == "memory":
        return RememberedFeatures(target, layers, rows, lengths, with_hidden=with_hidden)
    return OnlineFeatures(target, layers, with_hidden=with_hidden, scan=scan)

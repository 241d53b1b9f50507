"""Batches: full, of few shapes, every row at most once an epoch, and resumed exactly."""

import json

import numpy as np
import pytest

from dflash_jax.data.pipeline import Batches, collate
from dflash_jax.data.rows import TrainingRow

BUCKETS = (8, 16, 40)


def _rows(lengths) -> list[TrainingRow]:
    return [
        TrainingRow(f"r{i}", np.arange(1, n + 1, dtype=np.int32) * (i + 1), np.arange(n) >= n // 2)
        for i, n in enumerate(lengths)
    ]


LENGTHS = [1 + (i * 29) % 40 for i in range(103)]
ROWS = _rows(LENGTHS)


def _epoch(batches: Batches) -> list:
    return [next(batches) for _ in range(batches.steps_per_epoch)]


def _same(one, other) -> bool:
    return all(np.array_equal(one[key], other[key]) and one[key].dtype == other[key].dtype for key in one)


def test_batches_hold_their_rows_padded_with_unsupervised_zeros():
    for batch in _epoch(Batches(ROWS, 4, BUCKETS, seed=3)):
        assert [batch[k].dtype for k in batch] == [np.int32, bool, np.int32, np.int32]
        for slot, index in enumerate(batch["row_index_B"]):
            length = batch["length_B"][slot]
            assert length == LENGTHS[index]
            np.testing.assert_array_equal(batch["tokens_BT"][slot, :length], ROWS[index].tokens)
            np.testing.assert_array_equal(batch["loss_mask_BT"][slot, :length], ROWS[index].loss_mask)
            assert not batch["tokens_BT"][slot, length:].any() and not batch["loss_mask_BT"][slot, length:].any()


@pytest.mark.parametrize("rows_per_step", [1, 4, 7, 103])
def test_epochs_use_each_row_at_most_once_in_full_batches_of_few_shapes(rows_per_step):
    batches = Batches(ROWS, rows_per_step, BUCKETS, seed=3)
    left_out = set()
    for epoch in range(8):
        assert batches.state() == {"epoch": epoch, "position": 0}
        got = _epoch(batches)
        assert {b["tokens_BT"].shape for b in got} <= {(rows_per_step, length) for length in BUCKETS}
        indices = np.concatenate([b["row_index_B"] for b in got])
        assert len(set(indices.tolist())) == len(indices) == 103 - 103 % rows_per_step
        left_out.add(frozenset(range(103)) - frozenset(indices.tolist()))
    assert len(left_out) > 1 or 103 % rows_per_step == 0


def test_no_row_is_padded_beyond_its_bucket_but_for_what_is_left_over():
    batches = Batches(ROWS, 4, BUCKETS, seed=3)
    promoted = sum(
        np.searchsorted(BUCKETS, length) < BUCKETS.index(b["tokens_BT"].shape[1])
        for b in _epoch(batches)
        for length in b["length_B"]
    )
    assert promoted <= 3 * (len(BUCKETS) - 1)


def test_order_depends_on_seed_and_epoch_alone():
    one, same, other = (Batches(ROWS, 4, BUCKETS, seed=seed) for seed in (3, 3, 4))
    first, second = _epoch(one), _epoch(one)
    assert all(map(_same, first + second, _epoch(same) + _epoch(same)))
    orders = [[b["row_index_B"].tolist() for b in epoch] for epoch in (first, second, _epoch(other))]
    assert orders[0] != orders[1] != orders[2] != orders[0]
    shapes = [b["tokens_BT"].shape[1] for b in first]
    assert shapes != sorted(shapes)  # lengths are mixed over the epoch


def test_rows_are_drawn_evenly_into_first_batches():
    rows = _rows([4] * 20)
    counts = np.zeros(20)
    for seed in range(600):
        counts[next(Batches(rows, 5, (8,), seed=seed))["row_index_B"]] += 1
    # Each count is binomial(600, 1/4): mean 150, deviation 10.6; five deviations are exceeded once in 10^5 runs.
    assert abs(counts - 150).max() < 53


@pytest.mark.parametrize("stop_after", [0, 1, 24, 25, 26, 60])
def test_resuming_continues_exactly(stop_after):
    batches = Batches(ROWS, 4, BUCKETS, seed=3)
    for _ in range(stop_after):
        next(batches)
    state = json.loads(json.dumps(batches.state()))
    resumed = Batches(ROWS, 4, BUCKETS, seed=3)
    resumed.set_state(state)
    assert all(_same(next(batches), next(resumed)) for _ in range(60))
    assert batches.state() == resumed.state()


def test_foreign_state_is_refused():
    batches = Batches(ROWS, 4, BUCKETS)
    for state in ({"epoch": 0, "position": 25}, {"epoch": -1, "position": 0}, {"epoch": 0, "position": -1}):
        with pytest.raises(ValueError, match="outside the 25 steps of an epoch"):
            batches.set_state(state)


@pytest.mark.parametrize(
    ("lengths", "rows_per_step", "buckets", "message"),
    [
        ([3, 9], 1, (4, 8), r"row 1 has 9 tokens, and the last of data\.length_buckets=\(4, 8\) is shorter"),
        ([9], 2, (16,), "1 rows are too few for one batch of rows_per_step=2"),
        ([9], 0, (16,), "rows_per_step=0"),
        ([9], 1, (), "length_buckets"),
        ([9], 1, (16, 16), "ascending"),
        ([9], 1, (16, 8), "ascending"),
        ([9], 1, (0, 16), "positive"),
    ],
)
def test_wrong_arguments_are_named(lengths, rows_per_step, buckets, message):
    with pytest.raises(ValueError, match=message):
        Batches(_rows(lengths), rows_per_step, buckets)


def test_collate_serves_fixed_evaluation_batches():
    batch = collate(ROWS, [2, 0], 40)
    assert batch["tokens_BT"].shape == (2, 40) and batch["row_index_B"].tolist() == [2, 0]
    np.testing.assert_array_equal(batch["tokens_BT"][1, : LENGTHS[0]], ROWS[0].tokens)

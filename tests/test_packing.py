"""Packed rows: few padding, every row once an epoch, no block across a document's start, resumed exactly."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_jax.data.loader import PreparedBatches
from dflash_jax.data.packing import PackedPlan, best_fit
from dflash_jax.data.pipeline import Batches, EpochPlan
from dflash_jax.data.prepared import PreparedRow, PreparedSplit, write_prepared
from dflash_jax.data.rows import TrainingRow
from dflash_jax.training.anchors import make_blocks, valid_anchors

LENGTHS = [2 + (i * 29) % 39 for i in range(103)]
ROWS = [
    # Supervised from the first token on, as rows that came tokenised may be.
    TrainingRow(f"r{i}", np.arange(1, n + 1, dtype=np.int32) * (i + 1), np.arange(n) % 7 != 5)
    for i, n in enumerate(LENGTHS)
]
T, PER_STEP = 64, 4


def packed(seed: int = 3) -> Batches:
    return Batches(ROWS, PER_STEP, (16, T), seed, plan=PackedPlan)


def epoch_of(batches) -> list:
    return [next(batches) for _ in range(batches.steps_per_epoch)]


def same(one, other) -> None:
    assert one.keys() == other.keys()
    for key in one:
        assert one[key].dtype == other[key].dtype
        np.testing.assert_array_equal(one[key], other[key])


@given(st.lists(st.integers(1, 20), min_size=1, max_size=40))
def test_best_fit_packs_everything_once_and_never_too_much(lengths):
    longest_first = sorted(lengths, reverse=True)
    packs = best_fit(longest_first, 20)
    assert sorted(place for pack in packs for place in pack) == list(range(len(lengths)))
    filled = [sum(longest_first[place] for place in pack) for pack in packs]
    assert max(filled) <= 20
    # What was put somewhere else fits into no earlier pack: all but one are more than half full.
    assert sum(2 * tokens <= 20 for tokens in filled) <= 1


def test_documents_of_a_pack_are_the_rows_it_names():
    for batch in epoch_of(packed()):
        assert batch["tokens_BT"].shape == batch["starts_BT"].shape == (PER_STEP, T)
        for slot in range(PER_STEP):
            rows = [row for row in batch["row_index_BP"][slot].tolist() if row >= 0]
            assert batch["row_index_B"][slot] == rows[0]
            edges = np.cumsum([0, *(LENGTHS[row] for row in rows)])
            assert batch["length_B"][slot] == edges[-1] <= T
            for row, start, end in zip(rows, edges, edges[1:], strict=False):
                np.testing.assert_array_equal(batch["tokens_BT"][slot, start:end], ROWS[row].tokens)
                np.testing.assert_array_equal(batch["loss_mask_BT"][slot, start + 1 : end], ROWS[row].loss_mask[1:])
                assert not batch["loss_mask_BT"][slot, start]
                assert set(batch["starts_BT"][slot, start:end].tolist()) == {start}
            padding = {name: batch[name][slot, edges[-1] :] for name in ("tokens_BT", "loss_mask_BT", "starts_BT")}
            assert not padding["tokens_BT"].any() and not padding["loss_mask_BT"].any()
            assert (padding["starts_BT"] == edges[-1]).all()


def test_epochs_hold_equally_many_packs_of_other_rows_and_no_row_twice():
    batches, left_out, packs = packed(), set(), []
    for epoch in range(6):
        assert batches.state() == {"epoch": epoch, "position": 0}
        got = np.concatenate([batch["row_index_BP"] for batch in epoch_of(batches)])
        rows = got[got >= 0].tolist()
        assert len(set(rows)) == len(rows)
        left_out.add(frozenset(range(len(ROWS))) - frozenset(rows))
        packs.append({frozenset(pack[pack >= 0].tolist()) for pack in got})
    assert all(len(rows) <= (PER_STEP - 1) * T for rows in left_out) and len(left_out) > 1
    assert packs[0] != packs[1] != packs[2]


def test_packing_leaves_little_padding():
    arguments = LENGTHS, PER_STEP, (T,)
    assert PackedPlan(*arguments).padding() < 0.05
    assert EpochPlan(*arguments).padding() == pytest.approx(1 - np.mean(LENGTHS) / T, abs=0.02)  # three rows sit out


def test_no_block_reaches_across_a_start():
    batches = epoch_of(packed())
    tokens_BT, mask_BT, starts_BT = (
        np.concatenate([batch[name] for batch in batches]) for name in ("tokens_BT", "loss_mask_BT", "starts_BT")
    )
    anchors_BA = np.broadcast_to(np.arange(T), mask_BT.shape)

    @jax.jit
    def blocks_at_every_anchor(tokens_BT, mask_BT):
        return make_blocks(tokens_BT, mask_BT, jnp.asarray(anchors_BA), valid_anchors(mask_BT), 6, 0)

    blocks = blocks_at_every_anchor(tokens_BT, mask_BT)
    b, a, w = np.nonzero(np.asarray(blocks.supervised))
    assert len(b) > 1000
    np.testing.assert_array_equal(starts_BT[b, a + w], starts_BT[b, a])
    assert not (np.asarray(blocks.valid) & (starts_BT == anchors_BA)).any()  # a first token has no context


@pytest.fixture(scope="module")
def split(tmp_path_factory) -> PreparedSplit:
    folder = tmp_path_factory.mktemp("set")
    write_prepared(folder, (PreparedRow(row, "train", "a", 1) for row in ROWS), {})
    return PreparedSplit(folder, "train")


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_prepared_set_packs_as_its_rows_in_memory_and_resumes_exactly(split, workers):
    memory = packed()
    for _ in range(memory.steps_per_epoch - 2):
        next(memory)
    batches = PreparedBatches(split, PER_STEP, (16, T), 3, plan=PackedPlan, workers=workers)
    batches.set_state(json.loads(json.dumps(memory.state())))
    for _ in range(memory.steps_per_epoch):  # on into the second epoch
        same(next(batches), next(memory))
    assert batches.state() == memory.state()


def test_processes_share_the_packs_of_each_batch(split):
    whole = packed()
    shares = [
        PreparedBatches(split, PER_STEP, (16, T), 3, plan=PackedPlan, process_index=i, process_count=2) for i in (0, 1)
    ]
    for _ in range(whole.steps_per_epoch + 2):
        parts = [next(share) for share in shares]
        same(next(whole), {key: np.concatenate([part[key] for part in parts]) for key in parts[0]})


def test_too_few_packs_for_a_batch_are_named():
    with pytest.raises(ValueError, match=r"103 rows make 3\d packs of 64 tokens, too few .* rows_per_step=90"):
        Batches(ROWS, 90, (T,), plan=PackedPlan)

"""The training step: accumulation, skipped steps, frozen tables, master weights, memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small_models import random_drafter, random_target

from dflash_jax.training.metrics import report
from dflash_jax.training.step import (
    Batch,
    StepSettings,
    TrainState,
    VocabularyTables,
    context_taps,
    evaluation_step,
    make_optimizer,
    train_step,
)

TARGET = random_target(factor=1.0)  # small logits, so that an untrained drafter costs ln V
V = TARGET.config.vocab_size
SETTINGS = StepSettings(anchors=5, width=4, mask_id=V - 1, gamma=4.0, loss_chunk=16, compute_dtype="float32", seed=0)
# Plain gradient steps with a state: Adam would blow rounding up to whole steps where a gradient is nearly zero.
MOMENTUM = optax.sgd(0.1, momentum=0.9)


def new_drafter(**fields):
    return random_drafter(TARGET.config, factor=1.0, num_layers=1, **fields).model


def new_state(optimizer=MOMENTUM) -> TrainState:
    drafter = new_drafter()
    return TrainState(drafter, optimizer.init(drafter), jnp.int32(0), jnp.int32(0))


def tables() -> VocabularyTables:
    return VocabularyTables(TARGET.model.embedding[...], TARGET.model.head_VD)


@functools.cache
def four_rows() -> Batch:
    """Four rows with 9, 2, 0 and 15 supervised tokens: very uneven weights once they are split."""
    tokens_BT = jnp.asarray(np.random.default_rng(0).integers(0, V, (4, 20)), jnp.int32)
    begin_B, end_B = np.array([[5], [9], [0], [5]]), np.array([[14], [11], [0], [20]])
    loss_mask_BT = jnp.asarray((np.arange(20) >= begin_B) & (np.arange(20) < end_B))
    taps_BTMD = context_taps(TARGET.model, tokens_BT, layers=(0, 2))
    return Batch(tokens_BT, loss_mask_BT, jnp.arange(4), taps_BTMD)


def split(batch: Batch, parts: int) -> Batch:
    return jax.tree.map(lambda x: x.reshape(parts, -1, *x.shape[1:]), batch)


def step(state: TrainState, batch: Batch, *, settings=SETTINGS, optimizer=MOMENTUM):
    return train_step(state, tables(), batch, settings=settings, optimizer=optimizer)


def leaves(tree) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def assert_bit_identical(ours, wanted) -> None:
    for mine, theirs in zip(leaves(ours), leaves(wanted), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_one_two_or_four_micro_batches_give_one_update():
    states, sums = zip(*(step(new_state(), split(four_rows(), parts)) for parts in (1, 2, 4)), strict=True)
    start = leaves(new_drafter())
    assert all(np.any(after != before) for after, before in zip(leaves(states[0].drafter), start, strict=True))
    for other, other_sums in zip(states[1:], sums[1:], strict=True):
        for mine, theirs in zip(leaves(other.drafter), leaves(states[0].drafter), strict=True):
            # gradients of order 1 at most, times 0.1, summed over rows in another order
            np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-6)
        for mine, theirs in zip(leaves(other_sums), leaves(sums[0]), strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-5)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_step_that_is_not_finite_changes_nothing_but_its_counters(value):
    batch = split(four_rows(), 2)
    before, _ = step(new_state(), batch)  # moments are no longer zero
    kept = jax.tree.map(np.asarray, before)
    after, sums = step(before, batch._replace(taps=batch.taps.at[1, 1, 3].set(value)))
    assert all(np.isfinite(leaf).all() for leaf in leaves(sums))  # the mean over an interval stays a number
    assert_bit_identical((after.drafter, after.optimizer), (kept.drafter, kept.optimizer))
    assert (int(after.step), int(after.skipped)) == (2, 1)
    again, _ = step(after, batch)
    assert (int(again.step), int(again.skipped)) == (3, 1)
    assert not np.array_equal(leaves(again.drafter)[0], leaves(kept.drafter)[0])


def test_a_step_without_supervised_tokens_is_counted_and_moves_nothing():
    batch = split(four_rows(), 2)
    after, sums = step(new_state(), batch._replace(loss_mask=jnp.zeros_like(batch.loss_mask)))
    assert_bit_identical((after.drafter, after.optimizer), (new_drafter(), MOMENTUM.init(new_drafter())))
    assert (int(after.step), int(after.skipped)) == (1, 0)
    assert not any(leaf.any() for leaf in leaves(sums))


def test_anchors_are_drawn_afresh_each_step_and_again_the_same_on_a_second_run():
    batch = split(four_rows(), 2)
    first, second = new_state(), new_state()
    _, sums = step(first, batch)
    _, same = step(second, batch)
    _, later = step(new_state()._replace(step=jnp.int32(7)), batch)
    assert_bit_identical(sums, same)
    assert float(later.loss) != float(sums.loss)


def test_the_targets_tables_stay_as_they_are_and_are_not_in_the_state():
    before = [np.array(table) for table in leaves(tables())]
    state = new_state()
    for _ in range(3):
        state, _ = step(state, split(four_rows(), 2))
    assert_bit_identical(tables(), before)
    assert not any(V in leaf.shape for leaf in leaves(state))


def test_norms_move_in_float32_masters_under_bfloat16_compute():
    """In bfloat16 a scale of 1 has no neighbour nearer than 0.004, and Adam at 6e-4 would never move it."""
    optimizer = make_optimizer(6e-4, 100, warmup_ratio=0.01, weight_decay=0.0, b1=0.9, b2=0.95, clip_norm=1.0)
    settings, batch = SETTINGS._replace(compute_dtype="bfloat16"), split(four_rows(), 1)
    state, losses = new_state(optimizer), []
    for count in range(40):
        # one draw of anchors again and again, which the drafter has to learn by heart
        state, sums = step(state._replace(step=jnp.int32(0)), batch, settings=settings, optimizer=optimizer)
        losses.append(report(sums)["loss"])
        if count == 0:
            scale = np.asarray(state.drafter.norm.scale[...])
            assert scale.dtype == np.float32
            np.testing.assert_allclose(np.abs(scale - 1), 6e-4, rtol=0.01)  # Adam's first step is its rate
    assert {leaf.dtype for leaf in leaves(state.drafter)} == {np.dtype(np.float32)}
    assert losses[0] == pytest.approx(np.log(V), rel=0.02)  # an untrained drafter knows nothing
    assert losses[-1] < losses[0] - 0.3


def test_learning_rate_warms_up_and_falls_to_zero():
    """Adam moves a weight with a constant gradient by its rate."""
    optimizer = make_optimizer(0.5, 100, warmup_ratio=0.04, weight_decay=0.0, b1=0.9, b2=0.999, clip_norm=1.0)
    weight, moves = jnp.zeros(()), []
    state, update = optimizer.init(weight), jax.jit(optimizer.update)
    for _ in range(100):
        change, state = update(jnp.float32(0.3), state, weight)
        moves.append(-float(change))
    np.testing.assert_allclose(moves[:4], [0.125, 0.25, 0.375, 0.5], rtol=1e-4)
    assert moves[3:] == sorted(moves[3:], reverse=True)
    # update 52 of a cosine from update 4 to update 101, the first that is not made
    np.testing.assert_allclose(moves[51], 0.25 * (1 + np.cos(np.pi * 48 / 97)), rtol=1e-4)
    assert 0 < moves[-1] < 1e-3


def test_evaluation_draws_nothing():
    batch = four_rows()
    first = evaluation_step(new_drafter(), tables(), batch, settings=SETTINGS)
    other_rows = batch._replace(rows=batch.rows + 100)  # their number decides what a training step draws
    assert_bit_identical(first, evaluation_step(new_drafter(), tables(), other_rows, settings=SETTINGS))
    metrics = report(first)
    assert metrics["blocks"] == 5 + 1 + 0 + 5
    assert metrics["loss"] == pytest.approx(np.log(V), rel=0.02)
    assert 1 <= metrics["accepted_prefix"] < 4


def test_memory_grows_with_anchors_through_activations_and_not_through_logits():
    vocabulary, width, T = 32_768, 8, 128
    abstract = jax.ShapeDtypeStruct
    batch = Batch(
        abstract((1, 1, T), jnp.int32),
        abstract((1, 1, T), jnp.bool_),
        abstract((1, 1), jnp.int32),
        abstract((1, 1, T, 2, 32), jnp.float32),
    )

    def temporary_bytes(anchors: int) -> int:
        table_VD = jax.ShapeDtypeStruct((vocabulary, 32), jnp.float32)
        settings = SETTINGS._replace(anchors=anchors, width=width, loss_chunk=32)
        state = jax.eval_shape(new_state)
        lowered = train_step.lower(
            state, VocabularyTables(table_VD, table_VD), batch, settings=settings, optimizer=MOMENTUM
        )
        return lowered.compile().memory_analysis().temp_size_in_bytes

    per_slot = (temporary_bytes(64) - temporary_bytes(16)) / ((64 - 16) * width)
    assert per_slot < vocabulary  # logits alone would be 4 bytes for each token

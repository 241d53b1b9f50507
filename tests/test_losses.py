"""The chunked loss against dense cross-entropy, its weights, its memory, and the sums that are reported."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.training.anchors import Blocks
from dflash_jax.training.losses import SlotScores, block_loss, decay_weights, default_gamma
from dflash_jax.training.metrics import block_sums, report, zero_sums

# float32 sums of 61 logits or 40 rows in another order, relative to values of order one
TOLERANCE = 1e-5
V, D = 61, 16


def random_rows(R: int, seed: int = 0):
    rng = np.random.default_rng(seed)
    hidden_RD, head_VD = rng.normal(size=(R, D)), rng.normal(size=(V, D))
    return (
        jnp.asarray(hidden_RD, jnp.float32),
        jnp.asarray(head_VD, jnp.float32),
        jnp.asarray(rng.integers(0, V, R), jnp.int32),
        jnp.asarray(rng.uniform(0.1, 1.0, R), jnp.float32),
    )


def dense_loss(hidden_RD, head_VD, labels_R, weights_R):
    log_probs_RV = jax.nn.log_softmax(hidden_RD.astype(jnp.float32) @ head_VD.T)
    nats_R = -jnp.take_along_axis(log_probs_RV, labels_R[:, None], axis=1)[:, 0]
    return jnp.sum(weights_R * nats_R), SlotScores(nats_R, (log_probs_RV.argmax(-1) == labels_R).astype(jnp.float32))


@functools.partial(jax.jit, static_argnames=("chunk",))
def chunked(hidden_RD, head_VD, labels_R, weights_R, *, chunk: int = 8):
    """((loss, scores), gradient of hidden and head)."""
    loss = functools.partial(block_loss, chunk=chunk)
    return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(hidden_RD, head_VD, labels_R, weights_R)


dense = jax.jit(jax.value_and_grad(dense_loss, has_aux=True))


def assert_same_as_dense(rows, chunk: int) -> None:
    (loss, scores), (gradient_RD, _) = chunked(*rows, chunk=chunk)
    (wanted, wanted_scores), wanted_gradient_RD = dense(*rows)
    weighted_R = np.asarray(rows[3]) > 0
    np.testing.assert_allclose(loss, wanted, rtol=TOLERANCE)
    np.testing.assert_allclose(gradient_RD, wanted_gradient_RD, atol=TOLERANCE)
    np.testing.assert_allclose(scores.nats[weighted_R], wanted_scores.nats[weighted_R], atol=TOLERANCE)
    np.testing.assert_array_equal(scores.correct[weighted_R], wanted_scores.correct[weighted_R])


@pytest.mark.parametrize(("R", "chunk"), [(40, 8), (40, 40), (40, 7), (37, 8), (1, 8), (5, 512)])
def test_chunked_loss_and_gradient_equal_dense(R, chunk):
    assert_same_as_dense(random_rows(R), chunk)


@pytest.mark.parametrize("kept", ["first", "last", "every third", "one", "none"])
def test_rows_without_weight_count_for_nothing_wherever_they_are(kept):
    hidden_RD, head_VD, labels_R, weights_R = random_rows(37)
    index_R = np.arange(37)
    keep_R = {
        "first": index_R < 9,
        "last": index_R >= 30,
        "every third": index_R % 3 == 0,
        "one": index_R == 20,
        "none": index_R < 0,
    }[kept]
    weights_R = weights_R * keep_R
    assert_same_as_dense((hidden_RD, head_VD, labels_R, weights_R), chunk=8)
    _, (gradient_RD, _) = chunked(hidden_RD, head_VD, labels_R, weights_R)
    np.testing.assert_array_equal(np.asarray(gradient_RD).any(1), keep_R)


def test_logits_in_the_hundreds_stay_finite():
    hidden_RD, head_VD, labels_R, weights_R = random_rows(40)
    (loss, _), (gradient_RD, _) = chunked(100 * hidden_RD, head_VD, labels_R, weights_R)
    (wanted, _), wanted_gradient_RD = dense(100 * hidden_RD, head_VD, labels_R, weights_R)
    np.testing.assert_allclose(loss, wanted, rtol=TOLERANCE)
    # logits up to 2000 are rounded by 1e-4, and the probabilities with them
    np.testing.assert_allclose(gradient_RD, wanted_gradient_RD, atol=1e-3)


def test_the_head_is_frozen():
    _, (gradient_RD, gradient_VD) = chunked(*random_rows(40))
    assert np.any(gradient_RD)
    assert not np.any(gradient_VD)


def test_a_factor_on_the_loss_scales_the_gradient():
    rows = random_rows(40)
    scaled = jax.jit(jax.grad(lambda *rows: block_loss(*rows, chunk=8)[0] / 7))(*rows)
    np.testing.assert_allclose(scaled, chunked(*rows)[1][0] / 7, atol=1e-7)


def test_bfloat16_hidden_states():
    hidden_RD, head_VD, labels_R, weights_R = random_rows(40)
    rounded_RD, rounded_VD = (x.astype(jnp.bfloat16).astype(jnp.float32) for x in (hidden_RD, head_VD))
    (loss, _), (gradient_RD, _) = chunked(hidden_RD.astype(jnp.bfloat16), head_VD, labels_R, weights_R)
    (wanted, _), wanted_gradient_RD = dense(rounded_RD, rounded_VD, labels_R, weights_R)
    assert loss.dtype == jnp.float32
    assert gradient_RD.dtype == jnp.bfloat16
    # products of bfloat16 values are exact in float32, so the loss is only summed in another order
    np.testing.assert_allclose(loss, wanted, rtol=TOLERANCE)
    # probabilities and the gradient itself are rounded to 8 bits; entries reach 3
    np.testing.assert_allclose(gradient_RD.astype(jnp.float32), wanted_gradient_RD, atol=2e-2)


# Weights.


def test_decay_weights_of_the_paper():
    expected = [0, 1, 0.8669, 0.7515, 0.6514, 0.5647, 0.4895, 0.4244, 0.3679, 0.3189, 0.2765, 0.2397, 0.2077, 0.1801]
    expected += [0.1561, 0.1353]
    np.testing.assert_allclose(decay_weights(16, 7.0), expected, atol=5e-5)  # four digits are given
    np.testing.assert_array_equal(decay_weights(5, None), [0, 1, 1, 1, 1])


def test_gamma_follows_from_the_width():
    assert [default_gamma(width) for width in (16, 10, 8)] == [7.0, 5.0, 4.0]
    others = [default_gamma(width) for width in range(2, 33)]
    assert others == sorted(others)
    assert min(others) >= 1


@pytest.mark.parametrize("gamma", [None, 1.0, 4.0, 7.0])
def test_uniform_logits_cost_ln_v_for_any_decay_and_any_split(gamma):
    """Sums are added over parts of very different supervision and divided once."""
    rng = np.random.default_rng(3)
    supervised_BW = np.arange(8) <= rng.integers(1, 8, (5, 1))
    weights_BW = np.asarray(decay_weights(8, gamma)) * supervised_BW
    _, head_VD, labels_R, _ = random_rows(40)
    for part_B in ([0, 0, 0, 0, 0], [0, 1, 1, 1, 1], [0, 1, 0, 2, 1]):
        total, weight = 0.0, 0.0
        for part in set(part_B):
            part_weights_R = jnp.asarray(weights_BW * (np.array(part_B) == part)[:, None]).reshape(-1)
            total += float(chunked(jnp.zeros((40, D)), head_VD, labels_R, part_weights_R)[0][0])
            weight += float(part_weights_R.sum())
        assert total / weight == pytest.approx(np.log(V), rel=1e-6)


# Memory.


def test_memory_does_not_hold_the_logits_of_all_rows():
    rows_few, rows_many, vocabulary = 1024, 4096, 4096

    def temporary_bytes(R: int) -> int:
        shapes = [(R, D), (vocabulary, D), (R,), (R,)]
        dtypes = [jnp.float32, jnp.float32, jnp.int32, jnp.float32]
        abstract = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
        return chunked.lower(*abstract, chunk=256).compile().memory_analysis().temp_size_in_bytes

    growth = temporary_bytes(rows_many) - temporary_bytes(rows_few)
    logits_of_the_further_rows = (rows_many - rows_few) * vocabulary * 4
    assert growth < logits_of_the_further_rows / 20


# What is reported.


def blocks_of(supervised_AW: np.ndarray, valid_A=None) -> Blocks:
    A, W = supervised_AW.shape
    zeros = jnp.zeros((1, A, W), jnp.int32)
    valid_A = np.ones(A, bool) if valid_A is None else valid_A
    return Blocks(
        jnp.zeros((1, A), jnp.int32), jnp.asarray(valid_A)[None], zeros, zeros, jnp.asarray(supervised_AW)[None]
    )


def sums_of(correct_AW, supervised_AW, valid_A=None, loss: float = 0.0):
    correct_AW, supervised_AW = np.asarray(correct_AW, np.float32), np.asarray(supervised_AW, bool)
    scores = SlotScores(jnp.zeros((1, *correct_AW.shape)), jnp.asarray(correct_AW)[None])
    weights_BAW = jnp.asarray(supervised_AW, jnp.float32)[None]
    return block_sums(jnp.float32(loss), weights_BAW, scores, blocks_of(supervised_AW, valid_A))


def test_accepted_prefix_is_the_leading_run_and_the_targets_token():
    """Runs of 3, 2, 1, 0 drafted tokens: 1.5 on average, 2.5 with the target's. Later hits don't count."""
    correct_AW = [[0, 1, 1, 1], [0, 1, 1, 0], [0, 1, 0, 1], [0, 0, 1, 1]]
    supervised_AW = np.array([[False, True, True, True]] * 4)
    metrics = report(sums_of(correct_AW, supervised_AW))
    assert metrics["accepted_prefix"] == 2.5
    assert metrics["position_accuracy"] == [0.75, 0.75, 0.75]
    assert metrics["accuracy"] == 0.75
    assert metrics["blocks"] == 4


def test_easy_and_hard_blocks_are_not_mixed_into_marginals():
    """Half the blocks all right, half all wrong: (8 + 1) / 2, where accuracies of 0.5 multiplied would give 2."""
    correct_AW = np.repeat([[1] * 8, [0] * 8], 5, axis=0)
    supervised_AW = np.broadcast_to(np.arange(8) > 0, (10, 8))
    assert report(sums_of(correct_AW, supervised_AW))["accepted_prefix"] == 4.5


def test_unsupervised_slots_end_the_run_and_padding_blocks_do_not_count():
    correct_AW = np.ones((3, 4))
    supervised_AW = [[False, True, False, False], [False, True, True, True], [False] * 4]
    metrics = report(sums_of(correct_AW, supervised_AW, valid_A=np.array([True, True, False])))
    assert metrics["accepted_prefix"] == (2 + 4) / 2
    assert metrics["position_accuracy"] == [1.0, 1.0, 1.0]
    assert metrics["blocks"] == 2


def test_sums_are_added_and_divided_once():
    supervised_AW = np.array([[False, True, True, True]])
    short = sums_of([[0, 1, 0, 0]], [[False, True, False, False]], loss=4.0)
    long = sums_of(np.repeat([[0, 1, 1, 1]], 9, axis=0), np.repeat(supervised_AW, 9, axis=0), loss=10.0)
    metrics = report(jax.tree.map(jnp.add, jax.tree.map(jnp.add, zero_sums(4), short), long))
    assert metrics["loss"] == pytest.approx(14.0 / 28)
    assert metrics["accepted_prefix"] == pytest.approx((2 + 9 * 4) / 10)


def test_a_report_of_nothing_is_zero_and_not_nan():
    metrics = report(zero_sums(4))
    assert metrics["loss"] == metrics["accepted_prefix"] == metrics["accuracy"] == 0
    assert metrics["position_accuracy"] == [0, 0, 0]

"""The teacher loss against a dense divergence, which hidden state teaches which slot, and the shortlist."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.training.anchors import make_blocks
from dflash_jax.training.teacher import teacher_hidden, teacher_loss

# float32 sums of 37 logits or 40 rows in another order, relative to values of order one
TOLERANCE = 1e-5
S, D = 37, 16


def random_rows(R: int):
    rng = np.random.default_rng(0)
    hidden_RD, teacher_RD, head_SD = (jnp.asarray(rng.normal(size=(n, D)), jnp.float32) for n in (R, R, S))
    return hidden_RD, teacher_RD, head_SD, jnp.asarray(rng.uniform(0.0, 1.0, R), jnp.float32)


def dense_divergence(hidden_RD, teacher_RD, head_SD, weights_R):
    p_RS = jax.nn.softmax(teacher_RD @ head_SD.T)
    q_RS = jax.nn.softmax(hidden_RD @ head_SD.T)
    return jnp.sum(weights_R[:, None] * p_RS * jnp.log(p_RS / q_RS))


@pytest.mark.parametrize(("R", "chunk"), [(40, 8), (40, 7), (1, 8), (5, 512)])
def test_value_and_gradients_equal_the_dense_divergence(R, chunk):
    rows = random_rows(R)
    loss = functools.partial(teacher_loss, chunk=chunk)
    (value, scores), gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))(*rows)
    wanted, wanted_RD = jax.jit(jax.value_and_grad(dense_divergence))(*rows)
    np.testing.assert_allclose(value, wanted, rtol=TOLERANCE)
    np.testing.assert_allclose(gradients[0], wanted_RD, atol=TOLERANCE)
    assert not np.any(gradients[1]) and not np.any(gradients[2])  # the target is frozen
    np.testing.assert_allclose(jnp.sum(scores.nats * rows[3]), wanted, rtol=TOLERANCE)
    same_R = jnp.argmax(rows[0] @ rows[2].T, -1) == jnp.argmax(rows[1] @ rows[2].T, -1)
    np.testing.assert_array_equal(scores.correct, same_R)


def test_agreeing_with_the_target_costs_nothing():
    hidden_RD, _, head_SD, weights_R = random_rows(9)
    loss, scores = teacher_loss(hidden_RD, hidden_RD, head_SD, weights_R, chunk=4)
    assert float(loss) == pytest.approx(0.0, abs=TOLERANCE)
    assert np.all(scores.correct == 1)


def test_a_slot_learns_from_the_state_that_chose_its_token():
    hidden_BTD = jnp.arange(10, dtype=jnp.float32)[None, :, None] * jnp.ones((1, 1, D))
    mask_BT = jnp.ones((1, 10), bool)
    blocks = make_blocks(jnp.zeros((1, 10), jnp.int32), mask_BT, jnp.array([[3, 8]]), jnp.ones((1, 2), bool), 4, 1)
    got_AW = np.asarray(teacher_hidden(hidden_BTD, blocks))[0, :, :, 0]
    np.testing.assert_array_equal(got_AW[0], [2, 3, 4, 5])  # slot k, at position a + k, was chosen at a + k − 1
    supervised_W = np.asarray(blocks.supervised)[0, 1]
    np.testing.assert_array_equal(got_AW[1][supervised_W], [8])  # position 9 is the last

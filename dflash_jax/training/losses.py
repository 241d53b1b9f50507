"""The drafting loss: decayed cross-entropy through the target's frozen head, without ever holding all logits."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp


class SlotScores(NamedTuple):
    """Of each slot [R]: its cross-entropy in nats, and whether the label was the most likely token (float32 0 or 1).

    Rows of zero weight may be skipped; they hold 0.
    """

    nats: jax.Array
    correct: jax.Array


def decay_weights(width: int, gamma: float | None) -> jax.Array:
    """Weight of each slot, float32 [W]: 0 for the anchor, then exp(−(k−1)/γ) (paper eq. 6); None: all 1."""
    slot_W = jnp.arange(width)
    decay_W = jnp.ones(width) if gamma is None else jnp.exp(-(slot_W - 1) / gamma)
    return jnp.where(slot_W == 0, 0.0, decay_W).astype(jnp.float32)


def default_gamma(width: int) -> float:
    """The paper's γ for a width: 7, 5, 4 for 16, 10, 8; between and beyond, the line through its ends (≥ 1)."""
    known = {16: 7.0, 10: 5.0, 8: 4.0}
    return known.get(width, max(1.0, 4.0 + (width - 8) * 3.0 / 8.0))


def block_loss(
    hidden_RD: jax.Array, head_VD: jax.Array, labels_R: jax.Array, weights_R: jax.Array, *, chunk: int = 512
) -> tuple[jax.Array, SlotScores]:
    """Σ weight · cross-entropy over R slots, with the logits of `chunk` slots in memory at a time.

    The head is frozen: gradient flows through it into hidden_RD and nowhere else. A chunk's gradient is formed while
    its logits are at hand, so the backward pass multiplies by a scalar and computes no logits again. Slots of zero
    weight are sorted behind the others, and chunks without any weight are skipped.

    Args:
        hidden_RD: final hidden states of the slots, any float dtype.
        head_VD: the target's output table.
        labels_R: int32 tokens. weights_R: float32, ≥ 0.

    Returns:
        The weighted sum, float32, not normalised (divide by the global Σ weight), and the scores of each slot.
    """
    return _weighted_sum(hidden_RD, jax.lax.stop_gradient(head_VD), labels_R, weights_R, chunk)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _weighted_sum(hidden_RD, head_VD, labels_R, weights_R, chunk):
    loss, scores, _ = _scan_chunks(hidden_RD, head_VD, labels_R, weights_R, chunk, with_gradient=False)
    return loss, scores


def _forward(hidden_RD, head_VD, labels_R, weights_R, chunk):
    loss, scores, gradient_RD = _scan_chunks(hidden_RD, head_VD, labels_R, weights_R, chunk, with_gradient=True)
    return (loss, scores), gradient_RD


def _backward(chunk, gradient_RD, cotangents):
    d_loss, _ = cotangents  # the scores are for reporting: no gradient flows through them
    return (d_loss * gradient_RD).astype(gradient_RD.dtype), None, None, None


_weighted_sum.defvjp(_forward, _backward)


def _scan_chunks(hidden_RD, head_VD, labels_R, weights_R, chunk: int, *, with_gradient: bool):
    R = hidden_RD.shape[0]
    chunk = min(chunk, R)
    count = math.ceil(R / chunk)
    order_R = jnp.argsort(weights_R <= 0, stable=True)

    def cut(x):
        padded = jnp.pad(x[order_R], [(0, count * chunk - R)] + [(0, 0)] * (x.ndim - 1))
        return padded.reshape(count, chunk, *x.shape[1:])

    def one_chunk(total, inputs):
        hidden_CD, labels_C, weights_C = inputs

        def work():
            return _chunk_scores(hidden_CD, head_VD, labels_C, weights_C, with_gradient)

        def skip():
            return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(work))

        loss, scores, gradient_CD = jax.lax.cond(jnp.any(weights_C > 0), work, skip)
        return total + loss, (scores, gradient_CD)

    loss, (scores, gradient) = jax.lax.scan(
        one_chunk, jnp.float32(0.0), (cut(hidden_RD), cut(labels_R), cut(weights_R))
    )

    def back_in_place(x):
        flat = x.reshape(count * chunk, *x.shape[2:])[:R]
        return jnp.zeros_like(flat).at[order_R].set(flat, unique_indices=True)

    return loss, jax.tree.map(back_in_place, scores), None if gradient is None else back_in_place(gradient)


def _chunk_scores(hidden_CD, head_VD, labels_C, weights_C, with_gradient: bool):
    logits_CV = jnp.einsum("cd,vd->cv", hidden_CD, head_VD.astype(hidden_CD.dtype), preferred_element_type=jnp.float32)
    top_C = logits_CV.max(axis=-1)
    exp_CV = jnp.exp(logits_CV - top_C[:, None])
    total_C = exp_CV.sum(axis=-1)
    of_label_C = jnp.take_along_axis(logits_CV, labels_C[:, None], axis=1)[:, 0]
    nats_C = top_C + jnp.log(total_C) - of_label_C
    correct_C = (jnp.argmax(logits_CV, axis=-1) == labels_C).astype(jnp.float32)
    loss = jnp.sum(weights_C * nats_C)
    if not with_gradient:
        return loss, SlotScores(nats_C, correct_C), None
    # d/d hidden Σ w·CE = (w · softmax) · head − w · head[label]
    scaled_CV = (exp_CV * (weights_C / total_C)[:, None]).astype(hidden_CD.dtype)
    pulled_CD = jnp.einsum("cv,vd->cd", scaled_CV, head_VD.astype(hidden_CD.dtype), preferred_element_type=jnp.float32)
    gradient_CD = pulled_CD - weights_C[:, None] * head_VD[labels_C].astype(jnp.float32)
    return loss, SlotScores(nats_C, correct_C), gradient_CD.astype(hidden_CD.dtype)

"""Learning from the target's own distribution instead of from the token it wrote.

Not the paper's loss. A soft label says more about each slot than a token does, and comparing distributions on the
tokens that answers really contain costs a fraction of the whole head: both help a short run on a small machine.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp

from dflash_jax.training.anchors import Blocks
from dflash_jax.training.losses import SlotScores


def teacher_hidden(hidden_BTD: jax.Array, blocks: Blocks) -> jax.Array:
    """For each slot the target's final hidden state one position before, [B, A, W, D]: what it chose the slot's token
    from. Slot 0 is given that of position 0 or more; it carries no loss."""
    W, T = blocks.tokens.shape[-1], hidden_BTD.shape[1]
    at_BAW = jnp.clip(blocks.anchors[..., None] + jnp.arange(W) - 1, 0, T - 1)
    return jax.vmap(lambda hidden_TD, at: hidden_TD[at])(hidden_BTD, at_BAW)


def teacher_loss(
    hidden_RD: jax.Array, teacher_RD: jax.Array, shortlist_SD: jax.Array, weights_R: jax.Array, *, chunk: int
) -> tuple[jax.Array, SlotScores]:
    """Σ weight · KL(target ‖ drafter) over R slots, both distributions taken over the shortlist.

    Only hidden_RD gets a gradient. The logits of `chunk` slots are in memory at a time; the backward pass computes them
    again.

    Args:
        hidden_RD, teacher_RD: final hidden states of the drafter and of the target for the same slots.
        shortlist_SD: rows of the output table.
        weights_R: float32, ≥ 0.

    Returns:
        The weighted sum, float32, not normalised; and of each slot its divergence in nats and whether drafter and
        target prefer the same token of the shortlist.
    """
    R = hidden_RD.shape[0]
    chunk = min(chunk, R)
    count = math.ceil(R / chunk)

    def cut(x):
        padded = jnp.pad(x, [(0, count * chunk - R)] + [(0, 0)] * (x.ndim - 1))
        return padded.reshape(count, chunk, *x.shape[1:])

    scored = functools.partial(_chunk, shortlist_SD=jax.lax.stop_gradient(shortlist_SD))
    inputs = cut(hidden_RD), cut(jax.lax.stop_gradient(teacher_RD)), cut(weights_R)
    loss, scores = jax.lax.scan(jax.checkpoint(scored), jnp.float32(0.0), inputs)
    return loss, jax.tree.map(lambda x: jax.lax.stop_gradient(x.reshape(-1)[:R]), scores)


def _chunk(total, inputs, *, shortlist_SD):
    hidden_CD, teacher_CD, weights_C = inputs

    def logits(x_CD):
        head_SD = shortlist_SD.astype(x_CD.dtype)
        return jnp.einsum("cd,sd->cs", x_CD, head_SD, preferred_element_type=jnp.float32)

    ours_CS, theirs_CS = (jax.nn.log_softmax(logits(x_CD)) for x_CD in (hidden_CD, teacher_CD))
    nats_C = jnp.sum(jnp.exp(theirs_CS) * (theirs_CS - ours_CS), axis=-1)
    same_C = (jnp.argmax(ours_CS, axis=-1) == jnp.argmax(theirs_CS, axis=-1)).astype(jnp.float32)
    return total + jnp.sum(weights_C * nats_C), SlotScores(nats_C, same_C)

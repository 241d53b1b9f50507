"""Which blocks a step trains on: anchors drawn on the device from the seed, labels and weights of their slots."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Blocks(NamedTuple):
    """The blocks of a batch.

    anchors: int32 [B, A], sorted in each row; padding blocks have 0.
    valid: bool [B, A], false for padding blocks.
    tokens: int32 [B, A, W], the anchor's token and W − 1 mask tokens.
    labels: int32 [B, A, W], the token at each slot's position.
    supervised: bool [B, A, W], slots that carry loss; never slot 0.
    """

    anchors: jax.Array
    valid: jax.Array
    tokens: jax.Array
    labels: jax.Array
    supervised: jax.Array


def valid_anchors(loss_mask_BT: jax.Array) -> jax.Array:
    """Positions a block may start at, bool [B, T]: supervised, followed by a supervised token, and not position 0,
    which has no context to draft from."""
    next_BT = jnp.pad(loss_mask_BT[:, 1:], ((0, 0), (0, 1)))
    return (loss_mask_BT & next_BT).at[:, 0].set(False)


def step_keys(seed: int, step: jax.Array, rows_B: jax.Array) -> jax.Array:
    """A PRNG key for each row of a step: a function of seed, step and the row's number in the data set alone.

    So the draw of a row does not depend on the device it is on nor on the rows beside it.
    """
    key = jax.random.fold_in(jax.random.key(seed), step)
    return jax.vmap(lambda row: jax.random.fold_in(key, row))(rows_B)


def draw_anchors(keys_B: jax.Array, loss_mask_BT: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Uniform draw without replacement of up to `count` valid anchors a row (paper section 4).

    Returns:
        anchors int32 [B, count], sorted, and valid bool [B, count]; where a row has fewer valid anchors the rest is
        padding (anchor 0, not valid) at its end.
    """
    T = loss_mask_BT.shape[1]
    candidates_BT = valid_anchors(loss_mask_BT)
    # Every candidate gets random bits; the `count` lowest are a uniform subset. Bits are drawn by position, so that
    # a row padded to another length draws the same anchors.
    draw = jax.vmap(lambda key, position: jax.random.bits(jax.random.fold_in(key, position)), in_axes=(None, 0))
    bits_BT = jax.vmap(draw, in_axes=(0, None))(keys_B, jnp.arange(T)) >> 1
    rank_BT = jnp.where(candidates_BT, bits_BT, jnp.uint32(2**32 - 1))
    picked_BA = jnp.argsort(rank_BT, axis=1)[:, :count]
    valid_BA = jnp.take_along_axis(candidates_BT, picked_BA, axis=1)
    anchors_BA = jnp.sort(jnp.where(valid_BA, picked_BA, T), axis=1)
    anchors_BA = jnp.pad(anchors_BA, ((0, 0), (0, max(0, count - T))), constant_values=T)
    valid_BA = anchors_BA < T
    return jnp.where(valid_BA, anchors_BA, 0).astype(jnp.int32), valid_BA


def spread_anchors(loss_mask_BT: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """`count` fixed anchors a row, evenly spread over its valid ones: the same at every evaluation."""
    T = loss_mask_BT.shape[1]
    candidates_BT = valid_anchors(loss_mask_BT)
    total_B1 = candidates_BT.sum(axis=1, keepdims=True)
    ordered_BT = jnp.argsort(~candidates_BT, axis=1, stable=True)  # valid positions first, in order
    index_BA = jnp.arange(count)[None]
    spread_BA = jnp.where(total_B1 > count, (index_BA * total_B1) // count, index_BA)
    valid_BA = index_BA < total_B1
    anchors_BA = jnp.take_along_axis(ordered_BT, jnp.minimum(spread_BA, T - 1), axis=1)
    return jnp.where(valid_BA, anchors_BA, 0).astype(jnp.int32), valid_BA


def make_blocks(
    tokens_BT: jax.Array, loss_mask_BT: jax.Array, anchors_BA: jax.Array, valid_BA: jax.Array, width: int, mask_id: int
) -> Blocks:
    """Cuts the blocks out of the sequences.

    Supervision of a block stops at its first unsupervised token, so nothing is learned across a turn or a document.
    """
    T = tokens_BT.shape[1]
    positions_BAW = anchors_BA[..., None] + jnp.arange(width)
    inside_BAW = jnp.minimum(positions_BAW, T - 1)
    labels_BAW = jax.vmap(lambda tokens, at: tokens[at])(tokens_BT, inside_BAW)
    mask_BAW = jax.vmap(lambda mask, at: mask[at])(loss_mask_BT, inside_BAW) & (positions_BAW < T)
    run_BAW = jnp.cumprod(mask_BAW.astype(jnp.int32), axis=-1).astype(bool)
    supervised_BAW = run_BAW & valid_BA[..., None] & (jnp.arange(width) > 0)
    tokens_BAW = jnp.where(jnp.arange(width) == 0, labels_BAW, mask_id)
    return Blocks(anchors_BA, valid_BA, tokens_BAW, labels_BAW, supervised_BAW)


def cut_at_random(keys_B: jax.Array, blocks: Blocks, weights_W: jax.Array) -> Blocks:
    """Ends each block's supervision at a random slot, so that slot k keeps its loss with probability weights_W[k].

    With weight 1 for what is kept, the expected sum of losses is the weighted sum over all slots (Σ weight, which
    it is divided by, then varies from step to step), and the head runs on Σ weights of W − 1 slots only. The
    weights must not rise from slot 1 on, as the paper's decay does not.
    """
    past_any_position = 2**31 - 1  # a draw of its own, apart from those that chose the anchors
    A = blocks.anchors.shape[1]
    uniform_BA = jax.vmap(lambda key: jax.random.uniform(jax.random.fold_in(key, past_any_position), (A,)))(keys_B)
    return blocks._replace(supervised=blocks.supervised & (uniform_BA[..., None] < weights_W))

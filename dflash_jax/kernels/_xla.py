"""Block attention in plain XLA: W × W block attention first, then the context in key chunks, one running softmax.

Rows of a block: the W slots times the G = N/K queries of a group, folded together (letter R = W·G), so that every
product is a plain batched matrix product over (B, K) or (B, K, A). Score memory is A·R × CHUNK for a head.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

CHUNK = 512  # context keys a step: bounds the score memory; not tuned for any device
MASKED = -1e30


class _Context(NamedTuple):
    """The context cut into C chunks: keys and values [C, B, K, CHUNK, H] and their positions [C, CHUNK]."""

    k: jax.Array
    v: jax.Array
    positions: jax.Array


def forward(q_BAWNH, k_block_BAWKH, v_block_BAWKH, k_context_BSKH, v_context_BSKH, starts_BA, ends_BA, mask, scale):
    """Returns the output [B, A, W, N, H] and the log-sum-exp of every row, float32 [B, N, A·W]."""
    K = k_block_BAWKH.shape[3]
    q_BKARH = _fold(q_BAWNH, K) * jnp.asarray(scale, q_BAWNH.dtype)
    k_BKAWH, v_BKAWH = _heads_first(k_block_BAWKH), _heads_first(v_block_BAWKH)
    low_BAR, high_BAR = _row_ranges(q_BAWNH.shape, K, starts_BA, ends_BA, mask)
    chunks = _cut(k_context_BSKH, v_context_BSKH)

    scores_BKARW = _block_scores(q_BKARH, k_BKAWH, mask)
    top_BKAR = scores_BKARW.max(-1)
    weights_BKARW = jnp.exp(scores_BKARW - top_BKAR[..., None])
    start = (top_BKAR, weights_BKARW.sum(-1), _product("bkarw,bkawh->bkarh", weights_BKARW, v_BKAWH))

    def add_chunk(carry, chunk: _Context):
        top_BKAR, total_BKAR, mixed_BKARH = carry
        scores_BKARC = _context_scores(q_BKARH, chunk, low_BAR, high_BAR)
        new_top_BKAR = jnp.maximum(top_BKAR, scores_BKARC.max(-1))
        weights_BKARC = jnp.exp(scores_BKARC - new_top_BKAR[..., None])
        shrink_BKAR = jnp.exp(top_BKAR - new_top_BKAR)
        mixed_BKARH = mixed_BKARH * shrink_BKAR[..., None] + _product("bkarc,bkch->bkarh", weights_BKARC, chunk.v)
        return (new_top_BKAR, total_BKAR * shrink_BKAR + weights_BKARC.sum(-1), mixed_BKARH), None

    (top_BKAR, total_BKAR, mixed_BKARH), _ = jax.lax.scan(add_chunk, start, chunks)
    real_B1A1 = (ends_BA > starts_BA)[:, None, :, None]
    out_BKARH = jnp.where(real_B1A1[..., None], mixed_BKARH / total_BKAR[..., None], 0.0)
    lse_BKAR = jnp.where(real_B1A1, top_BKAR + jnp.log(total_BKAR), jnp.inf)  # +inf: exp(score − lse) is 0
    lse_BAWN = _unfold(lse_BKAR[..., None], (*q_BAWNH.shape[:4], 1))[..., 0]
    lse_BNR = lse_BAWN.transpose(0, 3, 1, 2).reshape(*lse_BAWN.shape[::3], -1)
    return _unfold(out_BKARH, q_BAWNH.shape).astype(q_BAWNH.dtype), lse_BNR


def backward(q, k_block, v_block, k_context, v_context, starts, ends, out, lse_BNR, d_out, mask, scale):
    """Gradients of the five arrays, each in its array's shape and dtype. Scores are recomputed from the saved lse."""
    K, S = k_block.shape[3], k_context.shape[1]
    q_BKARH = _fold(q, K) * jnp.asarray(scale, q.dtype)
    k_BKAWH, v_BKAWH = _heads_first(k_block), _heads_first(v_block)
    low_BAR, high_BAR = _row_ranges(q.shape, K, starts, ends, mask)
    d_out_BKARH = _fold(d_out, K)
    lse_BAWN = lse_BNR.reshape(*lse_BNR.shape[:2], *q.shape[1:3]).transpose(0, 2, 3, 1)
    lse_BKAR = _fold(lse_BAWN[..., None], K)[..., 0]
    delta_BKAR = jnp.sum(d_out_BKARH.astype(jnp.float32) * _fold(out, K).astype(jnp.float32), -1)

    def score_gradients(scores, d_weights):
        probs = jnp.exp(scores - lse_BKAR[..., None])
        return probs, (probs * (d_weights - delta_BKAR[..., None])).astype(q.dtype)

    d_weights_BKARW = _product("bkarh,bkawh->bkarw", d_out_BKARH, v_BKAWH)
    probs_BKARW, d_scores_BKARW = score_gradients(_block_scores(q_BKARH, k_BKAWH, mask), d_weights_BKARW)
    dq_BKARH = _product("bkarw,bkawh->bkarh", d_scores_BKARW, k_BKAWH)
    dk_BKAWH = _product("bkarw,bkarh->bkawh", d_scores_BKARW, q_BKARH)
    dv_BKAWH = _product("bkarw,bkarh->bkawh", probs_BKARW, d_out_BKARH)

    def add_chunk(dq_BKARH, chunk: _Context):
        d_weights_BKARC = _product("bkarh,bkch->bkarc", d_out_BKARH, chunk.v)
        scores_BKARC = _context_scores(q_BKARH, chunk, low_BAR, high_BAR)
        probs_BKARC, d_scores_BKARC = score_gradients(scores_BKARC, d_weights_BKARC)
        dk_BKCH = _product("bkarc,bkarh->bkch", d_scores_BKARC, q_BKARH)
        dv_BKCH = _product("bkarc,bkarh->bkch", probs_BKARC, d_out_BKARH)
        return dq_BKARH + _product("bkarc,bkch->bkarh", d_scores_BKARC, chunk.k), (dk_BKCH, dv_BKCH)

    dq_BKARH, (dk_chunks, dv_chunks) = jax.lax.scan(add_chunk, dq_BKARH, _cut(k_context, v_context))
    return (
        (_unfold(dq_BKARH, q.shape) * scale).astype(q.dtype),
        _heads_last(dk_BKAWH).astype(k_block.dtype),
        _heads_last(dv_BKAWH).astype(v_block.dtype),
        _join(dk_chunks, S).astype(k_context.dtype),
        _join(dv_chunks, S).astype(v_context.dtype),
    )


def _product(equation: str, weights, values) -> jax.Array:
    """A batched product in the dtype of the values, summed in float32."""
    dtype = values.dtype
    return jnp.einsum(equation, weights.astype(dtype), values, preferred_element_type=jnp.float32)


def _block_scores(q_BKARH, k_BKAWH, mask) -> jax.Array:
    scores_BKARW = _product("bkarh,bkawh->bkarw", q_BKARH, k_BKAWH)
    R, W = scores_BKARW.shape[-2:]
    slot_R, key_slot_W = jnp.arange(R) // (R // W), jnp.arange(W)
    allowed_RW = jnp.ones((R, W), bool)
    if mask.causal_in_block:
        allowed_RW &= key_slot_W[None, :] <= slot_R[:, None]
    if mask.window is not None:
        allowed_RW &= slot_R[:, None] - key_slot_W[None, :] < mask.window
    return jnp.where(allowed_RW, scores_BKARW, MASKED)


def _context_scores(q_BKARH, chunk: _Context, low_BAR, high_BAR) -> jax.Array:
    scores_BKARC = _product("bkarh,bkch->bkarc", q_BKARH, chunk.k)
    allowed_BARC = (chunk.positions >= low_BAR[..., None]) & (chunk.positions < high_BAR[..., None])
    return jnp.where(allowed_BARC[:, None], scores_BKARC, MASKED)


def _row_ranges(q_shape, K: int, starts_BA, ends_BA, mask) -> tuple[jax.Array, jax.Array]:
    """First and one past the last context position that each row reads, int32 [B, A, R]."""
    B, A, W, N, _ = q_shape
    slot_R = jnp.arange(W * (N // K)) // (N // K)
    high_BAR = jnp.broadcast_to(ends_BA[..., None], (B, A, slot_R.size))
    low_BAR = jnp.broadcast_to(starts_BA[..., None], high_BAR.shape)
    if mask.window is not None:
        low_BAR = jnp.maximum(low_BAR, high_BAR + slot_R - mask.window + 1)
    return low_BAR, high_BAR


def _cut(k_BSKH, v_BSKH) -> _Context:
    """Pads the context to whole chunks; padding lies at positions ≥ S, which no range reaches."""
    B, S, K, H = k_BSKH.shape
    size = min(CHUNK, S)
    count = -(-S // size)

    def cut(x_BSKH):
        padded = jnp.pad(x_BSKH, ((0, 0), (0, count * size - S), (0, 0), (0, 0)))
        return padded.reshape(B, count, size, K, H).transpose(1, 0, 3, 2, 4)

    return _Context(cut(k_BSKH), cut(v_BSKH), jnp.arange(count * size).reshape(count, size))


def _join(chunks_CBKSH, S: int) -> jax.Array:
    C, B, K, size, H = chunks_CBKSH.shape
    return chunks_CBKSH.transpose(1, 0, 3, 2, 4).reshape(B, C * size, K, H)[:, :S]


def _fold(x_BAWNH, K: int) -> jax.Array:
    B, A, W, N, H = x_BAWNH.shape
    return x_BAWNH.reshape(B, A, W, K, N // K, H).transpose(0, 3, 1, 2, 4, 5).reshape(B, K, A, W * (N // K), H)


def _unfold(x_BKARH, q_shape) -> jax.Array:
    B, A, W, N, H = q_shape
    K = x_BKARH.shape[1]
    return x_BKARH.reshape(B, K, A, W, N // K, H).transpose(0, 2, 3, 1, 4, 5).reshape(q_shape)


def _heads_first(x_BAWKH) -> jax.Array:
    return x_BAWKH.transpose(0, 3, 1, 2, 4)


def _heads_last(x_BKAWH) -> jax.Array:
    return x_BKAWH.transpose(0, 2, 3, 1, 4)

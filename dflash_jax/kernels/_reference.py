"""Dense oracle of block attention: builds the whole mask, in float32. For tests, never for work."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def dense_mask(starts_BA, ends_BA, context_length: int, width: int, mask) -> jax.Array:
    """True where slot (A, W) may read key (S context keys, then A·W block slots): bool [B, A, W, S + A·W]."""
    B, A = ends_BA.shape
    position_BAW = ends_BA[:, :, None] + jnp.arange(width)
    key_S = jnp.arange(context_length)
    context = (key_S >= starts_BA[:, :, None, None]) & (key_S < ends_BA[:, :, None, None])
    context = jnp.broadcast_to(context, (B, A, width, context_length))
    same_block = jnp.eye(A, dtype=bool)[None, :, None, :, None]
    block = jnp.broadcast_to(same_block, (B, A, width, A, width))
    slot, key_slot = jnp.arange(width)[:, None], jnp.arange(width)[None, :]
    if mask.causal_in_block:
        block = block & (key_slot <= slot)[None, None, :, None, :]
    if mask.window is not None:
        context = context & (position_BAW[..., None] - key_S < mask.window)
        block = block & (slot - key_slot < mask.window)[None, None, :, None, :]
    both = jnp.concatenate([context, block.reshape(B, A, width, A * width)], axis=-1)
    return both & (ends_BA > starts_BA)[:, :, None, None]


def forward(q_BAWNH, k_block_BAWKH, v_block_BAWKH, k_context_BSKH, v_context_BSKH, starts_BA, ends_BA, mask, scale):
    """Same contract as block_attention, differentiated by JAX itself."""
    B, A, W, N, H = q_BAWNH.shape
    S, K = k_context_BSKH.shape[1:3]
    groups = N // K

    def all_keys(context_BSKH, block_BAWKH):
        joined = jnp.concatenate([context_BSKH, block_BAWKH.reshape(B, A * W, K, H)], axis=1)
        return jnp.repeat(joined.astype(jnp.float32), groups, axis=2)

    k, v = all_keys(k_context_BSKH, k_block_BAWKH), all_keys(v_context_BSKH, v_block_BAWKH)
    allowed = dense_mask(starts_BA, ends_BA, S, W, mask)[:, :, :, None, :]
    scores = jnp.einsum("bawnh,bsnh->bawns", q_BAWNH.astype(jnp.float32) * scale, k)
    top = jax.lax.stop_gradient(jnp.max(jnp.where(allowed, scores, -1e30), axis=-1, keepdims=True))
    weights = jnp.where(allowed, jnp.exp(jnp.where(allowed, scores, 0.0) - jnp.where(allowed, top, 0.0)), 0.0)
    total = weights.sum(-1, keepdims=True)
    probs = weights / jnp.where(total > 0, total, 1.0)
    return jnp.einsum("bawns,bsnh->bawnh", probs, v).astype(q_BAWNH.dtype)

"""Dense attention with grouped queries, for the target and for decoding (training has its own kernel)."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from dflash_jax.sharding import shares

QUERY_CHUNK = 512
MASKED = -1e30  # finite, so that a row that sees nothing gives a uniform softmax and not NaN


class Segment(NamedTuple):
    """Keys and values [B, K, S, H], heads first as in the cache, and mask [B, T, S]: may query t read key s."""

    keys: jax.Array
    values: jax.Array
    mask: jax.Array


def grouped_attention(q_BTNH: jax.Array, segments: list[Segment], scale: float) -> jax.Array:
    """One softmax over all segments' keys, in float32; returns [B, T, N, H] in the dtype of q.

    N is a multiple of K and keys are never repeated. Segments are joined as scores, so that a long cache is never
    copied to put a short block behind it. Of many queries the scores of QUERY_CHUNK, on every device that has some of
    them, are in memory at a time; of numbers that such chunks don't divide, all.
    """
    B, T, N, H = q_BTNH.shape
    parts = shares("positions", T)
    chunks, rest = divmod(T, parts * QUERY_CHUNK)
    if rest or chunks < 2:
        return _attend(q_BTNH, segments, scale)

    def cut(x_BT: jax.Array) -> jax.Array:
        """[chunks, B, parts · QUERY_CHUNK, …]: of every device's part a chunk."""
        x = x_BT.reshape(B, parts, chunks, QUERY_CHUNK, *x_BT.shape[2:]).swapaxes(1, 2).swapaxes(0, 1)
        return x.reshape(chunks, B, parts * QUERY_CHUNK, *x_BT.shape[2:])

    def one_chunk(chunk) -> jax.Array:
        q, masks = chunk
        of_chunk = [segment._replace(mask=mask) for segment, mask in zip(segments, masks, strict=True)]
        return _attend(q, of_chunk, scale)

    masks = [cut(jnp.broadcast_to(segment.mask, (B, *segment.mask.shape[1:]))) for segment in segments]
    mixed = jax.lax.map(one_chunk, (cut(q_BTNH), masks)).reshape(chunks, B, parts, QUERY_CHUNK, N, H)
    return mixed.transpose(1, 2, 0, 3, 4, 5).reshape(B, T, N, H)


def _attend(q_BTNH: jax.Array, segments: list[Segment], scale: float) -> jax.Array:
    B, T, N, H = q_BTNH.shape
    K = segments[0].keys.shape[1]
    G = N // K
    q_BKRH = (q_BTNH * scale).reshape(B, T, K, G, H).transpose(0, 2, 1, 3, 4).reshape(B, K, T * G, H)

    def scores(segment: Segment) -> jax.Array:
        products_BKRS = jnp.einsum("bkrh,bksh->bkrs", q_BKRH, segment.keys, preferred_element_type=jnp.float32)
        return jnp.where(jnp.repeat(segment.mask, G, axis=1)[:, None], products_BKRS, MASKED)

    probs_BKRS = jax.nn.softmax(jnp.concatenate([scores(segment) for segment in segments], axis=-1), axis=-1)
    mixed_BKRH, first = jnp.float32(0.0), 0
    for segment in segments:
        last = first + segment.keys.shape[2]
        part_BKRS = probs_BKRS[..., first:last].astype(segment.values.dtype)
        mixed_BKRH += jnp.einsum("bkrs,bksh->bkrh", part_BKRS, segment.values, preferred_element_type=jnp.float32)
        first = last
    return mixed_BKRH.reshape(B, K, T, G, H).transpose(0, 2, 1, 3, 4).reshape(B, T, N, H).astype(q_BTNH.dtype)

"""Attention of packed blocks: each block reads its own range of the context and its own slots, nothing else.

This is the training attention of the drafter (method: paper section 4, "random anchors"): A blocks of W slots share
one sequence's context features. The dense (A·W) × (S + A·W) score grid is never built.
"""

from __future__ import annotations

import functools
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from dflash_jax.kernels import _reference, _xla

Backend = Literal["auto", "reference", "xla"]


class BlockMask(NamedTuple):
    """The static half of the mask. Hashable, so that it can be a compile-time argument.

    window: a slot at position p reads positions > p − window only (None: no limit).
    causal_in_block: a slot does not read later slots of its block.
    """

    window: int | None = None
    causal_in_block: bool = False


def block_attention(
    q_BAWNH: jax.Array,
    k_block_BAWKH: jax.Array,
    v_block_BAWKH: jax.Array,
    k_context_BSKH: jax.Array,
    v_context_BSKH: jax.Array,
    starts_BA: jax.Array,
    ends_BA: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    causal_in_block: bool = False,
    backend: Backend = "auto",
) -> jax.Array:
    """Attention of every block slot over context keys [start, end) of its block and over its block's slots.

    The block's anchor stands at position `end`: slot k is at position end + k, which is what `window` measures from.
    A block with end ≤ start is padding: its output is 0 and it sends no gradient.

    Args:
        q_BAWNH: rotated queries; N is a multiple of K (grouped queries; keys are not repeated).
        k_block_BAWKH, v_block_BAWKH: rotated keys and values of the block slots.
        k_context_BSKH, v_context_BSKH: rotated keys and values of the context.
        starts_BA, ends_BA: int32 bounds with 0 ≤ start and end ≤ S.
        scale: factor on the scores, usually H**-0.5.
        window, causal_in_block: see BlockMask.
        backend: "xla" (chunked, any platform), "reference" (dense, an oracle for tests), "auto".

    Returns:
        [B, A, W, N, H] in the dtype of q. Softmax and sums are float32.

    Raises:
        ValueError: for shapes that do not fit, or an unknown backend.
    """
    arrays = (q_BAWNH, k_block_BAWKH, v_block_BAWKH, k_context_BSKH, v_context_BSKH)
    _check_shapes(*arrays, starts_BA, ends_BA, window)
    mask = BlockMask(window, causal_in_block)
    if backend == "reference":
        return _reference.forward(*arrays, starts_BA, ends_BA, mask, scale)
    if backend not in ("auto", "xla"):
        raise ValueError(f"backend={backend!r} is not known; use auto, xla or reference")
    return _chunked(*arrays, starts_BA, ends_BA, mask, scale)


@functools.partial(jax.custom_vjp, nondiff_argnums=(7, 8))
def _chunked(q, k_block, v_block, k_context, v_context, starts, ends, mask: BlockMask, scale: float):
    return _xla.forward(q, k_block, v_block, k_context, v_context, starts, ends, mask, scale)[0]


def _chunked_forward(q, k_block, v_block, k_context, v_context, starts, ends, mask, scale):
    out, lse = _xla.forward(q, k_block, v_block, k_context, v_context, starts, ends, mask, scale)
    return out, (q, k_block, v_block, k_context, v_context, starts, ends, out, lse)


def _chunked_backward(mask, scale, saved, d_out):
    return (*_xla.backward(*saved, d_out=d_out, mask=mask, scale=scale), None, None)


_chunked.defvjp(_chunked_forward, _chunked_backward)


def _check_shapes(q, k_block, v_block, k_context, v_context, starts, ends, window) -> None:
    for name, array, letters in (("q", q, "BAWNH"), ("k_block", k_block, "BAWKH"), ("k_context", k_context, "BSKH")):
        if array.ndim != len(letters) or 0 in array.shape:
            raise ValueError(f"{name} has shape {array.shape}; it must be [{', '.join(letters)}] without an empty axis")
    B, A, W, N, H = q.shape
    K, S = k_block.shape[3], k_context.shape[1]
    expected = {"k_block": (k_block, (B, A, W, K, H)), "v_block": (v_block, (B, A, W, K, H))}
    expected |= {"k_context": (k_context, (B, S, K, H)), "v_context": (v_context, (B, S, K, H))}
    expected |= {"starts": (starts, (B, A)), "ends": (ends, (B, A))}
    for name, (array, shape) in expected.items():
        if array.shape != shape:
            raise ValueError(f"{name} has shape {array.shape}; with q of {q.shape} it must be {shape}")
    if N % K:
        raise ValueError(f"{N} query heads are not a multiple of {K} key/value heads")
    if window is not None and window < 1:
        raise ValueError(f"window={window} must be at least 1 or None")
    if not (jnp.issubdtype(starts.dtype, jnp.integer) and jnp.issubdtype(ends.dtype, jnp.integer)):
        raise ValueError(f"starts and ends must be integers, not {starts.dtype} and {ends.dtype}")

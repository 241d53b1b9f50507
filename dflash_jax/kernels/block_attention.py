"""Attention of packed blocks: each block reads its own range of the context and its own slots, nothing else.

This is the training attention of the drafter (method: paper section 4, "random anchors"): A blocks of W slots share
one sequence's context features. The dense (A·W) × (S + A·W) score grid is never built.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from dflash_jax.kernels import _backends, _reference
from dflash_jax.kernels._backends import Backend
from dflash_jax.sharding import current_mesh, dividing, shares

# What the backward pass reads besides the arguments, by the names that a jax.checkpoint policy knows them by:
# with save_only_these_names(*SAVED) the forward pass is not repeated.
SAVED = ("block_attention_out", "block_attention_lse")


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
        backend: "xla" (chunked, any platform), "tpu" (Pallas kernels), "gpu" (Pallas kernels for Hopper GPUs, not run
            on one yet), "reference" (dense, an oracle for tests), or "auto": what suits the platform that the program
            is compiled for, which is never "gpu" so far. Arrays that a backend cannot take are left to "xla", and the
            log says so.

    Returns:
        [B, A, W, N, H] in the dtype of q. Softmax and sums are float32.

    Raises:
        ValueError: for shapes that do not fit, or an unknown backend.
        NotImplementedError: when it is differentiated twice, except with "reference".
    """
    arrays = (q_BAWNH, k_block_BAWKH, v_block_BAWKH, k_context_BSKH, v_context_BSKH)
    _check_shapes(*arrays, starts_BA, ends_BA, window)
    mask = BlockMask(window, causal_in_block)
    if backend == "reference":
        return _reference.forward(*arrays, starts_BA, ends_BA, mask, scale)
    attend = functools.partial(_attend, mask=mask, scale=scale, backend=_backends.choose(backend, *arrays))
    return _on_own_share(attend, arrays, (starts_BA, ends_BA))


def _on_own_share(attend, arrays, ranges) -> jax.Array:
    """Every device attends for its own rows, blocks and heads, to the whole context of its rows: a compiler can't
    divide kernels."""
    mesh = current_mesh()
    if mesh is None:
        return attend(*arrays, *ranges)
    B, A, _, K, _ = arrays[1].shape
    rows, blocks, heads = (dividing(mesh, *axis) or None for axis in (("rows", B), ("blocks", A), ("heads", K)))
    # Axes of one device are named, too: over others the gradients are summed, as they must be where blocks are divided.
    context = blocks if shares("blocks", A) == 1 else None
    slots, keys, of_blocks = (
        PartitionSpec(rows, *axes) for axes in ((blocks, None, heads), (context, heads), (blocks,))
    )
    return jax.shard_map(
        attend,
        mesh=mesh,
        in_specs=(slots, slots, slots, keys, keys, of_blocks, of_blocks),
        out_specs=slots,
        check_vma=False,  # Pallas kernels do not say how their results vary over devices
    )(*arrays, *ranges)


@functools.partial(jax.custom_vjp, nondiff_argnums=(7, 8, 9))
def _attend(q, k_block, v_block, k_context, v_context, starts, ends, mask: BlockMask, scale: float, backend: str):
    return _first_order("forward", mask, scale, backend)(q, k_block, v_block, k_context, v_context, starts, ends)[0]


def _attend_forward(q, k_block, v_block, k_context, v_context, starts, ends, mask, scale, backend):
    arguments = (q, k_block, v_block, k_context, v_context, starts, ends)
    out, lse = map(checkpoint_name, _first_order("forward", mask, scale, backend)(*arguments), SAVED)
    return out, (*arguments, out, lse)


def _attend_backward(mask, scale, backend, saved, d_out):
    return (*_first_order("backward", mask, scale, backend)(*saved, d_out), None, None)


_attend.defvjp(_attend_forward, _attend_backward)


def _first_order(pass_name, mask: BlockMask, scale: float, backend: str):
    """A pass whose own derivative is refused: whoever asks for it differentiates block attention a second time."""
    run = jax.custom_jvp(functools.partial(_backends.run, pass_name, backend, mask=mask, scale=scale))

    @run.defjvp
    def refuse(primals, tangents):
        raise NotImplementedError('block attention has no second derivative; backend="reference" has one')

    return run


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

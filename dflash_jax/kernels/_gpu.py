"""Block attention as Pallas Mosaic GPU kernels for Hopper GPUs (compute capability 9.0), and which calls they can do.

They are right in an interpreter and compile for an H200; nobody has run them on a GPU yet (docs/kernel.md).
"""

from __future__ import annotations

import jax.numpy as jnp

from dflash_jax.kernels._gpu_backward import backward
from dflash_jax.kernels._gpu_forward import forward

__all__ = ["backward", "forward", "unsupported"]

HEAD_SIZES = (64, 128)  # whole swizzled tiles of 64; larger ones do not fit into registers
MAX_WIDTH = 64


def unsupported(q, k_block, v_block, k_context, v_context) -> str | None:
    """Why the kernels cannot take these arrays, or None."""
    dtypes = {array.dtype for array in (q, k_block, v_block, k_context, v_context)}
    if dtypes != {jnp.dtype(jnp.bfloat16)}:
        return f"dtypes {sorted(map(str, dtypes))}: all five arrays must be bfloat16"
    _, _, W, _, H = q.shape
    if H not in HEAD_SIZES:
        return f"head size {H}: it must be one of {HEAD_SIZES}"
    if W > MAX_WIDTH:
        return f"block width {W}: at most {MAX_WIDTH}"
    return None

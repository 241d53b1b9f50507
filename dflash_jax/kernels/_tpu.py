"""Block attention as Pallas kernels for TPU, and which calls they can do.

The kernels follow the default matmul precision for float32 (one bfloat16 pass on TPU unless it is raised, as for every
other product there). On other platforms they run under `jax.experimental.pallas.tpu.force_tpu_interpret_mode()` only.
"""

from __future__ import annotations

import jax.numpy as jnp

from dflash_jax.kernels import _tpu_layout
from dflash_jax.kernels._tpu_backward import backward
from dflash_jax.kernels._tpu_forward import forward

__all__ = ["backward", "forward", "unsupported"]

DTYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32))
MAX_HEAD_SIZE = 256
MAX_WIDTH = 128
MAX_ROWS_BYTES = 2**19  # of a query tile of q: several of these and the scores share 16 MiB of vector memory
MAX_VISITS = 2**16  # three int32 lists of them are 768 KiB of the 1 MiB of scalar memory


def unsupported(q, k_block, v_block, k_context, v_context) -> str | None:
    """Why the kernels cannot take these arrays, or None."""
    dtypes = {array.dtype for array in (q, k_block, v_block, k_context, v_context)}
    if len(dtypes) > 1 or q.dtype not in DTYPES:
        return f"dtypes {sorted(map(str, dtypes))}: all five arrays must be bfloat16 or all float32"
    _, _, W, _, H = q.shape
    if H > MAX_HEAD_SIZE or H % 8:
        return f"head size {H}: it must be a multiple of 8 up to {MAX_HEAD_SIZE}"
    if W > MAX_WIDTH:
        return f"block width {W}: at most {MAX_WIDTH}"
    to = _tpu_layout.layout(q, k_context)
    if (size := to.rows * H * q.dtype.itemsize) > MAX_ROWS_BYTES:
        return (
            f"{to.G} queries a key head: a query tile of {to.rows} rows has {size} bytes, at most {MAX_ROWS_BYTES} fit"
        )
    if (visits := to.B * to.query_tiles * to.key_tiles) > MAX_VISITS:
        return f"{visits} tile pairs (batch × blocks × context): at most {MAX_VISITS}"
    return None

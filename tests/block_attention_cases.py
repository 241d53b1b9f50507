"""Cases of block attention, and how a backend is run and compared in them."""

import contextlib
import functools
from typing import NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu

from dflash_jax.kernels import _tpu_layout
from dflash_jax.kernels.block_attention import block_attention

# Tiles of the Pallas kernels so small that small cases have several on both sides.
SMALL_TILES = _tpu_layout.TileSizes(slots=16, keys=8)
LONG_TILES = _tpu_layout.TileSizes(slots=16, keys=128)

# Both sides sum the same float32 products, of at most 1000 keys or a few hundred rows, in another order. Rounding is
# some 1e-6 of the largest entry; a key too many or too few is at least 1e-3.
TOLERANCE = 1e-5
# Weights, outputs and score gradients are rounded to 8 bits (0.4 %) between products, and some of it adds up.
BFLOAT16_TOLERANCE = 2e-2


class Shape(NamedTuple):
    """Sizes and static mask of a case, in the letters of the package."""

    B: int
    A: int
    W: int
    N: int
    K: int
    S: int
    window: int | None = None
    causal: bool = False
    H: int = 8


def random_arrays(shape: Shape, seed: int, dtype=np.float32) -> tuple[jax.Array, ...]:
    """q, k_block, v_block, k_context, v_context and a cotangent for the output."""
    B, A, W, N, K, S, H = *shape[:6], shape.H
    rng = np.random.default_rng(seed)
    sizes = [(B, A, W, N, H), (B, A, W, K, H), (B, A, W, K, H), (B, S, K, H), (B, S, K, H), (B, A, W, N, H)]
    return tuple(jnp.asarray(rng.normal(size=size), dtype) for size in sizes)


def random_ranges(shape: Shape, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Unsorted starts and ends in 0 … S; some are empty, one reaches the whole context."""
    rng = np.random.default_rng(seed)
    starts = rng.integers(0, shape.S, (shape.B, shape.A), dtype=np.int32)
    ends = rng.integers(0, shape.S + 1, (shape.B, shape.A), dtype=np.int32)
    starts[0, -1], ends[0, -1] = 0, shape.S
    return starts, ends


@functools.partial(jax.jit, static_argnames=("shape", "backend", "tiles"))
def _run(arrays, starts, ends, *, shape: Shape, backend: str, tiles):
    del tiles  # read by attend's patch while this is traced; here it only tells compiled versions apart
    *inputs, d_out = arrays

    def op(*inputs):
        return block_attention(
            *inputs,
            starts,
            ends,
            scale=shape.H**-0.5,
            window=shape.window,
            causal_in_block=shape.causal,
            backend=backend,
        )

    out, pull_back = jax.vjp(op, *inputs)
    return out, pull_back(d_out)


def attend(arrays, starts, ends, *, shape: Shape, backend: str, tiles=None, interpreter=True):
    """Output and the gradients of the five arrays for the given cotangent.

    tiles: of the Pallas kernels; "chosen": those that a TPU gets, None: smaller ones, so that there are several.
    """
    if tiles is None:
        tiles = SMALL_TILES if shape.S < 128 else LONG_TILES
    with contextlib.ExitStack() as stack:
        if backend == "tpu":
            stack.enter_context(pltpu.force_tpu_interpret_mode(interpreter))
            if tiles != "chosen":
                stack.enter_context(mock.patch.object(_tpu_layout, "choose_tiles", return_value=tiles))
        if backend == "gpu" and jax.default_backend() != "gpu":
            from gpu_interpreter import gpu_interpreter  # which stands on private parts of jax

            stack.enter_context(gpu_interpreter())
        return _run(arrays, starts, ends, shape=shape, backend=backend, tiles=tiles)


def assert_close(ours, wanted, tolerance: float) -> None:
    """Compares every array relative to its largest entry (at least 1)."""
    for name, mine, theirs in zip(
        ("out", "q", "k_block", "v_block", "k_context", "v_context"), ours, wanted, strict=True
    ):
        mine, theirs = np.asarray(mine, np.float32), np.asarray(theirs, np.float32)
        limit = tolerance * max(1.0, np.abs(theirs).max())
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=limit, err_msg=name)


def assert_same_as_dense(shape: Shape, arrays, starts, ends, tolerance: float = TOLERANCE, **how) -> None:
    """Compares a backend with the reference in float32 on the same (possibly rounded) arrays."""
    out, gradients = attend(arrays, starts, ends, shape=shape, **how)
    wide = tuple(array.astype(jnp.float32) for array in arrays)
    wanted_out, wanted_gradients = attend(wide, starts, ends, shape=shape, backend="reference")
    assert_close((out, *gradients), (wanted_out, *wanted_gradients), tolerance)
    assert out.dtype == arrays[0].dtype
    assert [g.dtype for g in gradients] == [array.dtype for array in arrays[:5]]

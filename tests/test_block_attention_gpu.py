"""Block attention on Hopper: its kernels against the dense oracle, on such a GPU or in an interpreter.

The interpreter runs the kernels as they are, with every copy and every matrix product complete at once: what depends
on their timing shows on a GPU only (JAX_PLATFORMS=cuda pytest tests/test_block_attention_gpu.py).
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from block_attention_cases import BFLOAT16_TOLERANCE, Shape, assert_same_as_dense, attend, random_arrays, random_ranges

from dflash_jax.kernels import _gpu_layout, _tiles

on_gpu = jax.default_backend() == "gpu"
if not on_gpu:
    pytest.importorskip("gpu_interpreter", exc_type=ImportError, reason="this jax has no such interpreter")
elif jax.devices()[0].compute_capability != "9.0":
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

SMALL = Shape(1, 4, 16, 4, 1, S=40, H=64)
SHAPES = {
    "more key tiles than stages": Shape(1, 2, 16, 4, 1, S=520, H=64),
    "no size a multiple of anything": Shape(2, 3, 5, 3, 1, S=70, window=30, causal=True, H=64),
    "a group that takes two tiles": Shape(1, 3, 16, 8, 1, S=140, H=64),
    "wide blocks": Shape(1, 2, 64, 1, 1, S=130, window=90, H=64),
    "large heads": Shape(1, 3, 16, 4, 1, S=130, H=128),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_values_and_gradients_equal_the_dense_oracle(shape):
    arrays = random_arrays(shape, 0, jnp.bfloat16)
    assert_same_as_dense(shape, arrays, *random_ranges(shape, 1), BFLOAT16_TOLERANCE, backend="gpu")


@pytest.mark.parametrize("ends", [[[3, 17, 30, 40]], [[40, 2, 39, 1]], [[0, 0, 0, 0]]], ids=str)
def test_any_ranges_equal_the_dense_oracle(ends):
    """In order, in disorder, and nothing but padding."""
    arrays, ends = random_arrays(SMALL, 2, jnp.bfloat16), np.array(ends, np.int32)
    assert_same_as_dense(SMALL, arrays, ends // 2, ends, BFLOAT16_TOLERANCE, backend="gpu")


def test_padding_gives_zero_and_sends_no_gradient_whatever_it_holds():
    arrays = random_arrays(SMALL, 4, jnp.bfloat16)
    starts, ends = np.array([[0, 9, 0, 2]], np.int32), np.array([[15, 3, 40, 7]], np.int32)
    out, (dq, dk_block, dv_block, *d_context) = attend(arrays, starts, ends, shape=SMALL, backend="gpu")
    for array in (out, dq, dk_block, dv_block):
        assert not np.any(array[:, 1])
        assert np.all(np.any(array[:, [0, 2, 3]] != 0, axis=(2, 3, 4)))

    other = tuple(array.at[:, 1].multiply(-50.0) for array in arrays[:3])
    changed = (*other, *arrays[3:5], arrays[5].at[:, 1].set(1e6))
    out2, (_, _, _, *d_context2) = attend(changed, starts, ends, shape=SMALL, backend="gpu")
    jax.tree.map(np.testing.assert_array_equal, [out, *d_context], [out2, *d_context2])


def test_a_tile_finds_its_own_visits():
    """Kernels step through entries first[i] … first[i + 1] − 1 of the list, and no others."""
    starts, ends = random_ranges(Shape(2, 40, 16, 4, 1, S=500), 3)
    low, high = _tiles.slot_ranges(starts, ends, 16, None)
    pairs = _tiles.overlap(low, high, ends > starts, 2, 64, 8)
    for visits, tiles in ((_tiles.visits(pairs), 2 * 20), (_tiles.transposed_visits(pairs), 2 * 8)):
        first, other, kind = map(np.asarray, _gpu_layout.listed(visits, tiles))
        assert first[0] == 0 and first[-1] == visits.count
        for tile in range(tiles):
            mine = slice(first[tile], first[tile + 1])
            wanted = np.asarray(visits.tile)[: int(visits.count)] == tile
            np.testing.assert_array_equal(other[mine], np.asarray(visits.other)[: int(visits.count)][wanted])
            assert kind[mine][0] & _tiles.FIRST and kind[mine][-1] & _tiles.LAST

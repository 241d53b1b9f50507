"""Block attention compiles for TPUs, forward and backward, and never holds the dense score grid."""

import math
import re

import jax
import jax.numpy as jnp
import pytest
from tpu_compiler import TOPOLOGIES, compile_for, one_chip, requires_libtpu

from dflash_jax.kernels.block_attention import block_attention

KERNELS = {"block_attention_forward", "block_attention_backward_queries", "block_attention_backward_context"}
ITEM_BYTES = {"pred": 1, "s8": 1, "bf16": 2, "s32": 4, "u32": 4, "f32": 4}


def forward_and_backward(options):
    def function(q, k_block, v_block, k_context, v_context, starts, ends, d_out):
        def op(*arrays):
            return block_attention(*arrays, starts, ends, scale=q.shape[-1] ** -0.5, **options)

        out, pull_back = jax.vjp(op, q, k_block, v_block, k_context, v_context)
        return out, pull_back(d_out)

    return function


def abstract_arrays(B, A, W, N, K, H, S, dtype):
    sizes = [(B, A, W, N, H), *[(B, A, W, K, H)] * 2, *[(B, S, K, H)] * 2]
    arrays = [jax.ShapeDtypeStruct(size, dtype) for size in sizes]
    return [*arrays, *[jax.ShapeDtypeStruct((B, A), jnp.int32)] * 2, arrays[0]]


def kernels_in(text: str) -> set[str]:
    return {name for name in KERNELS if re.search(rf"{name}[\w.]* = .*tpu_custom_call", text)}


def largest_buffer(text: str) -> int:
    """Bytes of the largest array that the program holds; what stands inside a fusion never reaches memory."""
    arrays = re.findall(r"\b(pred|s8|bf16|s32|u32|f32)\[([\d,]+)\]", text[text.index("\nENTRY ") :])
    return max(ITEM_BYTES[kind] * math.prod(map(int, sizes.split(","))) for kind, sizes in arrays)


@pytest.mark.long
@requires_libtpu
@pytest.mark.parametrize("generation", TOPOLOGIES)
def test_paper_size(generation):
    """8,192 queries, 3,072 context keys, 32/8 heads of 128, bfloat16, one sequence on a chip."""
    B, A, W, N, K, H, S = 1, 512, 16, 32, 8, 128, 3072
    arrays = abstract_arrays(B, A, W, N, K, H, S, jnp.bfloat16)
    compiled = compile_for(one_chip(generation), forward_and_backward({}), *arrays)
    text, memory = compiled.as_text(), compiled.memory_analysis()
    assert kernels_in(text) == KERNELS

    grid = A * W * (S + A * W)  # scores of one head
    rows = A * W * N * H * 2  # the queries
    assert largest_buffer(text) <= rows < grid
    # Beside arguments and results: queries, output and its gradient, heads first. The dense scores take 11.8 GB.
    assert memory.temp_size_in_bytes <= 4 * rows
    assert memory.temp_size_in_bytes < 4 * grid * N / 40


@pytest.mark.long
@requires_libtpu
@pytest.mark.parametrize("generation", ["v5e", "v5p"])  # v6e grants more
@pytest.mark.parametrize(("H", "dtype"), [(256, jnp.bfloat16), (128, jnp.float32)], ids=str)
def test_the_largest_tiles_fit_the_vector_memory(generation, H, dtype):
    """Paper size: smaller arrays as a whole would lie in it. float32 at "highest", which takes more than one pass."""
    arrays = abstract_arrays(1, 512, 16, 32, 8, H, 3072, dtype)
    with jax.default_matmul_precision("highest"):
        compiled = compile_for(one_chip(generation), forward_and_backward({}), *arrays)
    assert kernels_in(compiled.as_text()) == KERNELS


@requires_libtpu
@pytest.mark.parametrize("generation", TOPOLOGIES)
@pytest.mark.parametrize(
    ("sizes", "dtype", "options"),
    [
        ((2, 5, 5, 6, 2, 80, 130), jnp.bfloat16, dict(window=40, causal_in_block=True)),
        ((1, 7, 16, 2, 2, 64, 15), jnp.float32, {}),
    ],
    ids=["no size a multiple of anything", "short context in float32"],
)
def test_test_size(generation, sizes, dtype, options):
    compiled = compile_for(one_chip(generation), forward_and_backward(options), *abstract_arrays(*sizes, dtype))
    assert kernels_in(compiled.as_text()) == KERNELS


@requires_libtpu
@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [((1, 3, 16, 4, 1, H, 200), jnp.bfloat16) for H in (96, 128, 256)]
    + [((1, 3, W, 4, 1, 64, 200), jnp.bfloat16) for W in (2, 32)]
    + [((1, 40, 16, 28, 4, 128, 600), jnp.bfloat16), ((1, 80, 16, 4, 1, 64, 600), jnp.bfloat16)],  # tiles of full size
    ids=str,
)
def test_head_sizes_widths_and_groups(sizes, dtype):
    compiled = compile_for(one_chip("v5e"), forward_and_backward({}), *abstract_arrays(*sizes, dtype))
    assert kernels_in(compiled.as_text()) == KERNELS


@requires_libtpu
def test_layers_of_a_step_find_their_tile_pairs_once():
    arrays = abstract_arrays(1, 64, 16, 2, 1, 64, 1024, jnp.bfloat16)

    def layers(count):
        def function(q, k_block, v_block, k_context, v_context, starts, ends, d_out):
            for _ in range(count):
                q = q + block_attention(q, k_block, v_block, k_context, v_context, starts, ends, scale=0.1)
            return q

        return compile_for(one_chip("v5e"), function, *arrays).as_text()

    one, three = layers(1), layers(3)
    assert (one.count("tpu_custom_call"), three.count("tpu_custom_call")) == (1, 3)
    assert one.count(" scatter(") == three.count(" scatter(")

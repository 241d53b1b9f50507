"""Block attention compiles for an H200, forward and backward, and never holds the dense score grid."""

import re

import jax.numpy as jnp
import pytest
from gpu_compiler import compile_for_h200, requires_cuda_compiler
from test_tpu_compile import KERNELS, abstract_arrays, forward_and_backward, largest_buffer

pytestmark = pytest.mark.long


def kernels_in(text: str) -> set[str]:
    calls = [line for line in text.splitlines() if 'custom_call_target="mosaic_gpu' in line]
    return {name for name in KERNELS for line in calls if f"/{name}/" in line}


@requires_cuda_compiler
def test_paper_size(capfd, monkeypatch):
    """8,192 queries, 3,072 context keys, 32/8 heads of 128, bfloat16, one sequence."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")  # the assembler's remarks, on stdout
    B, A, W, N, K, H, S = 1, 512, 16, 32, 8, 128, 3072
    arrays = abstract_arrays(B, A, W, N, K, H, S, jnp.bfloat16)
    compiled = compile_for_h200(forward_and_backward(dict(backend="gpu")), *arrays)
    text, memory = compiled.as_text(), compiled.memory_analysis()
    assert kernels_in(text) == KERNELS

    grid = A * W * (S + A * W)  # scores of one head
    rows = A * W * N * H * 2  # the queries
    assert largest_buffer(text) <= rows < grid
    # Beside arguments and results a few numbers for each row: the arrays are read as they are.
    assert memory.temp_size_in_bytes <= rows / 8

    remarks = capfd.readouterr().out
    assert set(re.findall(r"entry function '(\w+)_mosaic_gpu_kernel' for 'sm_90a'", remarks)) == KERNELS
    assert "serialized" not in remarks  # matrix instructions that wait for one another
    assert max(map(int, re.findall(r"(\d+) bytes spill stores", remarks))) <= 64


@requires_cuda_compiler
@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ((2, 5, 5, 6, 2, 64, 130), dict(window=40, causal_in_block=True)),
        ((1, 7, 16, 2, 2, 128, 15), {}),
        ((1, 9, 16, 32, 4, 128, 600), {}),
        ((1, 3, 64, 28, 4, 128, 200), dict(window=100)),
    ],
    ids=["no size a multiple of anything", "one query a head", "two tiles a group", "wide blocks, an odd group"],
)
def test_test_size(sizes, options):
    function = forward_and_backward(dict(backend="gpu") | options)
    assert kernels_in(compile_for_h200(function, *abstract_arrays(*sizes, jnp.bfloat16)).as_text()) == KERNELS


@requires_cuda_compiler
@pytest.mark.parametrize(
    ("dtype", "head_size", "backend"),
    [(jnp.float32, 128, "gpu"), (jnp.bfloat16, 80, "gpu"), (jnp.bfloat16, 128, "auto")],
)
def test_without_the_kernels_it_compiles_as_xla(dtype, head_size, backend):
    """What they cannot take, and "auto", which does not choose them."""
    function = forward_and_backward(dict(backend=backend))
    arrays = abstract_arrays(1, 4, 16, 4, 1, head_size, 100, dtype)
    assert not kernels_in(compile_for_h200(function, *arrays).as_text())

"""Compiles for an H200 that is not here: needs jax's CUDA plugin and the assembler ptxas, not a GPU."""

import importlib.util

import jax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from dflash_jax.hardware import hardware

requires_cuda_compiler = pytest.mark.skipif(
    not any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13)),
    reason="the GPU compiler is in jax's CUDA plugin: pip install 'dflash-jax[gpu-compile]'",
)


def compile_for_h200(function, *arrays: jax.ShapeDtypeStruct):
    """The compiled program of a function of abstract arrays, which live on a single H200."""
    h200 = hardware("h200x1")
    place = NamedSharding(jax.sharding.Mesh(h200.devices, ("chip",)), PartitionSpec())
    placed = [jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=place) for array in arrays]
    return jax.jit(function).lower(*placed).compile(compiler_options=h200.options)

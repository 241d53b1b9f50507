"""Compiles for TPUs that are not here: needs the package libtpu, not a TPU."""

import importlib.util

import jax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from dflash_jax.hardware import hardware

TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}

requires_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="the TPU compiler is in the package libtpu: pip install 'dflash-jax[tpu]'",
)


def one_chip(generation: str) -> NamedSharding:
    """Where arrays live on a single chip of a generation."""
    devices = hardware(TOPOLOGIES[generation]).devices[:1]
    return NamedSharding(jax.sharding.Mesh(devices, ("chip",)), PartitionSpec())


def compile_for(sharding: NamedSharding, function, *arrays: jax.ShapeDtypeStruct):
    """The compiled program of a function of abstract arrays."""
    placed = [jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding) for array in arrays]
    return jax.jit(function).lower(*placed).compile()

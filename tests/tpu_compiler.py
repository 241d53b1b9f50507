"""Compiles for TPUs that are not here: needs the package libtpu, not a TPU."""

import importlib.util
import os

import jax
import pytest
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}

requires_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="the TPU compiler is in the package libtpu: pip install 'dflash-jax[tpu]'",
)


def one_chip(generation: str) -> NamedSharding:
    """Where arrays live on a single chip of a generation."""
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # else libtpu asks a metadata server which machine this is
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # else a lock file lets one process at a time compile
    topology = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[generation])
    return NamedSharding(jax.sharding.Mesh(topology.devices[:1], ("chip",)), PartitionSpec())


def compile_for(sharding: NamedSharding, function, *arrays: jax.ShapeDtypeStruct):
    """The compiled program of a function of abstract arrays."""
    placed = [jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding) for array in arrays]
    return jax.jit(function).lower(*placed).compile()

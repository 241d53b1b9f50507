"""Compiles for an H200 that is not here: needs jax's CUDA plugin and the assembler ptxas, not a GPU."""

import importlib.util
import os

import jax
import pytest
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

requires_cuda_compiler = pytest.mark.skipif(
    not any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13)),
    reason="the GPU compiler is in jax's CUDA plugin: pip install 'dflash-jax[gpu-compile]'",
)

# What the compiler wants to know of a GPU (GpuTargetConfigProto), of an H200.
H200 = """
gpu_device_info {
  cuda_compute_capability { major: 9 }
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448 shared_memory_per_core: 233472
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  device_memory_size: 151397597184 memory_bandwidth: 4800000000000 l2_cache_size: 52428800
}
platform_name: "CUDA"
device_description_str: "NVIDIA H200"
dnn_version_info { major: 9 minor: 10 }
runtime_version { major: 13 }
"""
# There is no device to time candidates on; the tests' own XLA_FLAGS turn optimisation off.
OPTIONS = {"xla_gpu_autotune_level": 0, "xla_backend_optimization_level": 3}


def h200() -> NamedSharding:
    """Where arrays live on a single H200."""
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")  # a GPU that is here is left alone
    topology = topologies.get_topology_desc(platform="cuda", topology="1x1x1", target_config=H200)
    return NamedSharding(jax.sharding.Mesh(topology.devices[:1], ("chip",)), PartitionSpec())


def compile_for_h200(function, *arrays: jax.ShapeDtypeStruct):
    """The compiled program of a function of abstract arrays."""
    place = h200()
    placed = [jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=place) for array in arrays]
    return jax.jit(function).lower(*placed).compile(compiler_options=OPTIONS)

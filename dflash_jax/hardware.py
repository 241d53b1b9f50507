"""Accelerators by name: what a chip has, and devices of it to compile for, whether it is here or not.

    v5e:2x4 · v5p:2x2x2 · v6e:2x4        TPU slices by their topology
    h200x8                               GPUs of one host

Compiling for a TPU needs the package libtpu (extra `tpu`), for a GPU jax's CUDA plugin and an assembler (extra
`gpu-compile`); neither needs the chip.
"""

from __future__ import annotations

import importlib.util
import os
import re
from dataclasses import dataclass
from typing import Any

from jax.experimental import topologies


@dataclass(frozen=True)
class Chip:
    """Published figures of one chip: memory in bytes, bfloat16 FLOP/s, bytes/s of its memory, bytes/s of its links to
    other chips, all together and in one direction."""

    memory: float
    flops: float
    memory_rate: float
    link_rate: float


CHIPS = {
    "v5e": Chip(16e9, 197e12, 819e9, 100e9),
    "v5p": Chip(95e9, 459e12, 2765e9, 300e9),
    "v6e": Chip(32e9, 918e12, 1640e9, 224e9),
    "h200": Chip(141e9, 989e12, 4800e9, 450e9),
}

# What the compiler wants to know of a GPU (GpuTargetConfigProto), of an H200.
_H200 = """
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


class HardwareError(ValueError):
    """A name that stands for no known hardware, or hardware whose compiler is not installed."""


@dataclass(frozen=True)
class Hardware:
    """Some chips of one kind, and what a compiler for them is called with.

    devices: to build a mesh of; programs are compiled for them and never run. options: compiler_options.
    """

    name: str
    chip: Chip
    devices: list
    options: dict[str, Any]


def hardware(name: str) -> Hardware:
    """The hardware of that name.

    Raises:
        HardwareError: the name is not known, or the compiler for it is not installed.
    """
    if match := re.fullmatch(r"h200x([1-8])", name):
        return Hardware(name, CHIPS["h200"], _gpus(int(match[1])), _GPU_OPTIONS)
    if match := re.fullmatch(r"(v5e|v6e):\d+x\d+|(v5p):\d+x\d+x\d+", name):
        return Hardware(name, CHIPS[match[1] or match[2]], _tpus(name), {})
    raise HardwareError(
        f"hardware {name!r} is not known; use names like v5e:2x4, v5p:2x2x2, v6e:2x4 or, of one host, h200x1 to h200x8"
    )


# There is no device to time candidates on; XLA_FLAGS of the environment may have turned optimisation off.
_GPU_OPTIONS = {"xla_gpu_autotune_level": 0, "xla_backend_optimization_level": 3}


def _gpus(count: int) -> list:
    if not any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13)):
        raise HardwareError("compiling for a GPU needs jax's CUDA plugin: pip install 'dflash-jax[gpu-compile]'")
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")  # a GPU that is here is left alone
    return topologies.get_topology_desc(platform="cuda", topology=f"1x1x{count}", target_config=_H200).devices


def _tpus(topology: str) -> list:
    if importlib.util.find_spec("libtpu") is None:
        raise HardwareError("compiling for a TPU needs the package libtpu: pip install 'dflash-jax[tpu]'")
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # else libtpu asks a metadata server which machine this is
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # else a lock file lets one process at a time compile
    options = {"chips_per_host_bounds": (1, 1, 1)} if topology.endswith(":1x1") else {}
    try:
        return topologies.get_topology_desc(platform="tpu", topology_name=topology, **options).devices
    except Exception as error:
        raise HardwareError(f"the TPU compiler does not know the slice {topology!r}: {error}") from error

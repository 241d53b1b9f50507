"""Block attention on eight devices, batch and heads divided: the same values and gradients as on one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

# Devices are made when jax starts, so this file is run again as a program that has eight.
DEVICES = 8


@pytest.mark.parametrize("backend", ["xla", "tpu"])
def test_batch_and_heads_may_be_divided(backend):
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={DEVICES}",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]),
    }
    program = subprocess.run([sys.executable, __file__, backend], env=environment, capture_output=True, text=True)
    assert program.returncode == 0, program.stderr
    assert program.stdout == f"equal on {DEVICES} devices\n"


def main(backend: str) -> None:
    import functools

    import jax
    import numpy as np
    from block_attention_cases import TOLERANCE, Shape, assert_close, random_arrays, random_ranges
    from jax.experimental.pallas import tpu as pltpu
    from jax.sharding import PartitionSpec as P

    from dflash_jax.kernels.block_attention import block_attention

    shape = Shape(4, 3, 4, 8, 4, S=20, window=9)
    *inputs, d_out = random_arrays(shape, 0)
    starts, ends = random_ranges(shape, 1)
    op = functools.partial(block_attention, scale=0.3, window=shape.window, backend=backend)
    slots, keys = P("batch", None, None, "heads"), P("batch", None, "heads")
    mesh = jax.make_mesh((4, 2), ("batch", "heads"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    divided = jax.shard_map(
        op,
        mesh=mesh,
        in_specs=(slots, slots, slots, keys, keys, P("batch"), P("batch")),
        out_specs=slots,
        check_vma=backend == "xla",  # Pallas kernels do not say how their results vary over devices
    )

    def both(op):
        def run(*inputs):
            out, pull_back = jax.vjp(lambda *inputs: op(*inputs, starts, ends), *inputs)
            return (out, *pull_back(d_out))

        return jax.jit(run)(*inputs)

    with pltpu.force_tpu_interpret_mode(True):
        ours, wanted = both(divided), both(op)
    assert all(len(array.sharding.device_set) == DEVICES for array in ours)
    assert_close(ours, wanted, TOLERANCE)
    assert all(np.any(array) for array in ours)
    print(f"equal on {len(jax.devices())} devices")


if __name__ == "__main__":
    main(sys.argv[1])

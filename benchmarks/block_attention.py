"""How fast block attention is on the device at hand, forward alone and with its gradients.

    python benchmarks/block_attention.py                                     # 2,048 queries, 1,024 context keys
    python benchmarks/block_attention.py --blocks 512 --context 3072 --heads 32 --kv-heads 8 --head-size 128 \
        --dtype bfloat16 --backends xla gpu --peak-tflops 989                # paper size; 989: an H200 in bfloat16

Compares backends with `jax.nn.dot_product_attention` under the same mask over all keys. Anchors are uniform, documents
begin at 0. "needed" are the operations of the scores that the mask allows: 2 products forward, 5 more backward (those
that recompute scores are not counted); bytes are the arguments and results, each once.
"""

from __future__ import annotations

import argparse
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.kernels._reference import dense_mask
from dflash_jax.kernels.block_attention import BlockMask, block_attention

PRODUCTS = {"forward": 2, "forward + backward": 7}


def problem(options: argparse.Namespace):
    """q, k_block, v_block, k_context, v_context, starts, ends."""
    o = options
    rng = np.random.default_rng(0)
    slots = (1, o.blocks, o.width)
    keys = [(*slots, o.kv_heads, o.head_size)] * 2 + [(1, o.context, o.kv_heads, o.head_size)] * 2
    arrays = [jnp.asarray(rng.normal(size=s), o.dtype) for s in [(*slots, o.heads, o.head_size), *keys]]
    ends = np.sort(rng.choice(np.arange(1, o.context), o.blocks, replace=o.blocks >= o.context))[None]
    return arrays, jnp.zeros(ends.shape, jnp.int32), jnp.asarray(ends, jnp.int32)


def with_dense_mask(q, k_block, v_block, k_context, v_context, starts, ends, *, scale: float):
    """jax.nn.dot_product_attention over context and block keys together."""
    B, A, W, N, H = q.shape
    S = k_context.shape[1]
    mask = dense_mask(starts, ends, S, W, BlockMask()).reshape(B, 1, A * W, S + A * W)

    def joined(context, block):
        return jnp.concatenate([context, block.reshape(B, A * W, *block.shape[3:])], axis=1)

    k, v = joined(k_context, k_block), joined(v_context, v_block)
    return jax.nn.dot_product_attention(q.reshape(B, A * W, N, H), k, v, mask=mask, scale=scale).reshape(q.shape)


def both_passes(op):
    def run(*arrays):
        out, pull_back = jax.vjp(op, *arrays)
        return out, pull_back(out)

    return run


def seconds(function, arrays, repeats: int) -> float:
    """The median of some runs, compilation and the first run apart."""
    run = jax.jit(function)
    jax.block_until_ready(run(*arrays))
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        jax.block_until_ready(run(*arrays))
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = dict(blocks=128, width=16, context=1024, heads=8, kv_heads=2, head_size=64, repeats=5)
    for name, default in sizes.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--backends", nargs="+", default=["xla", "reference"])
    parser.add_argument("--peak-tflops", type=float, help="of the device, in this dtype: adds the fraction of it")
    options = parser.parse_args()

    arrays, starts, ends = problem(options)
    scale = options.head_size**-0.5
    scores = options.width * (int(ends.sum()) + options.blocks * options.width) * options.heads
    grid = (options.blocks * options.width) * (options.context + options.blocks * options.width) * options.heads
    print(
        f"{jax.devices()[0].device_kind}, {options.dtype}: {options.blocks} blocks of {options.width} slots, "
        f"{options.context} context keys, {options.heads}/{options.kv_heads} heads of {options.head_size}; "
        f"the mask allows {100 * scores / grid:.0f} % of the scores"
    )
    moved = sum(array.nbytes for array in arrays)
    rows = {
        backend: lambda *arrays, backend=backend: block_attention(*arrays, starts, ends, scale=scale, backend=backend)
        for backend in options.backends
    }
    rows["jax.nn.dot_product_attention"] = lambda *arrays: with_dense_mask(*arrays, starts, ends, scale=scale)
    print(f"{'':30}{'pass':20}{'ms':>9}{'needed GFLOP':>14}{'TFLOP/s':>9}{'of peak':>9}{'MB':>7}{'GB/s':>7}")
    for name, op in rows.items():
        for which, products in PRODUCTS.items():
            backward = which != "forward"
            took = seconds(both_passes(op) if backward else op, arrays, options.repeats)
            flops = products * 2 * scores * options.head_size
            size = moved + arrays[0].nbytes + backward * (moved + arrays[0].nbytes)
            peak = f"{100 * flops / took / 1e12 / options.peak_tflops:.0f} %" if options.peak_tflops else "-"
            print(
                f"{name:30}{which:20}{1e3 * took:9.2f}{flops / 1e9:14.1f}{flops / took / 1e12:9.3f}{peak:>9}"
                f"{size / 1e6:7.0f}{size / took / 1e9:7.1f}"
            )


if __name__ == "__main__":
    main()

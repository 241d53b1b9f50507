"""How fast block attention is on the device at hand, forward alone and with its gradients.

    python benchmarks/block_attention.py                                     # 2,048 queries, 1,024 context keys
    python benchmarks/block_attention.py --blocks 512 --context 3072 --heads 32 --kv-heads 8 --head-size 128 \
        --dtype bfloat16 --backends xla gpu --peak-tflops 989                # paper size; 989: an H200 in bfloat16

Compares backends with others under the same mask over all keys: `jax.nn.dot_product_attention`, on a GPU also through
cuDNN, and on a TPU JAX's splash attention, which is told the mask when it is compiled. Where one cannot do it, the
table says why. `--tiles 128x512 256x256` times the tpu backend with other tiles (block slots × context keys) than its
own. Anchors are uniform, documents begin at 0. "needed" are the operations of the scores that the mask allows: 2
products forward, 5 more backward (those that recompute scores are not counted); bytes are the arguments and results,
each once.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.kernels import _tpu_layout
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


def joined(context, block):
    """Context and block keys one behind the other, [B, S + A·W, K, H]."""
    B, A, W = block.shape[:3]
    return jnp.concatenate([context, block.reshape(B, A * W, *block.shape[3:])], axis=1)


def with_dense_mask(q, k_block, v_block, k_context, v_context, starts, ends, *, scale: float, implementation: str):
    """jax.nn.dot_product_attention over context and block keys together."""
    B, A, W, N, H = q.shape
    S = k_context.shape[1]
    mask = dense_mask(starts, ends, S, W, BlockMask()).reshape(B, 1, A * W, S + A * W)
    k, v, rows = joined(k_context, k_block), joined(v_context, v_block), q.reshape(B, A * W, N, H)
    options = dict(mask=mask, scale=scale, implementation=implementation)
    return jax.nn.dot_product_attention(rows, k, v, **options).reshape(q.shape)


def splash(starts, ends, width: int, context: int, groups: int, *, scale: float, interpret: bool = False):
    """JAX's splash attention, one call for the queries of a key head. starts and ends are known when it is made."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    slots = starts.shape[1] * width
    mask = np.asarray(dense_mask(starts, ends, context, width, BlockMask())).reshape(slots, context + slots)
    queries, keys = (next(size for size in (512, 256, 128) if length % size == 0) for length in mask.shape)
    tiles = kernel.BlockSizes(queries, keys, keys, queries, keys, keys, queries, keys)
    of_heads = masks.MultiHeadMask([masks.NumpyMask(mask)] * groups)
    attend = kernel.make_splash_mqa_single_device(mask=of_heads, block_sizes=tiles, interpret=interpret)

    def run(q, k_block, v_block, k_context, v_context):
        B, _, _, N, H = q.shape
        q_BKGTH = (q * scale).reshape(B, slots, N // groups, groups, H).transpose(0, 2, 3, 1, 4)
        k_BKSH, v_BKSH = (joined(*pair).swapaxes(1, 2) for pair in ((k_context, k_block), (v_context, v_block)))
        out_BKGTH = jax.vmap(jax.vmap(attend))(q_BKGTH, k_BKSH, v_BKSH)
        return out_BKGTH.transpose(0, 3, 1, 2, 4).reshape(q.shape)

    return run


@contextlib.contextmanager
def chosen_tiles(tiles: str | None):
    """What is traced in here, both passes, takes tiles of so many block slots × context keys; None: its own."""
    own = _tpu_layout.choose_tiles
    if tiles is not None:
        sizes = _tpu_layout.TileSizes(*map(int, tiles.split("x")))
        _tpu_layout.choose_tiles = lambda *_: sizes
    try:
        yield
    finally:
        _tpu_layout.choose_tiles = own


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
    parser.add_argument("--tiles", nargs="+", default=[], metavar="SLOTSxKEYS", help="tiles to try, on a TPU")
    parser.add_argument("--peak-tflops", type=float, help="of the device, in this dtype: adds the fraction of it")
    options = parser.parse_args()

    arrays, starts, ends = problem(options)
    scores = options.width * (int(ends.sum()) + options.blocks * options.width) * options.heads
    grid = (options.blocks * options.width) * (options.context + options.blocks * options.width) * options.heads
    print(
        f"{jax.devices()[0].device_kind}, {options.dtype}: {options.blocks} blocks of {options.width} slots, "
        f"{options.context} context keys, {options.heads}/{options.kv_heads} heads of {options.head_size}; "
        f"the mask allows {100 * scores / grid:.0f} % of the scores"
    )
    moved = sum(array.nbytes for array in arrays)
    print(f"{'':34}{'pass':20}{'ms':>9}{'needed GFLOP':>14}{'TFLOP/s':>9}{'of peak':>9}{'MB':>7}{'GB/s':>7}")
    for name, (make, tiles) in competitors(options, starts, ends).items():
        for which, products in PRODUCTS.items():
            backward = which != "forward"
            try:
                op = make()
                with chosen_tiles(tiles):
                    took = seconds(both_passes(op) if backward else op, arrays, options.repeats)
            except Exception as error:  # whatever keeps one from running is its row of the table
                print(f"{name:34}{which:20}cannot: {str(error).strip().splitlines()[0][:100]}")
                continue
            flops = products * 2 * scores * options.head_size
            size = moved + arrays[0].nbytes + backward * (moved + arrays[0].nbytes)
            peak = f"{100 * flops / took / 1e12 / options.peak_tflops:.0f} %" if options.peak_tflops else "-"
            print(
                f"{name:34}{which:20}{1e3 * took:9.2f}{flops / 1e9:14.1f}{flops / took / 1e12:9.3f}{peak:>9}"
                f"{size / 1e6:7.0f}{size / took / 1e9:7.1f}"
            )


def competitors(options: argparse.Namespace, starts, ends) -> dict:
    """What is timed, by name: a function that gives the op, or raises where it cannot be had here, and its tiles."""
    scale, platform = options.head_size**-0.5, jax.default_backend()

    def ours(backend: str):
        return lambda *arrays: block_attention(*arrays, starts, ends, scale=scale, backend=backend)

    def dense(implementation: str):
        return lambda *arrays: with_dense_mask(*arrays, starts, ends, scale=scale, implementation=implementation)

    made: dict = {backend: (lambda backend=backend: ours(backend), None) for backend in options.backends}
    made |= {f"tpu, tiles {tiles}": (lambda: ours("tpu"), tiles) for tiles in options.tiles}
    made["jax.nn.dot_product_attention"] = lambda: dense("xla"), None
    if platform == "gpu":
        made["jax.nn.dot_product_attention, cuDNN"] = lambda: dense("cudnn"), None
    if platform == "tpu":
        groups = options.heads // options.kv_heads
        sizes = options.width, options.context, groups
        made["splash attention"] = lambda: splash(starts, ends, *sizes, scale=scale), None
    return made


if __name__ == "__main__":
    main()

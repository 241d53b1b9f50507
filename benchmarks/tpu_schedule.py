"""Cycles of the TPU kernels of block attention by the compiler's own schedule; no TPU needed.

    python benchmarks/tpu_schedule.py --generation v5p [--tiles 128x512]

Compiles forward and backward with libtpu (`pip install 'dflash-jax[tpu]'`, x86-64 Linux), reads the instruction
bundles that the compiler scheduled, one a cycle, and multiplies every part of a kernel with how often it runs for the
given anchors. That is an estimate and no measurement: it leaves out waiting for memory, which the pipeline is meant to
hide, and the program around the kernels. --tiles: block slots of a query tile × keys of a key tile, instead of those
that the package chooses.
"""

from __future__ import annotations

import argparse
import os
import re
import tempfile
from pathlib import Path
from typing import NamedTuple

# (bfloat16 FLOPs a cycle and chip, cores that share the heads, GHz): 4 matrix units of 128 × 128 a core, v6e 256 × 256;
# with the clock they give the published 197, 459 and 918 TFLOP/s.
CHIPS = {
    "v5e": (4 * 128**2 * 2, 1, 1.5),
    "v5p": (2 * 4 * 128**2 * 2, 2, 1.75),
    "v6e": (4 * 256**2 * 2, 1, 1.75),
}
PARTS = ("begin", "whole", "part", "end")  # the pl.when bodies of every kernel, in the order of the program
# Matrix products of every kernel for each score; the backward ones both recompute scores and their gradients.
PRODUCTS = {
    "block_attention_forward": 2,
    "block_attention_backward_queries": 3,
    "block_attention_backward_context": 4,
}


class Schedule(NamedTuple):
    """Bundles of a kernel: of each part, and of what every visit runs besides."""

    parts: dict[str, int]
    every_visit: int


def read_schedule(text: str) -> Schedule:
    """Parses a listing of scheduled bundles.

    Raises:
        ValueError: when the four parts are not found; a new compiler may write the listing otherwise.
    """
    entered, bodies, loop, test_of_whole = {}, [], [0, 0], []
    for line in text.splitlines():
        if not (match := re.match(r"\s*(0x[0-9a-f]+|0)\s+(?:(LB|PF|LH|LE|PB|CT)\s*)?:", line)):
            continue
        address = int(match[1], 16)
        if match[2] == "LB":
            loop[0] = address
        if re.search(r"= sand\.u32 4, %s", line):  # kind & WHOLE, the condition of the second part
            test_of_whole.append(address)
        if branch := re.search(r"sbr\.rel \(!?%p\w+\) target = \$region(\d+)", line):
            entered[int(branch[1])] = address
            if address > loop[0] and "(!%p" in line:
                loop[1] = address
        if match[2] == "PF" and (region := re.search(r"Start/End empty region (\d+)", line)):
            bodies.append((entered[int(region[1])], address))
    chain = longest_chain(sorted(bodies))
    before = [index for index, (start, _) in enumerate(chain) for test in test_of_whole if 0 <= start - test <= 8]
    chain = chain[before[0] - 1 :][: len(PARTS)] if before else []
    if len(chain) != len(PARTS) or not loop[1]:
        raise ValueError(f"{len(chain)} parts found in the listing, not {len(PARTS)}: the format is not as expected")
    sizes = [end - start for start, end in chain]
    return Schedule(dict(zip(PARTS, sizes, strict=True)), loop[1] - loop[0] - sum(sizes))


def longest_chain(bodies: list[tuple[int, int]], gap: int = 8) -> list[tuple[int, int]]:
    """The longest run of bodies of which each begins where the one before it ends."""
    best: list[tuple[int, int]] = []
    for index, body in enumerate(bodies):
        chain = [body]
        for following in bodies[index + 1 :]:
            if 0 <= following[0] - chain[-1][1] <= gap:
                chain.append(following)
        best = max(best, chain, key=len)
    return best


def compile_kernels(generation: str, arguments) -> dict[str, Schedule]:
    with tempfile.TemporaryDirectory() as folder:
        # libtpu reads its flags once, when it is loaded.
        os.environ["LIBTPU_INIT_ARGS"] = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
        os.environ.update(JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="1")
        import jax
        import jax.numpy as jnp
        from jax.experimental import topologies
        from jax.sharding import NamedSharding, PartitionSpec

        from dflash_jax.kernels.block_attention import block_attention

        name = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}[generation]
        topology = topologies.get_topology_desc(platform="tpu", topology_name=name)
        place = NamedSharding(jax.sharding.Mesh(topology.devices[:1], ("chip",)), PartitionSpec())
        a = arguments
        rows, slots, context = (1, a.blocks, a.width, a.heads, a.head_size), (1, a.blocks, a.width), (1, a.context)
        keys = (a.kv_heads, a.head_size)
        sizes = [rows, (*slots, *keys), (*slots, *keys), (*context, *keys), (*context, *keys)]
        arrays = [jax.ShapeDtypeStruct(size, jnp.bfloat16, sharding=place) for size in sizes]
        bounds = jax.ShapeDtypeStruct((1, a.blocks), jnp.int32, sharding=place)

        def both(q, k_block, v_block, k_context, v_context, starts, ends):
            def op(q, k_block, v_block, k_context, v_context):
                return block_attention(
                    q, k_block, v_block, k_context, v_context, starts, ends, scale=0.1, backend="tpu"
                )

            out, pull_back = jax.vjp(op, q, k_block, v_block, k_context, v_context)
            return out, pull_back(out)

        jax.jit(both).lower(*arrays, bounds, bounds).compile()
        listings = {kernel: list(Path(folder).glob(f"*-{kernel}.*-final_bundles.txt")) for kernel in PRODUCTS}
        return {kernel: read_schedule(listing.read_text()) for kernel, (listing,) in listings.items()}


def visits_of(arguments):
    """The lists of the kernels for anchors drawn uniformly without replacement, documents starting at 0."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from dflash_jax.kernels import _tiles, _tpu_layout

    a = arguments
    drawn = np.random.default_rng(0).choice(np.arange(1, a.context), a.blocks, replace=False)
    ends = jnp.asarray(np.sort(drawn)[None], jnp.int32)
    sizes = (1, a.blocks, a.width, a.heads, a.head_size), (1, a.context, a.kv_heads, a.head_size)
    to = _tpu_layout.layout(*(jax.ShapeDtypeStruct(size, jnp.bfloat16) for size in sizes))
    low, high = _tiles.slot_ranges(jnp.zeros_like(ends), ends, a.width, None)
    pairs = _tpu_layout.overlap(low, high, ends > 0, to)
    by_query, by_key = _tiles.visits(pairs), _tiles.transposed_visits(pairs)
    useful_scores = int(a.width * (ends.sum() + a.blocks * a.width))  # of one head
    kinds = [np.asarray(visits.kind)[: int(visits.count)] for visits in (by_query, by_query, by_key)]
    return dict(zip(PRODUCTS, kinds, strict=True)), useful_scores, to


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--generation", choices=CHIPS, default="v5p")
    sizes = dict(blocks=512, width=16, context=3072, heads=32, kv_heads=8, head_size=128)
    for name, default in sizes.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--tiles", metavar="SLOTSxKEYS")
    arguments = parser.parse_args()

    from dflash_jax.kernels import _tiles, _tpu_layout

    if arguments.tiles:
        chosen = _tpu_layout.TileSizes(*map(int, arguments.tiles.split("x")))
        _tpu_layout.choose_tiles = lambda *_: chosen
    schedules = compile_kernels(arguments.generation, arguments)
    kinds, useful_scores, to = visits_of(arguments)
    flops_per_cycle, cores, clock = CHIPS[arguments.generation]
    bits = dict(zip(PARTS, (_tiles.FIRST, _tiles.WHOLE, _tiles.PART, _tiles.LAST), strict=True))
    print(
        f"{arguments.generation}, tiles of {to.rows} rows × {to.keys} keys; cycles of a core with {to.K // cores} heads"
    )
    for kernel, schedule in schedules.items():
        counts = {part: int((kinds[kernel] & bit != 0).sum()) for part, bit in bits.items()}
        of_head = len(kinds[kernel]) * schedule.every_visit + sum(counts[p] * schedule.parts[p] for p in PARTS)
        cycles = of_head * to.K // cores
        ideal = PRODUCTS[kernel] * 2 * useful_scores * arguments.heads * arguments.head_size // flops_per_cycle
        parts = ", ".join(f"{part} {counts[part]} × {schedule.parts[part]}" for part in PARTS)
        print(f"{kernel}: {len(kinds[kernel])} visits a head × {schedule.every_visit}; {parts}")
        print(
            f"  {cycles:,} cycles = {cycles / clock / 1e6:.3f} ms; matrix units alone, useful scores: {ideal:,}", end=""
        )
        print(f" ({100 * ideal / cycles:.0f} %)")


if __name__ == "__main__":
    main()

"""What the Hopper kernels share, and all that they use of Mosaic GPU, whose names move between versions of jax.

A block of a kernel has three warpgroups. Two compute, each on its own row tile or keys; the third copies what both
read into a ring of shared memory, ahead of them.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dflash_jax.kernels import _tiles
from dflash_jax.kernels._gpu_layout import OWN, Layout

STAGES = 2  # of the rings
# Of a thread. A block is launched with 168 for each of its 3 warpgroups; one that asks for more than others gave back
# waits for ever: 2 · 232 + 40 = 3 · 168.
COMPUTE_REGISTERS, COPY_REGISTERS = 232, 40
MASKED = -1e30
LOG2E = math.log2(math.e)
TILED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))

copy_in, arrive, wait = plgpu.copy_gmem_to_smem, plgpu.barrier_arrive, plgpu.barrier_wait


class Place(NamedTuple):
    """Where a block of a kernel by queries works: sequence, key head, part of the queries (K·P), pair of row tiles."""

    batch: jax.Array
    head: jax.Array
    queries: jax.Array
    pair: jax.Array

    def window(self, to: Layout, warpgroup):
        """Which of the own windows a warpgroup reads."""
        return warpgroup if to.windows == 2 else 0

    def own_slot(self, to: Layout, window) -> jax.Array:
        """The first slot of an own window."""
        unit = OWN * to.windows
        return lax.div(2 * self.pair * to.slots, unit) * unit + window * OWN


def pair_of_tiles(to: Layout) -> Place:
    queries = lax.axis_index("queries")
    pair = to.row_tiles // 2 - 1 - lax.axis_index("pair")  # late anchors read most, so they begin first
    return Place(lax.axis_index("batch"), lax.div(queries, to.parts), queries, pair)


class Visited(NamedTuple):
    """The visits of one tile: entries first … first + steps − 1 of the list."""

    first: jax.Array
    steps: jax.Array
    other_ref: Any

    def first_key(self, step, to: Layout, keys: int) -> jax.Array:
        return lax.rem(self.other_ref[self.first + step], to.all_keys // keys) * keys


def visited(first_ref, other_ref, tile) -> Visited:
    first = first_ref[tile]
    return Visited(first, first_ref[tile + 1] - first, other_ref)


class Ring(NamedTuple):
    """Stages of shared memory that one warpgroup fills and two read, and the barriers that say which may be done."""

    tiles: Any
    here: Any
    free: Any


def tiles(*shape: int):
    """Shared memory for operands of matrix products."""
    return plgpu.SMEM(shape, jnp.bfloat16, transforms=TILED)


def numbers(*shape: int, dtype=jnp.float32):
    return plgpu.SMEM(shape, dtype)


def barriers(count: int, arrivals: int):
    """Each is passed when that many copies or warpgroups have arrived at it."""
    return plgpu.Barrier(num_arrivals=arrivals, num_barriers=count)


def ring(tiles, copies: int = 1) -> Ring:
    """`copies`: that fill a stage."""
    return Ring(tiles, barriers(STAGES, copies), barriers(STAGES, 2))


def wait_until_free(ring: Ring, step) -> None:
    @pl.when(step >= STAGES)
    def _():
        wait(ring.free.at[lax.rem(step, STAGES)])


def drain(ring: Ring, steps) -> None:
    """Waits for the readers of the last stages: no barrier ends with an arrival that nothing saw."""

    @pl.loop(lax.max(steps - STAGES, 0), steps)
    def _(step):
        wait(ring.free.at[lax.rem(step, STAGES)])


def start_copies(rows_ref, target, barrier, to: Layout, batch, slot, queries) -> None:
    """Begins to copy a row tile of [B, T, N, H]: one copy for each of its queries."""
    for query in range(to.heads):
        source = rows_ref.at[batch, pl.ds(slot, to.slots), queries * to.heads + query]
        copy_in(source, target.at[pl.ds(query * to.slots, to.slots)], barrier)


def write(*pairs) -> None:
    """Copies pairs (shared memory, target), and waits until the memory may be used again."""
    plgpu.commit_smem()
    for source, target_ref in pairs:
        plgpu.copy_smem_to_gmem(source, target_ref)
    plgpu.wait_smem_to_gmem(0)


def write_rows(buffer, rows_ref, to: Layout, batch, slot, queries) -> None:
    """Writes a row tile of [B, T, N, H]."""
    of_query = [pl.ds(query * to.slots, to.slots) for query in range(to.heads)]
    targets = [rows_ref.at[batch, pl.ds(slot, to.slots), queries * to.heads + query] for query in range(to.heads)]
    write(*((buffer.at[rows], target) for rows, target in zip(of_query, targets, strict=True)))


def copy_own(at: Place, to: Layout, sources, targets, barrier) -> None:
    """Begins to copy the own windows of a pair of row tiles from the keys and the values of the blocks."""
    for source_ref, target in zip(sources, targets, strict=True):
        for window in range(to.windows):
            slots = pl.ds(at.own_slot(to, window), OWN)
            copy_in(source_ref.at[at.batch, slots, at.head], target.at[window], barrier)


def copy_context(at: Place, to: Layout, visits: Visited, keys: int, sources, rings) -> None:
    """Of the copying warpgroup: the context tiles of all visits, through the rings of keys and of values."""

    @pl.loop(0, visits.steps)
    def _(step):
        stage, first_key = lax.rem(step, STAGES), visits.first_key(step, to, keys)
        for source_ref, ring in zip(sources, rings, strict=True):
            wait_until_free(ring, step)
            source = source_ref.at[at.batch, pl.ds(first_key, keys), at.head]
            copy_in(source, ring.tiles.at[stage], ring.here.at[stage])

    for ring in rings:
        drain(ring, visits.steps)


def load(numbers_R, row_axis: int) -> jax.Array:
    """One number a row, held as scores whose rows lie along that axis need it."""
    return plgpu.load(numbers_R, (), layout=plgpu.Layout.WGMMA.reduce(1 - row_axis))


def zeros(*shape: int) -> jax.Array:
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)


def product(a, b, total=None) -> Any:
    """total + a @ b in float32, complete."""
    if total is None:
        total = zeros(a.shape[0], b.shape[1])
    return pl.run_state(lambda total_ref: plgpu.wgmma(total_ref, a, b))(plgpu.ACC.init(total))  # pyright: ignore[reportPrivateImportUsage]


def transposed(ref):
    return plgpu.transpose_ref(ref, (1, 0))


def iota(shape, axis: int) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA)


def spread(numbers, like, axis: int) -> jax.Array:
    """One number a row (axis 0) or a column (1), over a whole tile."""
    return lax.broadcast_in_dim(numbers, like.shape, (axis,))


def mask_own(scores, to: Layout, mask, row_slot, key_slot, row_axis: int) -> jax.Array:
    """Scores of a row tile, whose first slot is row_slot, with the OWN slots from key_slot on."""
    row_slot = row_slot + (iota(scores.shape, row_axis) & (to.slots - 1))
    key_slot = key_slot + iota(scores.shape, 1 - row_axis)
    # Blocks begin at multiples of a power of two: slots of one block differ in the low bits alone.
    allowed = ((row_slot ^ key_slot) < to.width) & ((key_slot & (to.width - 1)) < to.W)
    if mask.causal_in_block:
        allowed &= key_slot <= row_slot
    if mask.window is not None:
        allowed &= row_slot - key_slot < mask.window
    return jnp.where(allowed, scores, MASKED)


def mask_context(scores, kind, bounds, first_key, row_axis: int) -> jax.Array:
    """Scores with a context tile, given the [2, R] bounds of the rows. Most pairs of tiles need no mask."""

    def within_bounds(scores):
        key = first_key + iota(scores.shape, 1 - row_axis)
        low, high = (spread(load(bounds.at[side], row_axis), scores, row_axis) for side in range(2))
        return jnp.where((key >= low) & (key < high), scores, MASKED)

    return lax.cond((kind & _tiles.WHOLE) != 0, lambda scores: scores, within_bounds, scores)


def kernel(body, name: str, grid: dict[str, int], **types):
    """Three warpgroups a block: two compute and one copies."""
    return plgpu.kernel(
        body,
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        num_threads=3,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name=name,
        **types,
    )


def on_warpgroups(compute, copy) -> None:
    """Runs both halves of a kernel, registers moved to where they are needed."""
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup < 2)
    def _():
        plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
        compute(warpgroup)

    @pl.when(warpgroup == 2)
    def _():
        plgpu.set_max_registers(COPY_REGISTERS, action="decrease")
        copy()

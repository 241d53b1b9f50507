"""Block attention as Pallas Mosaic GPU kernels for Hopper (compute capability 9.0), bfloat16.

A row tile is 64 rows, what one warpgroup multiplies at a time: `slots` block slots of `heads` queries of a group, query
by query. Two warpgroups take neighbouring row tiles and share the context tiles that a third one copies into a ring of
shared memory (TMA). Which context tiles a pair of row tiles reads is a list made on the device (_tiles.py), so work
follows the ranges. A tile's own keys are the 64 block slots around it under a block-diagonal mask: one more key tile.

Letters beyond the package's: R rows of a row tile (64), E its slots, P row tiles that the queries of a group take
for the same slots, T padded slots of a sequence, C keys of a key tile, U padded context keys, V visits, I row tiles of the batch.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dflash_jax.kernels import _tiles

ROWS = 64  # of a row tile: the height of a Hopper matrix instruction
OWN = 64  # block slots around a row tile that are read as its own keys: a multiple of what a swizzled tile holds
FORWARD_KEYS = 128  # context keys a step
BACKWARD_KEYS = 64  # the gradients of scores need twice the registers
CONTEXT_KEYS = 128  # that a block of the context kernel owns, 64 a warpgroup
STAGES = 2  # of the rings
HEAD_SIZES = (64, 128)
MAX_WIDTH = 64
MASKED = -1e30
LOG2E = math.log2(math.e)

TILED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))


def unsupported(q, k_block, v_block, k_context, v_context) -> str | None:
    """Why the kernels cannot take these arrays, or None."""
    dtypes = {array.dtype for array in (q, k_block, v_block, k_context, v_context)}
    if dtypes != {jnp.dtype(jnp.bfloat16)}:
        return f"dtypes {sorted(map(str, dtypes))}: all five arrays must be bfloat16"
    _, _, W, _, H = q.shape
    if H not in HEAD_SIZES:
        return f"head size {H}: it must be one of {HEAD_SIZES}"
    if W > MAX_WIDTH:
        return f"block width {W}: at most {MAX_WIDTH}"
    return None


class Layout(NamedTuple):
    """Sizes of one call. `width` is W padded to a power of two, `heads` the queries of a group that share a row tile."""

    B: int
    A: int
    W: int
    N: int
    K: int
    H: int
    S: int
    width: int
    heads: int

    @property
    def parts(self) -> int:
        return self.N // self.K // self.heads

    @property
    def slots(self) -> int:
        """Of a row tile."""
        return ROWS // self.heads

    @property
    def windows(self) -> int:
        """Own windows that a pair of row tiles needs."""
        return max(1, 2 * self.slots // OWN)

    @property
    def all_slots(self) -> int:
        """Of a sequence, padded to whole pairs of row tiles and whole windows."""
        unit = OWN * self.windows
        return -(-self.A * self.width // unit) * unit

    @property
    def row_tiles(self) -> int:
        return self.all_slots // self.slots

    @property
    def all_keys(self) -> int:
        return -(-self.S // CONTEXT_KEYS) * CONTEXT_KEYS


def layout(q_shape, context_shape) -> Layout:
    B, A, W, N, H = q_shape
    _, S, K, _ = context_shape
    width = max(8, 1 << (W - 1).bit_length())
    heads = next(heads for heads in (4, 2, 1) if N // K % heads == 0 and heads * width <= ROWS)
    return Layout(B, A, W, N, K, H, S, width, heads)


# Arrays outside the kernels. Without padding the five arrays go in as they are: only numbers of rows are rearranged.


def pad_blocks(x_BAW: jax.Array, to: Layout, fill: float = 0) -> jax.Array:
    """[B, A, W, …] → [B, T, …]."""
    more = to.all_slots // to.width - to.A
    edges = ((0, 0), (0, more), (0, to.width - to.W)) + ((0, 0),) * (x_BAW.ndim - 3)
    return jnp.pad(x_BAW, edges, constant_values=fill).reshape(to.B, to.all_slots, *x_BAW.shape[3:])


def cut_blocks(x_BT: jax.Array, to: Layout) -> jax.Array:
    return x_BT.reshape(to.B, -1, to.width, *x_BT.shape[2:])[:, : to.A, : to.W]


def pad_context(x_BSKH: jax.Array, to: Layout) -> jax.Array:
    return jnp.pad(x_BSKH, ((0, 0), (0, to.all_keys - to.S), (0, 0), (0, 0)))


def tile_rows(x_BTN: jax.Array, to: Layout) -> jax.Array:
    """One number a row, [B, T, N] → [B, K·P, row tiles, R]."""
    x = x_BTN.reshape(to.B, to.row_tiles, to.slots, to.K * to.parts, to.heads)
    return x.transpose(0, 3, 1, 4, 2).reshape(to.B, to.K * to.parts, to.row_tiles, ROWS)


def untile_rows(x_BPIR: jax.Array, to: Layout) -> jax.Array:
    x = x_BPIR.reshape(to.B, to.K * to.parts, to.row_tiles, to.heads, to.slots)
    return x.transpose(0, 2, 4, 1, 3).reshape(to.B, to.all_slots, to.N)


class Ranges(NamedTuple):
    """First and one past the last context position of each slot, int32 [B, A, W], and which blocks are real [B, A]."""

    low: jax.Array
    high: jax.Array
    real: jax.Array

    def of_rows(self, to: Layout) -> jax.Array:
        """int32 [B, row tiles, 2, R]: the two bounds of each row; a row of padding ends at 0."""
        bounds_BAW2 = jnp.stack([self.low, jnp.where(self.real[..., None], self.high, 0)], axis=-1)
        bounds = pad_blocks(bounds_BAW2, to).reshape(to.B, to.row_tiles, 1, to.slots, 2)
        bounds = jnp.broadcast_to(bounds, (to.B, to.row_tiles, to.heads, to.slots, 2))
        return bounds.reshape(to.B, to.row_tiles, ROWS, 2).swapaxes(2, 3)

    def overlap(self, to: Layout, row_tiles: int, keys: int) -> _tiles.Overlap:
        """Runs of `row_tiles` row tiles against tiles of `keys` context keys."""
        more = ((0, 0), (0, to.all_slots // to.width - to.A), (0, 0))
        low_BAW, high_BAW, real_BA = jnp.pad(self.low, more), jnp.pad(self.high, more), jnp.pad(self.real, more[:2])
        return _tiles.overlap(low_BAW, high_BAW, real_BA, row_tiles * to.slots // to.width, keys, to.all_keys // keys)


def ranges(starts_BA, ends_BA, mask, to: Layout) -> Ranges:
    return Ranges(*_tiles.slot_ranges(starts_BA, ends_BA, to.W, mask.window), ends_BA > starts_BA)


def listed(visits: _tiles.Visits, tiles: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """first [tiles + 1], other [V], kind [V]: the visits of tile i are entries first[i] … first[i + 1] − 1."""
    counted = jnp.arange(visits.tile.size) < visits.count
    number = jnp.zeros(tiles + 1, jnp.int32).at[visits.tile + 1].add(counted.astype(jnp.int32))
    return jnp.cumsum(number, dtype=jnp.int32), visits.other, visits.kind


# What the kernels share.


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


def smem(*shape: int) -> plgpu.SMEM:
    return plgpu.SMEM(shape, jnp.bfloat16, transforms=TILED)


def ring(tiles, copies: int = 1) -> Ring:
    here = plgpu.Barrier(num_arrivals=copies, num_barriers=STAGES)
    return Ring(tiles, here, plgpu.Barrier(num_arrivals=2, num_barriers=STAGES))


def wait_until_free(ring: Ring, step) -> None:
    @pl.when(step >= STAGES)
    def _():
        plgpu.barrier_wait(ring.free.at[lax.rem(step, STAGES)])


def drain(ring: Ring, steps) -> None:
    """Waits for the readers of the last stages: no barrier ends with an arrival that nothing saw."""

    @pl.loop(lax.max(steps - STAGES, 0), steps)
    def _(step):
        plgpu.barrier_wait(ring.free.at[lax.rem(step, STAGES)])


def start_copies(rows_ref, target, barrier, to: Layout, batch, slot, queries) -> None:
    """Begins to copy a row tile of [B, T, N, H]: one copy for each of its queries."""
    for query in range(to.heads):
        source = rows_ref.at[batch, pl.ds(slot, to.slots), queries * to.heads + query]
        plgpu.copy_gmem_to_smem(source, target.at[pl.ds(query * to.slots, to.slots)], barrier)


def write_rows(value_RH, rows_ref, buffer, to: Layout, batch, slot, queries) -> None:
    """Writes a row tile of [B, T, N, H] through shared memory that nothing else uses."""
    buffer[...] = value_RH.astype(buffer.dtype)
    plgpu.commit_smem()
    for query in range(to.heads):
        target = rows_ref.at[batch, pl.ds(slot, to.slots), queries * to.heads + query]
        plgpu.copy_smem_to_gmem(buffer.at[pl.ds(query * to.slots, to.slots)], target)
    plgpu.wait_smem_to_gmem(0)


def copy_own(at: Place, to: Layout, sources, targets, barrier) -> None:
    """Begins to copy the own windows of a pair of row tiles from the keys and the values of the blocks."""
    for source_ref, target in zip(sources, targets, strict=True):
        for window in range(to.windows):
            slots = pl.ds(at.own_slot(to, window), OWN)
            plgpu.copy_gmem_to_smem(source_ref.at[at.batch, slots, at.head], target.at[window], barrier)


def copy_context(at: Place, to: Layout, visits: Visited, keys: int, sources, rings) -> None:
    """Of the copying warpgroup: the context tiles of all visits, through the rings of keys and of values."""

    @pl.loop(0, visits.steps)
    def _(step):
        stage, first_key = lax.rem(step, STAGES), visits.first_key(step, to, keys)
        for source_ref, ring in zip(sources, rings, strict=True):
            wait_until_free(ring, step)
            source = source_ref.at[at.batch, pl.ds(first_key, keys), at.head]
            plgpu.copy_gmem_to_smem(source, ring.tiles.at[stage], ring.here.at[stage])

    for ring in rings:
        drain(ring, visits.steps)


def load(numbers_R, row_axis: int) -> jax.Array:
    """One number a row, held as scores whose rows lie along that axis need it."""
    return plgpu.load(numbers_R, (), layout=plgpu.Layout.WGMMA.reduce(1 - row_axis))


def product(a, b, total=None) -> jax.Array:
    """total + a @ b in float32, complete."""
    if total is None:
        total = plgpu.layout_cast(jnp.zeros((a.shape[0], b.shape[1]), jnp.float32), plgpu.Layout.WGMMA)
    return pl.run_state(lambda total_ref: plgpu.wgmma(total_ref, a, b))(plgpu.ACC.init(total))


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
    """Runs both halves of a kernel. Registers go from the copying warpgroup to the others (of 65,536, 168 a thread)."""
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup < 2)
    def _():
        plgpu.set_max_registers(232, action="increase")
        compute(warpgroup)

    @pl.when(warpgroup == 2)
    def _():
        plgpu.set_max_registers(48, action="decrease")
        copy()


# Forward.


class ForwardScratch(NamedTuple):
    q: Any
    bounds: Any
    lse: Any
    k_own: Any
    v_own: Any
    k: Ring
    v: Ring
    rows_here: Any
    own_here: Any


def _forward_kernel(
    first_ref, other_ref, kind_ref, bounds_ref, q_ref, k_block_ref, v_block_ref, k_ref, v_ref,
    out_ref, lse_ref, here: ForwardScratch,
    *, to: Layout, mask, scale: float,
):  # fmt: skip
    at = pair_of_tiles(to)
    visits = visited(first_ref, other_ref, at.batch * (to.row_tiles // 2) + at.pair)

    def compute(warpgroup):
        tile, q = 2 * at.pair + warpgroup, here.q.at[warpgroup]
        slot, own, rows_here = tile * to.slots, at.window(to, warpgroup), here.rows_here.at[warpgroup]
        start_copies(q_ref, q, rows_here, to, at.batch, slot, at.queries)
        plgpu.copy_gmem_to_smem(bounds_ref.at[at.batch, tile], here.bounds.at[warpgroup], rows_here)
        plgpu.barrier_wait(rows_here)
        bounds = here.bounds.at[warpgroup]

        plgpu.barrier_wait(here.own_here)
        scores = product(q, transposed(here.k_own.at[own])) * (scale * LOG2E)
        scores = mask_own(scores, to, mask, slot, at.own_slot(to, own), row_axis=0)
        top_R = scores.max(1)
        weights = jnp.exp2(scores - spread(top_R, scores, 0))
        mixed_RH = product(weights.astype(q.dtype), here.v_own.at[own])

        def add_keys(step, carry):
            mixed_RH, top_R, total_R = carry
            stage = lax.rem(step, STAGES)
            plgpu.barrier_wait(here.k.here.at[stage])
            scores = product(q, transposed(here.k.tiles.at[stage])) * (scale * LOG2E)
            plgpu.barrier_arrive(here.k.free.at[stage])
            first_key = visits.first_key(step, to, FORWARD_KEYS)
            scores = mask_context(scores, kind_ref[visits.first + step], bounds, first_key, row_axis=0)
            new_top_R = jnp.maximum(top_R, scores.max(1))
            shrink_R = jnp.exp2(top_R - new_top_R)
            weights = jnp.exp2(scores - spread(new_top_R, scores, 0))
            total_R = total_R * shrink_R + weights.sum(1)
            mixed_RH *= spread(shrink_R, mixed_RH, 0)
            plgpu.barrier_wait(here.v.here.at[stage])
            mixed_RH = product(weights.astype(q.dtype), here.v.tiles.at[stage], mixed_RH)
            plgpu.barrier_arrive(here.v.free.at[stage])
            return mixed_RH, new_top_R, total_R

        mixed_RH, top_R, total_R = lax.fori_loop(0, visits.steps, add_keys, (mixed_RH, top_R, weights.sum(1)))
        real_R = load(bounds.at[1], 0) > 0
        here.lse[warpgroup] = jnp.where(real_R, top_R * (1 / LOG2E) + jnp.log(total_R), jnp.inf)
        inverse_R = jnp.where(real_R, 1.0 / total_R, 0.0)
        write_rows(mixed_RH * spread(inverse_R, mixed_RH, 0), out_ref, q, to, at.batch, slot, at.queries)
        plgpu.copy_smem_to_gmem(here.lse.at[warpgroup], lse_ref.at[at.batch, at.queries, tile])
        plgpu.wait_smem_to_gmem(0)

    def copy():
        copy_own(at, to, (k_block_ref, v_block_ref), (here.k_own, here.v_own), here.own_here)
        copy_context(at, to, visits, FORWARD_KEYS, (k_ref, v_ref), (here.k, here.v))

    on_warpgroups(compute, copy)


def forward(q, k_block, v_block, k_context, v_context, starts, ends, mask, scale):
    """Same results as _xla.forward: the output [B, A, W, N, H] and the log-sum-exp, float32 [B, N, A·W]."""
    to = layout(q.shape, k_context.shape)
    reads = ranges(starts, ends, mask, to)
    pairs = to.row_tiles // 2
    scratch = ForwardScratch(
        q=smem(2, ROWS, to.H),
        bounds=plgpu.SMEM((2, 2, ROWS), jnp.int32),
        lse=plgpu.SMEM((2, ROWS), jnp.float32),
        k_own=smem(to.windows, OWN, to.H),
        v_own=smem(to.windows, OWN, to.H),
        k=ring(smem(STAGES, FORWARD_KEYS, to.H)),
        v=ring(smem(STAGES, FORWARD_KEYS, to.H)),
        rows_here=plgpu.Barrier(num_arrivals=to.heads + 1, num_barriers=2),
        own_here=plgpu.Barrier(num_arrivals=2 * to.windows),
    )
    out_BTNH, lse_BPIR = kernel(
        functools.partial(_forward_kernel, to=to, mask=mask, scale=scale),
        "block_attention_forward",
        dict(queries=to.K * to.parts, pair=pairs, batch=to.B),
        out_type=[
            jax.ShapeDtypeStruct((to.B, to.all_slots, to.N, to.H), q.dtype),
            jax.ShapeDtypeStruct((to.B, to.K * to.parts, to.row_tiles, ROWS), jnp.float32),
        ],
        scratch_types=[scratch],
    )(
        *listed(_tiles.visits(reads.overlap(to, 2, FORWARD_KEYS)), to.B * pairs),
        reads.of_rows(to),
        *(pad_blocks(x, to) for x in (q, k_block, v_block)),
        *(pad_context(x, to) for x in (k_context, v_context)),
    )
    lse_BAWN = cut_blocks(untile_rows(lse_BPIR, to), to)
    return cut_blocks(out_BTNH, to), lse_BAWN.transpose(0, 3, 1, 2).reshape(to.B, to.N, to.A * to.W)


# Backward, in two kernels; scores are recomputed from the saved log-sum-exp. No sum leaves its kernel before it is
# complete, so there are no atomics. Only a block's own keys, where a group has several parts, are summed outside.


def score_gradients(scores, d_weights, stats, row_axis: int) -> tuple[jax.Array, jax.Array]:
    """Softmax weights and gradients of the scaled scores, given the [2, R] log-sum-exp and row sums of d_out · out.

    A row of padding has log-sum-exp +inf, so both are 0 there.
    """
    weights = jnp.exp2(scores - spread(load(stats.at[0], row_axis), scores, row_axis))
    return weights, weights * (d_weights - spread(load(stats.at[1], row_axis), scores, row_axis))


class QueryScratch(NamedTuple):
    q: Any
    d_out: Any
    bounds: Any
    stats: Any
    k_own: Any
    v_own: Any
    k: Ring
    v: Ring
    rows_here: Any
    own_here: Any


def _query_kernel(
    first_ref, other_ref, kind_ref, bounds_ref, stats_ref, q_ref, d_out_ref, k_block_ref, v_block_ref, k_ref, v_ref,
    dq_ref, dk_block_ref, dv_block_ref, here: QueryScratch,
    *, to: Layout, mask, scale: float,
):  # fmt: skip
    at = pair_of_tiles(to)
    visits = visited(first_ref, other_ref, at.batch * (to.row_tiles // 2) + at.pair)

    def compute(warpgroup):
        tile, q, d_out = 2 * at.pair + warpgroup, here.q.at[warpgroup], here.d_out.at[warpgroup]
        slot, own, rows_here = tile * to.slots, at.window(to, warpgroup), here.rows_here.at[warpgroup]
        start_copies(q_ref, q, rows_here, to, at.batch, slot, at.queries)
        start_copies(d_out_ref, d_out, rows_here, to, at.batch, slot, at.queries)
        plgpu.copy_gmem_to_smem(bounds_ref.at[at.batch, tile], here.bounds.at[warpgroup], rows_here)
        plgpu.copy_gmem_to_smem(stats_ref.at[at.batch, at.queries, tile], here.stats.at[warpgroup], rows_here)
        plgpu.barrier_wait(rows_here)
        bounds, stats = here.bounds.at[warpgroup], here.stats.at[warpgroup]

        plgpu.barrier_wait(here.own_here)
        k_own, v_own, own_slot = here.k_own.at[own], here.v_own.at[own], at.own_slot(to, own)
        scores = product(q, transposed(k_own)) * (scale * LOG2E)
        scores = mask_own(scores, to, mask, slot, own_slot, row_axis=0)
        _, d_scores = score_gradients(scores, product(d_out, transposed(v_own)), stats, row_axis=0)

        def add_keys(step, dq_RH):
            stage = lax.rem(step, STAGES)
            k, v = here.k.tiles.at[stage], here.v.tiles.at[stage]
            plgpu.barrier_wait(here.k.here.at[stage])
            scores = product(q, transposed(k)) * (scale * LOG2E)
            first_key = visits.first_key(step, to, BACKWARD_KEYS)
            scores = mask_context(scores, kind_ref[visits.first + step], bounds, first_key, row_axis=0)
            plgpu.barrier_wait(here.v.here.at[stage])
            d_weights = product(d_out, transposed(v))
            plgpu.barrier_arrive(here.v.free.at[stage])
            _, d_scores = score_gradients(scores, d_weights, stats, row_axis=0)
            dq_RH = product(d_scores.astype(q.dtype), k, dq_RH)
            plgpu.barrier_arrive(here.k.free.at[stage])
            return dq_RH

        dq_RH = lax.fori_loop(0, visits.steps, add_keys, product(d_scores.astype(q.dtype), k_own))

        # The gradients of the own keys need the scores the other way round.
        scores = product(k_own, transposed(q)) * (scale * LOG2E)
        scores = mask_own(scores, to, mask, slot, own_slot, row_axis=1)
        weights, d_scores = score_gradients(scores, product(v_own, transposed(d_out)), stats, row_axis=1)
        d_out[...] = product(weights.astype(q.dtype), d_out).astype(q.dtype)
        q[...] = (product(d_scores.astype(q.dtype), q) * scale).astype(q.dtype)
        plgpu.commit_smem()
        tile_slots = pl.ds(pl.multiple_of(slot - own_slot, to.slots), to.slots)
        for buffer, target_ref in ((q, dk_block_ref), (d_out, dv_block_ref)):
            target = target_ref.at[at.batch, pl.ds(slot, to.slots), at.queries]
            plgpu.copy_smem_to_gmem(buffer.at[tile_slots], target)
        plgpu.wait_smem_to_gmem(0)
        write_rows(dq_RH * scale, dq_ref, q, to, at.batch, slot, at.queries)

    def copy():
        copy_own(at, to, (k_block_ref, v_block_ref), (here.k_own, here.v_own), here.own_here)
        copy_context(at, to, visits, BACKWARD_KEYS, (k_ref, v_ref), (here.k, here.v))

    on_warpgroups(compute, copy)


class RowTiles(NamedTuple):
    """What a stage of the context kernel holds of a row tile."""

    q: Any
    d_out: Any
    bounds: Any
    stats: Any


class ContextScratch(NamedTuple):
    k: Any
    v: Any
    rows: Ring
    keys_here: Any


def _context_kernel(
    first_ref, other_ref, kind_ref, bounds_ref, stats_ref, q_ref, d_out_ref, k_ref, v_ref,
    dk_ref, dv_ref, here: ContextScratch,
    *, to: Layout, scale: float,
):  # fmt: skip
    batch, head, tile = (lax.axis_index(name) for name in ("batch", "head", "keys"))
    visits = visited(first_ref, other_ref, batch * (to.all_keys // CONTEXT_KEYS) + tile)
    steps = visits.steps * to.parts

    def compute(warpgroup):
        first_key = tile * CONTEXT_KEYS + warpgroup * ROWS
        keys, k, v = pl.ds(first_key, ROWS), here.k.at[warpgroup], here.v.at[warpgroup]
        for source_ref, target in ((k_ref, k), (v_ref, v)):
            plgpu.copy_gmem_to_smem(source_ref.at[batch, keys, head], target, here.keys_here.at[warpgroup])
        plgpu.barrier_wait(here.keys_here.at[warpgroup])

        def add_rows(step, carry):
            dk, dv = carry
            stage = lax.rem(step, STAGES)
            plgpu.barrier_wait(here.rows.here.at[stage])
            q, d_out = here.rows.tiles.q.at[stage], here.rows.tiles.d_out.at[stage]
            scores = product(k, transposed(q)) * (scale * LOG2E)
            kind = kind_ref[visits.first + lax.div(step, to.parts)]
            scores = mask_context(scores, kind, here.rows.tiles.bounds.at[stage], first_key, row_axis=1)
            d_weights = product(v, transposed(d_out))
            weights, d_scores = score_gradients(scores, d_weights, here.rows.tiles.stats.at[stage], row_axis=1)
            dv = product(weights.astype(k.dtype), d_out, dv)
            dk = product(d_scores.astype(k.dtype), q, dk)
            plgpu.barrier_arrive(here.rows.free.at[stage])
            return dk, dv

        zeros = plgpu.layout_cast(jnp.zeros((ROWS, to.H), jnp.float32), plgpu.Layout.WGMMA)
        dk, dv = lax.fori_loop(0, steps, add_rows, (zeros, zeros))
        k[...], v[...] = (dk * scale).astype(k.dtype), dv.astype(k.dtype)
        plgpu.commit_smem()
        for source, target_ref in ((k, dk_ref), (v, dv_ref)):
            plgpu.copy_smem_to_gmem(source, target_ref.at[batch, keys, head])
        plgpu.wait_smem_to_gmem(0)

    def copy():
        @pl.loop(0, steps)
        def _(step):
            wait_until_free(here.rows, step)
            stage = lax.rem(step, STAGES)
            row_tile = lax.rem(other_ref[visits.first + lax.div(step, to.parts)], to.row_tiles)
            queries = head * to.parts + lax.rem(step, to.parts)
            barrier, tiles = here.rows.here.at[stage], here.rows.tiles
            start_copies(q_ref, tiles.q.at[stage], barrier, to, batch, row_tile * to.slots, queries)
            start_copies(d_out_ref, tiles.d_out.at[stage], barrier, to, batch, row_tile * to.slots, queries)
            plgpu.copy_gmem_to_smem(bounds_ref.at[batch, row_tile], tiles.bounds.at[stage], barrier)
            plgpu.copy_gmem_to_smem(stats_ref.at[batch, queries, row_tile], tiles.stats.at[stage], barrier)

        drain(here.rows, steps)

    on_warpgroups(compute, copy)


def backward(q, k_block, v_block, k_context, v_context, starts, ends, out, lse_BNR, d_out, mask, scale):
    """Gradients of the five arrays, each in its array's shape and dtype; same contract as _xla.backward."""
    to = layout(q.shape, k_context.shape)
    reads = ranges(starts, ends, mask, to)
    delta_BAWN = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), -1)
    lse_BAWN = lse_BNR.reshape(to.B, to.N, to.A, to.W).transpose(0, 2, 3, 1) * LOG2E
    stats = [tile_rows(pad_blocks(x, to, fill), to) for x, fill in ((lse_BAWN, jnp.inf), (delta_BAWN, 0.0))]
    rows = (reads.of_rows(to), jnp.stack(stats, axis=3), *(pad_blocks(x, to) for x in (q, d_out.astype(q.dtype))))
    context = [pad_context(x, to) for x in (k_context, v_context)]

    dq, dk_block, dv_block = _query_call(to, mask, scale)(
        *listed(_tiles.visits(reads.overlap(to, 2, BACKWARD_KEYS)), to.B * to.row_tiles // 2),
        *rows,
        *(pad_blocks(x, to) for x in (k_block, v_block)),
        *context,
    )
    dk_context, dv_context = _context_call(to, scale)(
        *listed(_tiles.transposed_visits(reads.overlap(to, 1, CONTEXT_KEYS)), to.B * to.all_keys // CONTEXT_KEYS),
        *rows,
        *context,
    )

    def summed(x_BTPH):
        parts = x_BTPH.reshape(to.B, to.all_slots, to.K, to.parts, to.H)
        return cut_blocks(parts.sum(3, dtype=jnp.float32).astype(q.dtype), to)

    return cut_blocks(dq, to), summed(dk_block), summed(dv_block), dk_context[:, : to.S], dv_context[:, : to.S]


def _query_call(to: Layout, mask, scale: float):
    scratch = QueryScratch(
        q=smem(2, ROWS, to.H),
        d_out=smem(2, ROWS, to.H),
        bounds=plgpu.SMEM((2, 2, ROWS), jnp.int32),
        stats=plgpu.SMEM((2, 2, ROWS), jnp.float32),
        k_own=smem(to.windows, OWN, to.H),
        v_own=smem(to.windows, OWN, to.H),
        k=ring(smem(STAGES, BACKWARD_KEYS, to.H)),
        v=ring(smem(STAGES, BACKWARD_KEYS, to.H)),
        rows_here=plgpu.Barrier(num_arrivals=2 * to.heads + 2, num_barriers=2),
        own_here=plgpu.Barrier(num_arrivals=2 * to.windows),
    )
    own = jax.ShapeDtypeStruct((to.B, to.all_slots, to.K * to.parts, to.H), jnp.bfloat16)
    return kernel(
        functools.partial(_query_kernel, to=to, mask=mask, scale=scale),
        "block_attention_backward_queries",
        dict(queries=to.K * to.parts, pair=to.row_tiles // 2, batch=to.B),
        out_type=[jax.ShapeDtypeStruct((to.B, to.all_slots, to.N, to.H), jnp.bfloat16), own, own],
        scratch_types=[scratch],
    )


def _context_call(to: Layout, scale: float):
    tiles = RowTiles(
        q=smem(STAGES, ROWS, to.H),
        d_out=smem(STAGES, ROWS, to.H),
        bounds=plgpu.SMEM((STAGES, 2, ROWS), jnp.int32),
        stats=plgpu.SMEM((STAGES, 2, ROWS), jnp.float32),
    )
    scratch = ContextScratch(
        k=smem(2, ROWS, to.H),
        v=smem(2, ROWS, to.H),
        rows=ring(tiles, copies=2 * to.heads + 2),
        keys_here=plgpu.Barrier(num_arrivals=2, num_barriers=2),
    )
    keys = jax.ShapeDtypeStruct((to.B, to.all_keys, to.K, to.H), jnp.bfloat16)
    return kernel(
        functools.partial(_context_kernel, to=to, scale=scale),
        "block_attention_backward_context",
        dict(head=to.K, keys=to.all_keys // CONTEXT_KEYS, batch=to.B),
        out_type=[keys, keys],
        scratch_types=[scratch],
    )

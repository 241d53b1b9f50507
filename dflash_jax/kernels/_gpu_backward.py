"""Backward pass of block attention on Hopper, in two kernels; scores are recomputed from the saved log-sum-exp.

By row tile: the gradients of the queries and of the tile's own slots. By key tile: those of the context, summed over
the row tiles that reach it and over the queries of a group. No sum leaves its kernel before it is complete, so there
are no atomics. Only where a group takes several row tiles for the same slots, their parts of the block gradients are
added outside.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from dflash_jax.kernels import _gpu_layout, _tiles
from dflash_jax.kernels import _gpu_program as program
from dflash_jax.kernels._gpu_layout import BACKWARD_KEYS, CONTEXT_KEYS, OWN, ROWS, Layout


def score_gradients(scores, d_weights, stats, row_axis: int) -> tuple[jax.Array, jax.Array]:
    """Softmax weights and gradients of the scaled scores, given the [2, R] log-sum-exp and row sums of d_out · out.

    A row of padding has log-sum-exp +inf, so both are 0 there.
    """
    weights = jnp.exp2(scores - program.spread(program.load(stats.at[0], row_axis), scores, row_axis))
    return weights, weights * (d_weights - program.spread(program.load(stats.at[1], row_axis), scores, row_axis))


class QueryScratch(NamedTuple):
    q: Any
    d_out: Any
    bounds: Any
    stats: Any
    k_own: Any
    v_own: Any
    k: program.Ring
    v: program.Ring
    rows_here: Any
    own_here: Any


def _query_kernel(
    first_ref, other_ref, kind_ref, bounds_ref, stats_ref, q_ref, d_out_ref, k_block_ref, v_block_ref, k_ref, v_ref,
    dq_ref, dk_block_ref, dv_block_ref, here: QueryScratch,
    *, to: Layout, mask, scale: float,
):  # fmt: skip
    at = program.pair_of_tiles(to)
    visits = program.visited(first_ref, other_ref, at.batch * (to.row_tiles // 2) + at.pair)

    def compute(warpgroup):
        tile, q, d_out = 2 * at.pair + warpgroup, here.q.at[warpgroup], here.d_out.at[warpgroup]
        slot, own, rows_here = tile * to.slots, at.window(to, warpgroup), here.rows_here.at[warpgroup]
        program.start_copies(q_ref, q, rows_here, to, at.batch, slot, at.queries)
        program.start_copies(d_out_ref, d_out, rows_here, to, at.batch, slot, at.queries)
        program.copy_in(bounds_ref.at[at.batch, tile], here.bounds.at[warpgroup], rows_here)
        program.copy_in(stats_ref.at[at.batch, at.queries, tile], here.stats.at[warpgroup], rows_here)
        program.wait(rows_here)
        bounds, stats = here.bounds.at[warpgroup], here.stats.at[warpgroup]

        program.wait(here.own_here)
        k_own, v_own, own_slot = here.k_own.at[own], here.v_own.at[own], at.own_slot(to, own)
        scores = program.product(q, program.transposed(k_own)) * (scale * program.LOG2E)
        scores = program.mask_own(scores, to, mask, slot, own_slot, row_axis=0)
        _, d_scores = score_gradients(scores, program.product(d_out, program.transposed(v_own)), stats, row_axis=0)

        def add_keys(step, dq_RH):
            stage = lax.rem(step, program.STAGES)
            k, v = here.k.tiles.at[stage], here.v.tiles.at[stage]
            program.wait(here.k.here.at[stage])
            scores = program.product(q, program.transposed(k)) * (scale * program.LOG2E)
            first_key = visits.first_key(step, to, BACKWARD_KEYS)
            scores = program.mask_context(scores, kind_ref[visits.first + step], bounds, first_key, row_axis=0)
            program.wait(here.v.here.at[stage])
            d_weights = program.product(d_out, program.transposed(v))
            program.arrive(here.v.free.at[stage])
            _, d_scores = score_gradients(scores, d_weights, stats, row_axis=0)
            dq_RH = program.product(d_scores.astype(q.dtype), k, dq_RH)
            program.arrive(here.k.free.at[stage])
            return dq_RH

        dq_RH = lax.fori_loop(0, visits.steps, add_keys, program.product(d_scores.astype(q.dtype), k_own))

        # The gradients of the own keys need the scores the other way round.
        scores = program.product(k_own, program.transposed(q)) * (scale * program.LOG2E)
        scores = program.mask_own(scores, to, mask, slot, own_slot, row_axis=1)
        weights, d_scores = score_gradients(
            scores, program.product(v_own, program.transposed(d_out)), stats, row_axis=1
        )
        d_out[...] = program.product(weights.astype(q.dtype), d_out).astype(q.dtype)
        q[...] = (program.product(d_scores.astype(q.dtype), q) * scale).astype(q.dtype)
        mine = pl.ds(pl.multiple_of(slot - own_slot, to.slots), to.slots)  # the other slots of the window are not
        there = at.batch, pl.ds(slot, to.slots), at.queries
        program.write((q.at[mine], dk_block_ref.at[there]), (d_out.at[mine], dv_block_ref.at[there]))
        q[...] = (dq_RH * scale).astype(q.dtype)
        program.write_rows(q, dq_ref, to, at.batch, slot, at.queries)

    def copy():
        program.copy_own(at, to, (k_block_ref, v_block_ref), (here.k_own, here.v_own), here.own_here)
        program.copy_context(at, to, visits, BACKWARD_KEYS, (k_ref, v_ref), (here.k, here.v))

    program.on_warpgroups(compute, copy)


class RowTiles(NamedTuple):
    """What a stage of the context kernel holds of a row tile."""

    q: Any
    d_out: Any
    bounds: Any
    stats: Any


class ContextScratch(NamedTuple):
    k: Any
    v: Any
    rows: program.Ring
    keys_here: Any


def _context_kernel(
    first_ref, other_ref, kind_ref, bounds_ref, stats_ref, q_ref, d_out_ref, k_ref, v_ref,
    dk_ref, dv_ref, here: ContextScratch,
    *, to: Layout, scale: float,
):  # fmt: skip
    batch, head, tile = (lax.axis_index(name) for name in ("batch", "head", "keys"))
    visits = program.visited(first_ref, other_ref, batch * (to.all_keys // CONTEXT_KEYS) + tile)
    steps = visits.steps * to.parts

    def compute(warpgroup):
        first_key = tile * CONTEXT_KEYS + warpgroup * ROWS
        keys, k, v = pl.ds(first_key, ROWS), here.k.at[warpgroup], here.v.at[warpgroup]
        for source_ref, target in ((k_ref, k), (v_ref, v)):
            program.copy_in(source_ref.at[batch, keys, head], target, here.keys_here.at[warpgroup])
        program.wait(here.keys_here.at[warpgroup])

        def add_rows(step, carry):
            dk, dv = carry
            stage = lax.rem(step, program.STAGES)
            program.wait(here.rows.here.at[stage])
            q, d_out = here.rows.tiles.q.at[stage], here.rows.tiles.d_out.at[stage]
            scores = program.product(k, program.transposed(q)) * (scale * program.LOG2E)
            kind = kind_ref[visits.first + lax.div(step, to.parts)]
            scores = program.mask_context(scores, kind, here.rows.tiles.bounds.at[stage], first_key, row_axis=1)
            d_weights = program.product(v, program.transposed(d_out))
            weights, d_scores = score_gradients(scores, d_weights, here.rows.tiles.stats.at[stage], row_axis=1)
            dv = program.product(weights.astype(k.dtype), d_out, dv)
            dk = program.product(d_scores.astype(k.dtype), q, dk)
            program.arrive(here.rows.free.at[stage])
            return dk, dv

        dk, dv = lax.fori_loop(0, steps, add_rows, (program.zeros(ROWS, to.H),) * 2)
        k[...], v[...] = (dk * scale).astype(k.dtype), dv.astype(k.dtype)
        program.write((k, dk_ref.at[batch, keys, head]), (v, dv_ref.at[batch, keys, head]))

    def copy():
        @pl.loop(0, steps)
        def _(step):
            program.wait_until_free(here.rows, step)
            stage = lax.rem(step, program.STAGES)
            row_tile = lax.rem(other_ref[visits.first + lax.div(step, to.parts)], to.row_tiles)
            queries = head * to.parts + lax.rem(step, to.parts)
            barrier, tiles = here.rows.here.at[stage], here.rows.tiles
            program.start_copies(q_ref, tiles.q.at[stage], barrier, to, batch, row_tile * to.slots, queries)
            program.start_copies(d_out_ref, tiles.d_out.at[stage], barrier, to, batch, row_tile * to.slots, queries)
            program.copy_in(bounds_ref.at[batch, row_tile], tiles.bounds.at[stage], barrier)
            program.copy_in(stats_ref.at[batch, queries, row_tile], tiles.stats.at[stage], barrier)

        program.drain(here.rows, steps)

    program.on_warpgroups(compute, copy)


def backward(q, k_block, v_block, k_context, v_context, starts, ends, out, lse_BNR, d_out, mask, scale):
    """Gradients of the five arrays, each in its array's shape and dtype; same contract as _xla.backward."""
    to = _gpu_layout.layout(q.shape, k_context.shape)
    reads = _gpu_layout.ranges(starts, ends, mask, to)
    delta_BAWN = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), -1)
    lse_BAWN = lse_BNR.reshape(to.B, to.N, to.A, to.W).transpose(0, 2, 3, 1) * program.LOG2E
    stats = [
        _gpu_layout.tile_rows(_gpu_layout.pad_blocks(x, to, fill), to)
        for x, fill in ((lse_BAWN, jnp.inf), (delta_BAWN, 0.0))
    ]
    rows = (
        reads.of_rows(to),
        jnp.stack(stats, axis=3),
        *(_gpu_layout.pad_blocks(x, to) for x in (q, d_out.astype(q.dtype))),
    )
    context = [_gpu_layout.pad_context(x, to) for x in (k_context, v_context)]

    dq, dk_block, dv_block = _query_call(to, mask, scale)(
        *_gpu_layout.listed(_tiles.visits(reads.overlap(to, 2, BACKWARD_KEYS)), to.B * to.row_tiles // 2),
        *rows,
        *(_gpu_layout.pad_blocks(x, to) for x in (k_block, v_block)),
        *context,
    )
    dk_context, dv_context = _context_call(to, scale)(
        *_gpu_layout.listed(
            _tiles.transposed_visits(reads.overlap(to, 1, CONTEXT_KEYS)), to.B * to.all_keys // CONTEXT_KEYS
        ),
        *rows,
        *context,
    )

    def summed(x_BTPH):
        parts = x_BTPH.reshape(to.B, to.all_slots, to.K, to.parts, to.H)
        return _gpu_layout.cut_blocks(parts.sum(3, dtype=jnp.float32).astype(q.dtype), to)

    return (
        _gpu_layout.cut_blocks(dq, to),
        summed(dk_block),
        summed(dv_block),
        dk_context[:, : to.S],
        dv_context[:, : to.S],
    )


def _query_call(to: Layout, mask, scale: float):
    scratch = QueryScratch(
        q=program.tiles(2, ROWS, to.H),
        d_out=program.tiles(2, ROWS, to.H),
        bounds=program.numbers(2, 2, ROWS, dtype=jnp.int32),
        stats=program.numbers(2, 2, ROWS),
        k_own=program.tiles(to.windows, OWN, to.H),
        v_own=program.tiles(to.windows, OWN, to.H),
        k=program.ring(program.tiles(program.STAGES, BACKWARD_KEYS, to.H)),
        v=program.ring(program.tiles(program.STAGES, BACKWARD_KEYS, to.H)),
        rows_here=program.barriers(2, 2 * to.heads + 2),
        own_here=program.barriers(1, 2 * to.windows),
    )
    own = jax.ShapeDtypeStruct((to.B, to.all_slots, to.K * to.parts, to.H), jnp.bfloat16)
    return program.kernel(
        functools.partial(_query_kernel, to=to, mask=mask, scale=scale),
        "block_attention_backward_queries",
        dict(queries=to.K * to.parts, pair=to.row_tiles // 2, batch=to.B),
        out_type=[jax.ShapeDtypeStruct((to.B, to.all_slots, to.N, to.H), jnp.bfloat16), own, own],
        scratch_types=[scratch],
    )


def _context_call(to: Layout, scale: float):
    tiles = RowTiles(
        q=program.tiles(program.STAGES, ROWS, to.H),
        d_out=program.tiles(program.STAGES, ROWS, to.H),
        bounds=program.numbers(program.STAGES, 2, ROWS, dtype=jnp.int32),
        stats=program.numbers(program.STAGES, 2, ROWS),
    )
    scratch = ContextScratch(
        k=program.tiles(2, ROWS, to.H),
        v=program.tiles(2, ROWS, to.H),
        rows=program.ring(tiles, copies=2 * to.heads + 2),
        keys_here=program.barriers(2, 2),
    )
    keys = jax.ShapeDtypeStruct((to.B, to.all_keys, to.K, to.H), jnp.bfloat16)
    return program.kernel(
        functools.partial(_context_kernel, to=to, scale=scale),
        "block_attention_backward_context",
        dict(head=to.K, keys=to.all_keys // CONTEXT_KEYS, batch=to.B),
        out_type=[keys, keys],
        scratch_types=[scratch],
    )

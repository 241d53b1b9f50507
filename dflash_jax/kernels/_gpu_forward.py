"""Forward pass of block attention on Hopper: one running softmax a row tile, over its own slots and its key tiles."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from dflash_jax.kernels import _gpu_layout, _tiles
from dflash_jax.kernels import _gpu_program as program
from dflash_jax.kernels._gpu_layout import OWN, ROWS, Layout


class ForwardScratch(NamedTuple):
    q: Any
    bounds: Any
    lse: Any
    k_own: Any
    v_own: Any
    k: program.Ring
    v: program.Ring
    rows_here: Any
    own_here: Any


def _forward_kernel(
    first_ref, other_ref, kind_ref, bounds_ref, q_ref, k_block_ref, v_block_ref, k_ref, v_ref,
    out_ref, lse_ref, here: ForwardScratch,
    *, to: Layout, mask, scale: float,
):  # fmt: skip
    at = program.pair_of_tiles(to)
    visits = program.visited(first_ref, other_ref, at.batch * (to.row_tiles // 2) + at.pair)

    def compute(warpgroup):
        tile, q = 2 * at.pair + warpgroup, here.q.at[warpgroup]
        slot, own, rows_here = tile * to.slots, at.window(to, warpgroup), here.rows_here.at[warpgroup]
        program.start_copies(q_ref, q, rows_here, to, at.batch, slot, at.queries)
        program.copy_in(bounds_ref.at[at.batch, tile], here.bounds.at[warpgroup], rows_here)
        program.wait(rows_here)
        bounds = here.bounds.at[warpgroup]

        program.wait(here.own_here)
        scores = program.product(q, program.transposed(here.k_own.at[own])) * (scale * program.LOG2E)
        scores = program.mask_own(scores, to, mask, slot, at.own_slot(to, own), row_axis=0)
        top_R = scores.max(1)
        weights = jnp.exp2(scores - program.spread(top_R, scores, 0))
        mixed_RH = program.product(weights.astype(q.dtype), here.v_own.at[own])

        def add_keys(step, carry):
            mixed_RH, top_R, total_R = carry
            stage = lax.rem(step, program.STAGES)
            program.wait(here.k.here.at[stage])
            scores = program.product(q, program.transposed(here.k.tiles.at[stage])) * (scale * program.LOG2E)
            program.arrive(here.k.free.at[stage])
            first_key = visits.first_key(step, to, to.forward_keys)
            scores = program.mask_context(scores, kind_ref[visits.first + step], bounds, first_key, row_axis=0)
            new_top_R = jnp.maximum(top_R, scores.max(1))
            shrink_R = jnp.exp2(top_R - new_top_R)
            weights = jnp.exp2(scores - program.spread(new_top_R, scores, 0))
            total_R = total_R * shrink_R + weights.sum(1)
            mixed_RH *= program.spread(shrink_R, mixed_RH, 0)
            program.wait(here.v.here.at[stage])
            mixed_RH = program.product(weights.astype(q.dtype), here.v.tiles.at[stage], mixed_RH)
            program.arrive(here.v.free.at[stage])
            return mixed_RH, new_top_R, total_R

        mixed_RH, top_R, total_R = lax.fori_loop(0, visits.steps, add_keys, (mixed_RH, top_R, weights.sum(1)))
        real_R = program.load(bounds.at[1], 0) > 0
        here.lse[warpgroup] = jnp.where(real_R, top_R * (1 / program.LOG2E) + jnp.log(total_R), jnp.inf)
        inverse_R = jnp.where(real_R, 1.0 / total_R, 0.0)
        q[...] = (mixed_RH * program.spread(inverse_R, mixed_RH, 0)).astype(q.dtype)
        program.write_rows(q, out_ref, to, at.batch, slot, at.queries)
        program.write((here.lse.at[warpgroup], lse_ref.at[at.batch, at.queries, tile]))

    def copy():
        program.copy_own(at, to, (k_block_ref, v_block_ref), (here.k_own, here.v_own), here.own_here)
        program.copy_context(at, to, visits, to.forward_keys, (k_ref, v_ref), (here.k, here.v))

    program.on_warpgroups(compute, copy)


def forward(q, k_block, v_block, k_context, v_context, starts, ends, mask, scale):
    """Same results as _xla.forward: the output [B, A, W, N, H] and the log-sum-exp, float32 [B, N, A·W]."""
    to = _gpu_layout.layout(q.shape, k_context.shape)
    reads = _gpu_layout.ranges(starts, ends, mask, to)
    pairs = to.row_tiles // 2
    scratch = ForwardScratch(
        q=program.tiles(2, ROWS, to.H),
        bounds=program.numbers(2, 2, ROWS, dtype=jnp.int32),
        lse=program.numbers(2, ROWS),
        k_own=program.tiles(to.windows, OWN, to.H),
        v_own=program.tiles(to.windows, OWN, to.H),
        k=program.ring(program.tiles(program.STAGES, to.forward_keys, to.H)),
        v=program.ring(program.tiles(program.STAGES, to.forward_keys, to.H)),
        rows_here=program.barriers(2, to.heads + 1),
        own_here=program.barriers(1, 2 * to.windows),
    )
    out_BTNH, lse_BPIR = program.kernel(
        functools.partial(_forward_kernel, to=to, mask=mask, scale=scale),
        "block_attention_forward",
        dict(queries=to.K * to.parts, pair=pairs, batch=to.B),
        out_type=[
            jax.ShapeDtypeStruct((to.B, to.all_slots, to.N, to.H), q.dtype),
            jax.ShapeDtypeStruct((to.B, to.K * to.parts, to.row_tiles, ROWS), jnp.float32),
        ],
        scratch_types=[scratch],
    )(
        *_gpu_layout.listed(_tiles.visits(reads.overlap(to, 2, to.forward_keys)), to.B * pairs),
        reads.of_rows(to),
        *(_gpu_layout.pad_blocks(x, to) for x in (q, k_block, v_block)),
        *(_gpu_layout.pad_context(x, to) for x in (k_context, v_context)),
    )
    lse_BAWN = _gpu_layout.cut_blocks(_gpu_layout.untile_rows(lse_BPIR, to), to)
    return _gpu_layout.cut_blocks(out_BTNH, to), lse_BAWN.transpose(0, 3, 1, 2).reshape(to.B, to.N, to.A * to.W)

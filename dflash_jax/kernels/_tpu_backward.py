"""Backward pass of block attention on TPU, in two kernels; scores are recomputed from the saved log-sum-exp.

By query tile: the gradients of the queries and of the tile's own slots, which nothing else reads. By key tile: those
of the context, summed over the query tiles that reach it and over the queries of a group. No sum leaves its kernel
before it is complete, so there are no atomics and the result does not depend on timing.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from dflash_jax.kernels import _tiles, _tpu_layout
from dflash_jax.kernels import _tpu_program as program
from dflash_jax.kernels._tpu_layout import Layout
from dflash_jax.kernels._tpu_program import OVER_FIRST, ROWS_BY_ROWS, Visit, dot


def _row_gradients(scores, values, d_out_RH, stats_ref) -> tuple[jax.Array, jax.Array]:
    """Softmax weights and score gradients [keys, R]. A padding row has log-sum-exp +inf, so both are 0 there."""
    weights = jnp.exp(scores - stats_ref[0:1])
    return weights, weights * (dot(values, d_out_RH, ROWS_BY_ROWS) - stats_ref[1:2])


def _query_kernel(
    tile_ref, other_ref, kind_ref,
    q_ref, k_block_ref, v_block_ref, bias_ref, bounds_ref, d_out_ref, stats_ref, k_ref, v_ref,
    dq_ref, dk_block_ref, dv_block_ref,
    sum_ref,
    *, key_tiles: int, scale: float,
):  # fmt: skip
    visit = Visit(kind_ref, other_ref, key_tiles)
    q_RH, d_out_RH = program.scaled_rows(q_ref, scale), program.rows_of(d_out_ref)

    @visit.first
    def own_slots():
        scores_ER = dot(k_block_ref[...], q_RH, ROWS_BY_ROWS) + bias_ref[...]
        weights_ER, d_scores_ER = _row_gradients(scores_ER, v_block_ref[...], d_out_RH, stats_ref)
        dk_block_ref[...] = dot(d_scores_ER, q_RH).astype(dk_block_ref.dtype)
        dv_block_ref[...] = dot(weights_ER, d_out_RH).astype(dv_block_ref.dtype)
        sum_ref[...] = dot(k_block_ref[...], d_scores_ER.astype(q_RH.dtype), OVER_FIRST)

    @visit.keys(k_ref, q_RH, bounds_ref)
    def add_keys(scores_CR):
        _, d_scores_CR = _row_gradients(scores_CR, v_ref[...], d_out_RH, stats_ref)
        sum_ref[...] += dot(k_ref[...], d_scores_CR.astype(q_RH.dtype), OVER_FIRST)

    @visit.last
    def write():
        dq_ref[...] = (sum_ref[...] * scale).T.reshape(dq_ref.shape).astype(dq_ref.dtype)


def _key_kernel(
    tile_ref, other_ref, kind_ref,
    q_ref, bounds_ref, d_out_ref, stats_ref, k_ref, v_ref,
    dk_ref, dv_ref,
    dk_sum_ref, dv_sum_ref,
    *, key_tiles: int, scale: float,
):  # fmt: skip
    visit = Visit(kind_ref, tile_ref, key_tiles)
    q_RH, d_out_RH = program.scaled_rows(q_ref, scale), program.rows_of(d_out_ref)

    @visit.first
    def begin():
        dk_sum_ref[...] = jnp.zeros_like(dk_sum_ref)
        dv_sum_ref[...] = jnp.zeros_like(dv_sum_ref)

    @visit.keys(k_ref, q_RH, bounds_ref)
    def add_rows(scores_CR):
        weights_CR, d_scores_CR = _row_gradients(scores_CR, v_ref[...], d_out_RH, stats_ref)
        dv_sum_ref[...] += dot(weights_CR, d_out_RH)
        dk_sum_ref[...] += dot(d_scores_CR, q_RH)

    @visit.last
    def write():
        dk_ref[...] = dk_sum_ref[...].astype(dk_ref.dtype)
        dv_ref[...] = dv_sum_ref[...].astype(dv_ref.dtype)


def backward(q, k_block, v_block, k_context, v_context, starts, ends, out, lse_BNR, d_out, mask, scale, tiles=None):
    """Gradients of the five arrays, each in its array's shape and dtype; same contract as _xla.backward."""
    to = _tpu_layout.layout(q, k_context, tiles)
    low_BAW, high_BAW = _tiles.slot_ranges(starts, ends, to.W, mask.window)
    real_BA = ends > starts
    pairs = _tpu_layout.overlap(low_BAW, high_BAW, real_BA, to)

    delta_BAWN = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), -1)
    delta_BNR = delta_BAWN.transpose(0, 3, 1, 2).reshape(lse_BNR.shape)
    lse_KQ1R, delta_KQ1R = _tpu_layout.fold_stats(lse_BNR, to, jnp.inf), _tpu_layout.fold_stats(delta_BNR, to, 0.0)
    rows = (
        _tpu_layout.row_bounds(low_BAW, high_BAW, real_BA, to),
        _tpu_layout.fold_rows(d_out.astype(q.dtype), to),
        jnp.concatenate([lse_KQ1R, delta_KQ1R], axis=2),
        _tpu_layout.fold_context(k_context, to),
        _tpu_layout.fold_context(v_context, to),
    )
    q_KGTH = _tpu_layout.fold_rows(q, to)
    k_block_KTH, v_block_KTH = _tpu_layout.fold_slots(k_block, to), _tpu_layout.fold_slots(v_block, to)
    bias_ER = jnp.asarray(_tpu_layout.block_bias(mask, to))

    by_query, by_key = _tiles.visits(pairs), _tiles.transposed_visits(pairs)
    dq_KGTH, dk_block_KTH, dv_block_KTH = _query_call(q.dtype, to, scale, by_query.count)(
        *by_query[:3], q_KGTH, k_block_KTH, v_block_KTH, bias_ER, *rows
    )
    dk_KUH, dv_KUH = _key_call(q.dtype, to, scale, by_key.count)(*by_key[:3], q_KGTH, *rows)
    return (
        _tpu_layout.unfold_rows(dq_KGTH, to),
        _tpu_layout.unfold_slots(dk_block_KTH, to),
        _tpu_layout.unfold_slots(dv_block_KTH, to),
        _tpu_layout.unfold_context(dk_KUH, to),
        _tpu_layout.unfold_context(dv_KUH, to),
    )


def _query_call(dtype, to: Layout, scale: float, count: jax.Array):
    own, bias, keys = program.own_side(to), program.fixed(to.slots, to.rows), program.other_side(to).keys()
    rows, slots = own.rows(), own.slots()
    return program.over_visits(
        *(_query_kernel, to, scale, count),
        name="block_attention_backward_queries",
        reads=[rows, slots, slots, bias, own.bounds(), rows, own.stats(2), keys, keys],
        writes=[rows, slots, slots],
        results=[
            jax.ShapeDtypeStruct((to.K, to.G, to.all_slots, to.H), dtype),
            *[jax.ShapeDtypeStruct((to.K, to.all_slots, to.H), dtype)] * 2,
        ],
        sums=[(to.H, to.rows)],
    )


def _key_call(dtype, to: Layout, scale: float, count: jax.Array):
    read, keys = program.other_side(to), program.own_side(to).keys()
    return program.over_visits(
        *(_key_kernel, to, scale, count),
        name="block_attention_backward_context",
        reads=[read.rows(), read.bounds(), read.rows(), read.stats(2), keys, keys],
        writes=[keys, keys],
        results=[jax.ShapeDtypeStruct((to.K, to.all_keys, to.H), dtype)] * 2,
        sums=[(to.keys, to.H)] * 2,
    )

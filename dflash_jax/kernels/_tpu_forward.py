"""Forward pass of block attention on TPU: one running softmax a query tile, over its own slots and its key tiles."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from dflash_jax.kernels import _tiles, _tpu_layout
from dflash_jax.kernels import _tpu_program as program
from dflash_jax.kernels._tpu_layout import Layout
from dflash_jax.kernels._tpu_program import OVER_FIRST, ROWS_BY_ROWS, Visit, dot


def _kernel(
    tile_ref, other_ref, kind_ref,
    q_ref, k_block_ref, v_block_ref, bias_ref, bounds_ref, k_ref, v_ref,
    out_ref, lse_ref,
    top_ref, total_ref, mixed_ref,
    *, key_tiles: int, scale: float,
):  # fmt: skip
    visit = Visit(kind_ref, other_ref, key_tiles)
    q_RH = program.scaled_rows(q_ref, scale)

    @visit.first
    def own_slots():
        scores_ER = dot(k_block_ref[...], q_RH, ROWS_BY_ROWS) + bias_ref[...]
        top_1R = scores_ER.max(0, keepdims=True)
        weights_ER = jnp.exp(scores_ER - top_1R)
        top_ref[...] = top_1R
        total_ref[...] = weights_ER.sum(0, keepdims=True)
        mixed_ref[...] = dot(v_block_ref[...], weights_ER.astype(q_RH.dtype), OVER_FIRST)

    @visit.keys(k_ref, q_RH, bounds_ref)
    def add_keys(scores_CR):
        top_1R = jnp.maximum(top_ref[...], scores_CR.max(0, keepdims=True))
        shrink_1R = jnp.exp(top_ref[...] - top_1R)
        weights_CR = jnp.exp(scores_CR - top_1R)
        top_ref[...] = top_1R
        total_ref[...] = total_ref[...] * shrink_1R + weights_CR.sum(0, keepdims=True)
        mixed_HR = dot(v_ref[...], weights_CR.astype(q_RH.dtype), OVER_FIRST)
        mixed_ref[...] = mixed_ref[...] * shrink_1R + mixed_HR

    @visit.last
    def write():
        real_1R = bounds_ref[2:3] > 0
        out_HR = jnp.where(real_1R, mixed_ref[...] / total_ref[...], 0.0)
        out_ref[...] = out_HR.T.reshape(out_ref.shape).astype(out_ref.dtype)
        lse_ref[...] = jnp.where(real_1R, top_ref[...] + jnp.log(total_ref[...]), jnp.inf)


def forward(q, k_block, v_block, k_context, v_context, starts, ends, mask, scale, tiles=None):
    """Same results as _xla.forward: the output [B, A, W, N, H] and the log-sum-exp, float32 [B, N, A·W]."""
    to = _tpu_layout.layout(q, k_context, tiles)
    low_BAW, high_BAW = _tiles.slot_ranges(starts, ends, to.W, mask.window)
    real_BA = ends > starts
    visits = _tiles.visits(_tpu_layout.overlap(low_BAW, high_BAW, real_BA, to))
    out_KGTH, lse_KQ1R = _call(q.dtype, to, scale, visits.count)(
        visits.tile,
        visits.other,
        visits.kind,
        _tpu_layout.fold_rows(q, to),
        _tpu_layout.fold_slots(k_block, to),
        _tpu_layout.fold_slots(v_block, to),
        jnp.asarray(_tpu_layout.block_bias(mask, to)),
        _tpu_layout.row_bounds(low_BAW, high_BAW, real_BA, to),
        _tpu_layout.fold_context(k_context, to),
        _tpu_layout.fold_context(v_context, to),
    )
    return _tpu_layout.unfold_rows(out_KGTH, to), _tpu_layout.unfold_stats(lse_KQ1R, to)


def _call(dtype, to: Layout, scale: float, count: jax.Array):
    own, bias, keys = program.own_side(to), program.fixed(to.slots, to.rows), program.other_side(to).keys()
    rows, slots = own.rows(), own.slots()
    return program.over_visits(
        *(_kernel, to, scale, count),
        name="block_attention_forward",
        reads=[rows, slots, slots, bias, own.bounds(), keys, keys],
        writes=[rows, own.stats(1)],
        results=[
            jax.ShapeDtypeStruct((to.K, to.G, to.all_slots, to.H), dtype),
            jax.ShapeDtypeStruct((to.K, to.B * to.query_tiles, 1, to.rows), jnp.float32),
        ],
        sums=[(1, to.rows), (1, to.rows), (to.H, to.rows)],
    )

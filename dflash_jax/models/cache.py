"""Key/value cache: preallocated, written at explicit positions, so slot s always holds position s of its row.

The cache of a layer with a sliding window may be a ring: position p stands in slot p mod its length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dflash_jax.sharding import constrain


class KVCache(NamedTuple):
    """Keys and values of every layer, each [B, K, S, H].

    Nothing marks what is committed: a query at position p reads slots ≤ p (or < its anchor), and what a rejected
    proposal left behind lies beyond every such bound until the next pass overwrites it.
    """

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]

    @property
    def length(self) -> int:
        return self.keys[0].shape[2]


def empty_cache(lengths: Sequence[int], batch: int, num_kv_heads: int, head_dim: int, dtype) -> KVCache:
    """Zeros, one layer for each of `lengths`."""

    def zeros() -> tuple[jax.Array, ...]:
        shapes = [(batch, num_kv_heads, length, head_dim) for length in lengths]
        return tuple(constrain(jnp.zeros(shape, dtype), "rows", "heads") for shape in shapes)

    return KVCache(zeros(), zeros())


def write(cache_BKSH: jax.Array, new_BTKH: jax.Array, start_B: jax.Array) -> jax.Array:
    """Puts T new entries of each row at slots start … start+T−1. The caller allocates so that they fit."""
    new_BKTH = new_BTKH.astype(cache_BKSH.dtype).swapaxes(1, 2)

    def by_row(cache_BKSH: jax.Array, new_BKTH: jax.Array, start_B: jax.Array) -> jax.Array:
        return jax.vmap(lambda row, new, start: jax.lax.dynamic_update_slice(row, new, (0, start, 0)))(
            cache_BKSH, new_BKTH, start_B
        )

    def by_head(cache_BKSH: jax.Array, new_BKTH: jax.Array, start_B: jax.Array) -> jax.Array:
        start_BK = jnp.broadcast_to(start_B[:, None], cache_BKSH.shape[:2])
        return jax.vmap(jax.vmap(lambda head, new, start: jax.lax.dynamic_update_slice(head, new, (start, 0))))(
            cache_BKSH, new_BKTH, start_BK
        )

    # One entry of one row is a slice that XLA for CPUs also computes inside what reads it, and copies the cache for.
    if new_BKTH.shape[0] == new_BKTH.shape[2] == 1:
        return jax.lax.platform_dependent(cache_BKSH, new_BKTH, start_B, cpu=by_head, default=by_row)
    return by_row(cache_BKSH, new_BKTH, start_B)


def write_ring(ring_BKRH: jax.Array, new_BTKH: jax.Array, positions_BT: jax.Array, end_B: jax.Array) -> jax.Array:
    """Puts those of T new entries into a ring that stand before end_B and that newer ones of these don't replace.

    What stands at end_B or behind it is not written: it would replace an entry that is still in use.
    """
    R = ring_BKRH.shape[2]
    kept_BT = (positions_BT < end_B[:, None]) & (positions_BT >= end_B[:, None] - R)
    slots_BT = jnp.where(kept_BT, positions_BT % R, R)  # R: nowhere
    new_BKTH = new_BTKH.astype(ring_BKRH.dtype).swapaxes(1, 2)
    return jax.vmap(lambda ring, new, slots: ring.at[:, slots].set(new, mode="drop"))(ring_BKRH, new_BKTH, slots_BT)


def ring_positions(length: int, end_B: jax.Array) -> jax.Array:
    """Which position each slot of a ring holds once all positions before end_B are written, [B, R].

    Negative: none yet.
    """
    newest_B1 = end_B[:, None] - 1
    return newest_B1 - (newest_B1 - jnp.arange(length)) % length

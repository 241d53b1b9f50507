"""Key/value cache: preallocated, written at explicit positions, so slot s always holds position s of its row."""

from __future__ import annotations

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


def empty_cache(num_layers: int, batch: int, num_kv_heads: int, length: int, head_dim: int, dtype) -> KVCache:
    """Zeros for `num_layers` layers."""
    shape = (batch, num_kv_heads, length, head_dim)

    def zeros() -> tuple[jax.Array, ...]:
        return tuple(constrain(jnp.zeros(shape, dtype), "rows", "heads") for _ in range(num_layers))

    return KVCache(zeros(), zeros())


def write(cache_BKSH: jax.Array, new_BTKH: jax.Array, start_B: jax.Array) -> jax.Array:
    """Puts T new entries of each row at slots start … start+T−1. The caller allocates so that they fit."""
    new_BKTH = new_BTKH.astype(cache_BKSH.dtype).swapaxes(1, 2)
    return jax.vmap(lambda row, new, start: jax.lax.dynamic_update_slice(row, new, (0, start, 0)))(
        cache_BKSH, new_BKTH, start_B
    )

"""Which tiles of the score grid have anything in them: worked out on the device from the ranges of the blocks.

A query tile is a run of whole blocks, a key tile a run of context keys. A kernel walks a list of visits, one for each
pair of tiles in which some query may read some key, so its work is the least possible for the tile sizes. Nothing
here assumes an order of the blocks: sorted anchors make neighbours share key tiles, and so the lists short; unsorted
ones only make them longer. The lists depend on the ranges alone: the layers of a step share one computation, since
XLA merges equal ones.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

# Bits of Visits.kind.
FIRST = 1  # the first visit of its tile: begin the sums
LAST = 2  # the last one: write them out
WHOLE = 4  # every real query reads every key: no mask needed
PART = 8  # some do; neither bit: the visit only begins and ends a tile that reads nothing


class Visits(NamedTuple):
    """A list of tile pairs in the order of `tile`, each tile at least once. Only the first `count` entries count.

    tile: int32 [V], the tile whose sums are kept, numbered through the batch.
    other: int32 [V], the tile of the other side, numbered through the batch.
    kind: int32 [V], a sum of the bits above.
    count: int32 scalar, at least the number of tiles, at most V.
    """

    tile: jax.Array
    other: jax.Array
    kind: jax.Array
    count: jax.Array


class Overlap(NamedTuple):
    """bool [B, Q, J] each: query tile Q reads some of key tile J; all its real blocks read all of key tile J."""

    some: jax.Array
    all: jax.Array


def slot_ranges(starts_BA, ends_BA, width: int, window: int | None) -> tuple[jax.Array, jax.Array]:
    """First and one past the last context position that each slot reads, int32 [B, A, W]; first ≥ last: none."""
    high_BAW = jnp.broadcast_to(ends_BA[..., None], (*ends_BA.shape, width)).astype(jnp.int32)
    low_BAW = jnp.broadcast_to(starts_BA[..., None], high_BAW.shape).astype(jnp.int32)
    if window is not None:
        low_BAW = jnp.maximum(low_BAW, high_BAW + jnp.arange(width, dtype=jnp.int32) - window + 1)
    return low_BAW, high_BAW


def overlap(low_BAW, high_BAW, real_BA, blocks: int, keys: int, key_tiles: int) -> Overlap:
    """Compares the ranges of `blocks` blocks a query tile with key tiles of `keys` positions."""
    B, A, _ = low_BAW.shape
    first_J = jnp.arange(key_tiles, dtype=jnp.int32) * keys
    low_BAW1, high_BAW1, real_BA1 = low_BAW[..., None], high_BAW[..., None], real_BA[..., None]
    in_tile_BAWJ = jnp.minimum(high_BAW1, first_J + keys) > jnp.maximum(low_BAW1, first_J)
    fills_BAWJ = (low_BAW1 <= first_J) & (high_BAW1 >= first_J + keys)
    some_BAJ = in_tile_BAWJ.any(2) & real_BA1
    all_BAJ = fills_BAWJ.all(2) | ~real_BA1

    def by_tile(x_BAJ, pad: bool):
        return jnp.pad(x_BAJ, ((0, 0), (0, -A % blocks), (0, 0)), constant_values=pad).reshape(B, -1, blocks, key_tiles)

    return Overlap(by_tile(some_BAJ, False).any(2), by_tile(all_BAJ, True).all(2))


def visits(pairs: Overlap) -> Visits:
    """The pairs that overlap, in the order of their query tiles."""
    B, Q, J = pairs.some.shape
    # A tile without any pair still has an output to write: it is given a visit without a key.
    lonely_BQ = ~pairs.some.any(2)
    listed_BQJ = pairs.some.at[:, :, 0].set(pairs.some[:, :, 0] | lonely_BQ)
    size = B * Q * J
    count = listed_BQJ.sum(dtype=jnp.int32)
    (index_V,) = jnp.nonzero(listed_BQJ.reshape(-1), size=size, fill_value=size - 1)
    index_V = index_V.astype(jnp.int32)
    tile_V, other_V = index_V // J, index_V // (Q * J) * J + index_V % J
    change_V = tile_V[1:] != tile_V[:-1]
    first_V = jnp.concatenate([jnp.ones(1, bool), change_V])
    last_V = jnp.concatenate([change_V, jnp.ones(1, bool)]) | (jnp.arange(size) == count - 1)
    some_V, all_V = (x.reshape(-1)[index_V] for x in pairs)
    content_V = jnp.where(some_V, jnp.where(all_V, WHOLE, PART), 0)
    return Visits(tile_V, other_V, first_V * FIRST + last_V * LAST + content_V.astype(jnp.int32), count)


def transposed_visits(pairs: Overlap) -> Visits:
    """The same pairs in the order of their key tiles: `tile` is a key tile, `other` a query tile."""
    return visits(Overlap(*(x.swapaxes(1, 2) for x in pairs)))

"""Arrays as the Hopper kernels read them: nearly as they are, and what belongs to a row in the order of row tiles.

A row tile is 64 rows, what one warpgroup multiplies at a time: `slots` block slots of `heads` queries of a group, query
by query. A pair of row tiles shares the context tiles that it reads.

Letters beyond the package's: R rows of a row tile (64), I row tiles of a sequence, P parts: a key head has as many row
tiles for the same slots; T padded slots of a sequence, U padded context keys, V visits.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from dflash_jax.kernels import _tiles

ROWS = 64  # of a row tile: the height of a Hopper matrix instruction
OWN = 64  # block slots around a row tile that are read as its own keys: a multiple of what a swizzled tile holds
BACKWARD_KEYS = 64  # context keys a step: the gradients of scores need twice the registers of the forward pass
CONTEXT_KEYS = 128  # that a block of the context kernel owns, 64 a warpgroup


class Layout(NamedTuple):
    """Sizes of one call: `width` is W padded to a power of two, `heads` the queries of a group in a row tile."""

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
    def forward_keys(self) -> int:
        """Context keys a step; two own windows of large heads leave shared memory for 64."""
        return 64 if self.windows == 2 and self.H > 64 else 128

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

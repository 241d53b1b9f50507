"""Arrays as the TPU kernels read them: heads first, cut into tiles, padded so that nothing inside needs a remainder.

A query tile holds whole blocks. The G = N/K queries of a group times the tile's slots are its rows, so keys are never
repeated. Padding slots are no keys (the block bias masks them) and padding blocks are empty.

Letters beyond the package's: G queries of a group, E slots and R = G·E rows of a query tile (query by query), C keys of
a key tile; T slots and U context keys of the whole batch, padded; Q query tiles of the whole batch.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.kernels import _tiles

MASKED = -1e30


class TileSizes(NamedTuple):
    """slots: block slots of a query tile; keys: context keys of a key tile."""

    slots: int
    keys: int


class Layout(NamedTuple):
    """Sizes of one call. `width` and `blocks` are of the tiles, W and A of the arrays."""

    B: int
    A: int
    W: int
    K: int
    G: int
    H: int
    S: int
    width: int
    blocks: int
    keys: int

    @property
    def query_tiles(self) -> int:
        """Of one sequence."""
        return -(-self.A // self.blocks)

    @property
    def key_tiles(self) -> int:
        """Of one sequence."""
        return -(-self.S // self.keys)

    @property
    def slots(self) -> int:
        return self.blocks * self.width

    @property
    def rows(self) -> int:
        return self.slots * self.G

    @property
    def all_slots(self) -> int:
        return self.B * self.query_tiles * self.slots

    @property
    def all_keys(self) -> int:
        return self.B * self.key_tiles * self.keys


def choose_tiles(blocks: int, width: int, groups: int, context_length: int, itemsize: int) -> TileSizes:
    """About 1,024 rows against at most 512 keys, in float32 512 rows, never more scores than that. By the compiler's
    schedule that is best, or nearly, on every generation (docs/kernel.md); no device has timed it. Products of float32
    at the highest precision need twice the vector memory.

    Rows lie along the 128 lanes of the score tile. Slots are its sublanes in the block part, where all but W of them
    are masked: up to 256 cost little beside the context.

    A visit costs as much as its rows and some 128 more. A tile visits what any of its blocks reads: where anchors are
    drawn from the whole context and sorted, as many keys as if there were one tile more. So few blocks get smaller
    tiles, and of two that cost the same the smaller.
    """
    most_rows = 2048 // itemsize
    whole_lanes = [slots for slots in (32, 64, 128, 256) if slots >= width and slots * groups % 128 == 0]
    fitting = [slots for slots in whole_lanes if slots * groups <= most_rows] or whole_lanes[:1]
    slots = min(fitting, key=lambda slots: (-(-blocks * width // slots) + 1) * (slots * groups + 128))
    most_keys = most_rows * 512 // max(most_rows, slots * groups) // 128 * 128
    return TileSizes(slots, max(128, min(most_keys, -(-context_length // 128) * 128)))


def layout(q, k_context, tiles: TileSizes | None = None) -> Layout:
    """Of arrays, or of anything else that has their shapes and dtypes."""
    B, A, W, N, H = q.shape
    _, S, K, _ = k_context.shape
    width = 1 << (W - 1).bit_length()  # a power of two divides the slots of a tile
    tiles = tiles or choose_tiles(A, width, N // K, S, q.dtype.itemsize)
    return Layout(B, A, W, K, N // K, H, S, width, max(1, tiles.slots // width), tiles.keys)


def fold_rows(x_BAWNH: jax.Array, to: Layout) -> jax.Array:
    """[B, A, W, N, H] → [K, G, T, H]: without padding a permutation of axes, which XLA may leave to the producer."""
    return _pad_blocks(x_BAWNH, to).transpose(3, 0, 1, 2, 4).reshape(to.K, to.G, to.all_slots, to.H)


def unfold_rows(x_KGTH: jax.Array, to: Layout) -> jax.Array:
    return unfold_slots(x_KGTH.reshape(to.K * to.G, to.all_slots, to.H), to)


def fold_slots(x_BAWKH: jax.Array, to: Layout) -> jax.Array:
    """[B, A, W, K, H] → [K, T, H]."""
    return _pad_blocks(x_BAWKH, to).transpose(3, 0, 1, 2, 4).reshape(to.K, to.all_slots, to.H)


def unfold_slots(x_KTH: jax.Array, to: Layout) -> jax.Array:
    x = x_KTH.reshape(-1, to.B, to.query_tiles * to.blocks, to.width, to.H).transpose(1, 2, 3, 0, 4)
    return x[:, : to.A, : to.W]


def fold_context(x_BSKH: jax.Array, to: Layout) -> jax.Array:
    """[B, S, K, H] → [K, U, H]; padding keys lie at positions ≥ S, which no range reaches."""
    x = jnp.pad(x_BSKH, ((0, 0), (0, -to.S % to.keys), (0, 0), (0, 0)))
    return x.transpose(2, 0, 1, 3).reshape(to.K, to.all_keys, to.H)


def unfold_context(x_KUH: jax.Array, to: Layout) -> jax.Array:
    return x_KUH.reshape(to.K, to.B, -1, to.H).transpose(1, 2, 0, 3)[:, : to.S]


def fold_stats(x_BNR: jax.Array, to: Layout, fill: float) -> jax.Array:
    """One number a row, [B, N, A·W] → [K, Q, 1, R]; padding rows get `fill`."""
    after = to.query_tiles * to.blocks - to.A
    x = x_BNR.reshape(to.B, to.K * to.G, to.A, to.W)
    x = jnp.pad(x, ((0, 0), (0, 0), (0, after), (0, to.width - to.W)), constant_values=fill)
    x = x.reshape(to.B, to.K, to.G, to.query_tiles, to.slots).transpose(1, 0, 3, 2, 4)
    return x.reshape(to.K, to.B * to.query_tiles, 1, to.rows)


def unfold_stats(x_KQ1R: jax.Array, to: Layout) -> jax.Array:
    x = x_KQ1R.reshape(to.K, to.B, to.query_tiles, to.G, to.slots).transpose(1, 0, 3, 2, 4)
    x = x.reshape(to.B, to.K * to.G, to.query_tiles * to.blocks, to.width)[:, :, : to.A, : to.W]
    return x.reshape(to.B, to.K * to.G, to.A * to.W)


def row_bounds(low_BAW: jax.Array, high_BAW: jax.Array, real_BA: jax.Array, to: Layout) -> jax.Array:
    """int32 [Q, 3, R]: first context position of a row, one past its last, and 1 if its block is real."""
    real_BAW = jnp.broadcast_to(real_BA[..., None], low_BAW.shape)
    bounds = jnp.stack([low_BAW, jnp.where(real_BAW, high_BAW, 0), real_BAW.astype(jnp.int32)], axis=1)
    after = to.query_tiles * to.blocks - to.A
    bounds = jnp.pad(bounds, ((0, 0), (0, 0), (0, after), (0, to.width - to.W)))
    bounds = bounds.reshape(to.B, 3, to.query_tiles, to.slots).swapaxes(1, 2)
    return jnp.tile(bounds.reshape(to.B * to.query_tiles, 3, to.slots), to.G)


def block_bias(mask, to: Layout) -> np.ndarray:
    """What is added to the scores [E, R] of a tile's own slots: 0 where a row may read a slot, else MASKED.

    A row of a padding slot reads its own block's slots, so that no row is without any.
    """
    slot_E = np.arange(to.slots)
    block_E, slot_E = slot_E // to.width, slot_E % to.width
    key_slot, row_slot = slot_E[:, None], slot_E[None, :]
    allowed = (block_E[:, None] == block_E[None, :]) & (key_slot < to.W)
    if mask.causal_in_block:
        allowed &= key_slot <= row_slot
    if mask.window is not None:
        allowed &= (row_slot - key_slot < mask.window) | (row_slot >= to.W)
    return np.tile(np.where(allowed, 0.0, MASKED).astype(np.float32), to.G)


def overlap(low_BAW, high_BAW, real_BA, to: Layout) -> _tiles.Overlap:
    return _tiles.overlap(low_BAW, high_BAW, real_BA, to.blocks, to.keys, to.key_tiles)


def _pad_blocks(x_BAW: jax.Array, to: Layout) -> jax.Array:
    after = to.query_tiles * to.blocks - to.A
    return jnp.pad(x_BAW, ((0, 0), (0, after), (0, to.width - to.W)) + ((0, 0),) * (x_BAW.ndim - 3))

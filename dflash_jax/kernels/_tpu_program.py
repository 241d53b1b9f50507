"""What the TPU kernels of block attention share: products, masks, visits inside, blocks of arrays and the call outside.

Scores are held transposed, keys along sublanes and rows along lanes: what belongs to a row (range, running maximum,
sum, log-sum-exp) is then one dense vector [1, R], and the maximum and the sum over keys need no cross-lane work.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from dflash_jax.kernels import _tiles
from dflash_jax.kernels._tpu_layout import MASKED, Layout

ROWS_BY_ROWS = (((1,), (1,)), ((), ()))  # a [M, H], b [N, H] → [M, N]
OVER_FIRST = (((0,), (0,)), ((), ()))  # a [K, M], b [K, N] → [M, N]
PLAIN = (((1,), (0,)), ((), ()))


def dot(a, b, dimensions=PLAIN) -> jax.Array:
    """A product in the dtype of b, summed in float32. Products of two bfloat16 are exact at any precision."""
    precision = jax.lax.Precision.DEFAULT if b.dtype == jnp.bfloat16 else None
    a = a.astype(b.dtype)
    return jax.lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=jnp.float32)


def rows_of(ref) -> jax.Array:
    """A block [G, E, H] as rows [R, H]."""
    return ref[...].reshape(-1, ref.shape[-1])


def scaled_rows(ref, scale: float) -> jax.Array:
    return (rows_of(ref).astype(jnp.float32) * scale).astype(ref.dtype)


def masked(scores_CR, bounds_3R, key_tile) -> jax.Array:
    """Context scores with MASKED where a row may not read a key; `key_tile` counts within the sequence."""
    first = key_tile * scores_CR.shape[0]
    key_CR = first + jax.lax.broadcasted_iota(jnp.int32, scores_CR.shape, 0)
    return jnp.where((key_CR >= bounds_3R[0:1]) & (key_CR < bounds_3R[1:2]), scores_CR, MASKED)


class Visit:
    """The visit that a kernel is at, by decorators of what is done: `first` and `last` of its tile, and with the keys.

    key_tile_ref: the list of the key tiles of all visits, numbered through the batch. key_tiles: of one sequence.
    """

    def __init__(self, kind_ref, key_tile_ref, key_tiles: int):
        self._number, self._key_tile_ref, self._key_tiles = pl.program_id(1), key_tile_ref, key_tiles
        self._kind = kind_ref[self._number]

    def first(self, begin: Callable[[], None]) -> None:
        pl.when(self._has(_tiles.FIRST))(begin)

    def last(self, end: Callable[[], None]) -> None:
        pl.when(self._has(_tiles.LAST))(end)

    def keys(self, k_ref, q_RH: jax.Array, bounds_ref) -> Callable[[Callable[[jax.Array], None]], None]:
        """Of a function of the scores [C, R] of the visit's keys, MASKED where a row may not read one."""

        def visited(add: Callable[[jax.Array], None]) -> None:
            @pl.when(self._has(_tiles.WHOLE))
            def all_keys():
                add(dot(k_ref[...], q_RH, ROWS_BY_ROWS))

            @pl.when(self._has(_tiles.PART))
            def some_keys():
                scores_CR = dot(k_ref[...], q_RH, ROWS_BY_ROWS)
                add(masked(scores_CR, bounds_ref[...], self._key_tile_ref[self._number] % self._key_tiles))

        return visited

    def _has(self, bit: int) -> jax.Array:
        return (self._kind & bit) != 0


# Blocks of the arrays of a kernel whose grid is (K, visits), named after the side of the visit they belong to.
# A block whose index repeats is not fetched again.


class Side:
    """Block specs for one side of a visit."""

    def __init__(self, to: Layout, number):
        self.to, self._number = to, number

    def _spec(self, block: tuple, index) -> pl.BlockSpec:
        def position(head, visit, tile, other, kind):
            return index(head, self._number(tile, other)[visit])

        return pl.BlockSpec(block, position)

    def rows(self) -> pl.BlockSpec:
        """[G, E, H] of [K, G, T, H]."""
        block = (None, self.to.G, self.to.slots, self.to.H)
        return self._spec(block, lambda head, number: (head, 0, number, 0))

    def slots(self) -> pl.BlockSpec:
        """[E, H] of [K, T, H]."""
        return self._spec((None, self.to.slots, self.to.H), lambda head, number: (head, number, 0))

    def keys(self) -> pl.BlockSpec:
        """[C, H] of [K, U, H]."""
        return self._spec((None, self.to.keys, self.to.H), lambda head, number: (head, number, 0))

    def stats(self, count: int) -> pl.BlockSpec:
        """[count, R] of [K, Q, count, R]."""
        return self._spec((None, None, count, self.to.rows), lambda head, number: (head, number, 0, 0))

    def bounds(self) -> pl.BlockSpec:
        """[3, R] of [Q, 3, R]."""
        return self._spec((None, 3, self.to.rows), lambda head, number: (number, 0, 0))


def own_side(to: Layout) -> Side:
    """The tile whose sums a visit adds to."""
    return Side(to, lambda tile, other: tile)


def other_side(to: Layout) -> Side:
    """The tile that it reads."""
    return Side(to, lambda tile, other: other)


def fixed(*shape: int) -> pl.BlockSpec:
    """An array that every visit reads whole."""
    return pl.BlockSpec(shape, lambda *_: (0,) * len(shape))


def over_visits(
    kernel: Callable,
    to: Layout,
    scale: float,
    count: jax.Array,
    *,
    name: str,
    reads: Sequence[pl.BlockSpec],
    writes: Sequence[pl.BlockSpec],
    results: Sequence[jax.ShapeDtypeStruct],
    sums: Sequence[tuple[int, ...]],
) -> Callable:
    """The call of a kernel, which takes the three lists of visits first. Heads may be shared out among cores; the
    visits of a head follow one another.

    Args:
        count: of visits.
        reads, writes: blocks of the arrays that it takes and gives.
        results: shapes and dtypes of the latter.
        sums: shapes of what is kept from visit to visit, float32.
    """
    return pl.pallas_call(
        functools.partial(kernel, key_tiles=to.key_tiles, scale=scale),
        out_shape=list(results),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(to.K, count),
            in_specs=list(reads),
            out_specs=list(writes),
            scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in sums],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        name=name,
    )

"""Which tile pairs the kernels visit: all that hold something, hardly any other, each tile begun and ended once."""

import functools
import itertools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from dflash_jax.kernels import _tiles
from dflash_jax.kernels._tpu_layout import choose_tiles

BLOCKS, KEYS, WIDTH = 4, 128, 16


@functools.partial(jax.jit, static_argnums=(2, 3, 4, 5, 6))
def listed(starts, ends, context_length: int, window=None, blocks=BLOCKS, keys=KEYS, width=WIDTH):
    """The visits in the order of the query tiles, and in that of the key tiles."""
    low, high = _tiles.slot_ranges(starts, ends, width, window)
    pairs = _tiles.overlap(low, high, ends > starts, blocks, keys, -(-context_length // keys))
    return _tiles.visits(pairs), _tiles.transposed_visits(pairs)


def entries(visits: _tiles.Visits) -> list[tuple[int, int, int]]:
    count = int(visits.count)
    return [tuple(map(int, entry)) for entry in zip(*(np.asarray(x)[:count] for x in visits[:3]), strict=True)]


def seen_grid(starts, ends, context_length, window, keys, width) -> np.ndarray:
    """bool [B, A, W, padded S] by the rule itself, key by key."""
    position = np.arange(-(-context_length // keys) * keys)
    starts, ends = (np.asarray(bounds)[:, :, None, None] for bounds in (starts, ends))
    seen = (position >= starts) & (position < ends) & np.ones((width, 1), bool)
    if window is not None:
        seen &= ends + np.arange(width)[:, None] - position < window
    return seen


def needed(starts, ends, context_length, window=None, blocks=BLOCKS, keys=KEYS, width=WIDTH):
    """bool [B, query tiles, key tiles]: some query of the tile reads some key; all of its real blocks read them all."""
    seen = seen_grid(starts, ends, context_length, window, keys, width)
    B, A, W, S = seen.shape
    real = np.asarray(ends) > np.asarray(starts)
    pad = ((0, 0), (0, -A % blocks), (0, 0), (0, 0))

    def cut(grid, fill):
        return np.pad(grid, pad, constant_values=fill).reshape(B, -1, blocks * W, S // keys, keys)

    return cut(seen, False).any((2, 4)), cut(seen | ~real[:, :, None, None], True).all((2, 4))


def uniform(rng, A, S):
    return rng.choice(np.arange(1, S), A, replace=False)


def late(rng, A, S):
    """Most anchors in the last quarter, as in chats whose answer follows a long question."""
    return np.minimum(S - 1, (S * rng.beta(6, 1.2, A)).astype(int) + 1)


@pytest.mark.parametrize("draw", [uniform, late])
@pytest.mark.parametrize("window", [None, 700])
@pytest.mark.parametrize("chosen", [False, True], ids=["small tiles", "tiles as chosen"])
def test_work_is_the_least_possible_for_the_tile_size(draw, window, chosen):
    A, S = 512, 3072
    slots, keys = choose_tiles(A, WIDTH, 4, S, itemsize=2) if chosen else (BLOCKS * WIDTH, KEYS)
    blocks = slots // WIDTH
    anchors = np.sort(draw(np.random.default_rng(0), A, S))[None]
    starts = np.zeros_like(anchors)
    least = needed(starts, anchors, S, window, blocks, keys)[0].sum()
    by_query, by_key = listed(starts, anchors, S, window, blocks, keys)
    for visits in (by_query, by_key):
        assert least <= int(visits.count) <= 1.15 * least

    dense = (A // blocks) * (S // keys)
    half = 0.65 if chosen else 0.6  # and what of the tiles at the edge is masked
    assert int(by_query.count) < (0.95 if draw is late and window is None else half) * dense

    in_disorder, _ = listed(starts, np.random.default_rng(1).permuted(anchors, axis=1), S, window, blocks, keys)
    assert int(in_disorder.count) > int(by_query.count)  # slower, no less right


bounds = st.lists(st.integers(0, 50), min_size=14, max_size=14)


@hypothesis.settings(max_examples=30, deadline=None, derandomize=True)
@hypothesis.given(starts=bounds, ends=bounds, window=st.sampled_from([None, 1, 7]), blocks=st.sampled_from([1, 3]))
def test_any_order_lists_every_pair_once_with_its_kind(starts, ends, window, blocks):
    starts, ends = np.reshape(starts, (2, 7)), np.reshape(ends, (2, 7))
    some, whole = needed(starts, ends, 50, window, blocks, 8, 3)
    by_query, by_key = listed(starts, ends, 50, window, blocks, 8, 3)
    B, queries, keys = some.shape
    wanted = {
        (b * queries + i, b * keys + j, bool(whole[b, i, j]))
        for b, i, j in zip(*np.nonzero(some), strict=True)
    }  # fmt: skip
    for visits, tiles, flip in ((by_query, B * queries, False), (by_key, B * keys, True)):
        every = entries(visits)
        content = [(tile, other, kind) for tile, other, kind in every if kind & (_tiles.WHOLE | _tiles.PART)]
        found = [
            ((other, tile) if flip else (tile, other)) + (bool(kind & _tiles.WHOLE),) for tile, other, kind in content
        ]
        assert len(found) == len(wanted) and set(found) == wanted
        assert not any(kind & _tiles.WHOLE and kind & _tiles.PART for *_, kind in content)

        order = [tile for tile, *_ in every]
        assert sorted(set(order)) == order[:1] + [b for a, b in itertools.pairwise(order) if a != b]
        assert set(order) == set(range(tiles))  # also those that read nothing: their output is written too
        for tile in range(tiles):
            kinds = [kind for number, _, kind in every if number == tile]
            assert [kind & _tiles.FIRST for kind in kinds] == [_tiles.FIRST] + [0] * (len(kinds) - 1)
            assert [kind & _tiles.LAST for kind in kinds] == [0] * (len(kinds) - 1) + [_tiles.LAST]


def test_layers_of_a_step_share_the_lists():
    """XLA merges equal computations: two layers find their tile pairs once."""
    starts, ends = jnp.zeros((1, 64), jnp.int32), jnp.arange(64, dtype=jnp.int32)[None]

    def lists(layers: int):
        def all_layers(starts, ends):
            found = []
            for _ in range(layers):
                low, high = _tiles.slot_ranges(starts, ends, WIDTH, None)
                pairs = _tiles.overlap(low, high, ends > starts, BLOCKS, 8, 8)
                found.append(_tiles.visits(pairs))
            return found

        return jax.jit(all_layers).lower(starts, ends).compile().as_text()

    def scatters(layers: int) -> int:
        return sum(lists(layers).count(f" {name}(") for name in ("scatter", "while"))  # a CPU may be given loops

    assert scatters(3) == scatters(1) > 0

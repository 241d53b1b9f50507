"""Anchors and blocks: which positions may start a block, how they are drawn, and what their slots are taught."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from dflash_jax.training.anchors import (
    cut_at_random,
    draw_anchors,
    make_blocks,
    spread_anchors,
    step_keys,
    valid_anchors,
)

# The seeds are fixed, so these tests can't flicker; a biased draw gives far smaller values.
SMALLEST_P = 1e-3

draw = jax.jit(draw_anchors, static_argnames=("count",))
spread = jax.jit(spread_anchors, static_argnames=("count",))
blocks_of = jax.jit(make_blocks, static_argnames=("width", "mask_id"))


def mask_of(*rows: str) -> jax.Array:
    """Rows of a loss mask: x is supervised, anything else is not."""
    return jnp.array([[letter == "x" for letter in row] for row in rows])


def drawn(mask_BT, count: int, *, seed: int = 0, step: int = 0, rows=None) -> list[list[int]]:
    """The valid anchors of each row, in the order given."""
    rows_B = jnp.arange(len(mask_BT)) if rows is None else jnp.asarray(rows)
    anchors_BA, valid_BA = draw(step_keys(seed, step, rows_B), mask_BT, count=count)
    assert anchors_BA.dtype == jnp.int32
    assert anchors_BA.shape == valid_BA.shape == (len(mask_BT), count)
    return [row[keep].tolist() for row, keep in zip(np.asarray(anchors_BA), np.asarray(valid_BA), strict=True)]


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        ("...xxxx.", [3, 4, 5]),
        ("....xxxx", [4, 5, 6]),  # the last token has no successor
        (".x.x.x..", []),
        (".xx.xxx.", [1, 4, 5]),
        ("xxx.....", [1]),  # nothing precedes position 0 that a block could be drafted from
        ("........", []),
        (".......x", []),
    ],
)
def test_a_valid_anchor_and_its_successor_are_supervised(mask, expected):
    assert np.flatnonzero(valid_anchors(mask_of(mask))[0]).tolist() == expected


@pytest.mark.parametrize("count", [1, 4, 5, 6, 40])
def test_all_valid_anchors_are_used_up_to_the_count(count):
    mask_BT = mask_of("..xxx..xxxx.")  # 5 valid: 2, 3, 7, 8, 9
    for step in range(20):
        (anchors,) = drawn(mask_BT, count, step=step)
        assert len(anchors) == min(count, 5)
        assert anchors == sorted(set(anchors))
        assert set(anchors) <= {2, 3, 7, 8, 9}


def test_padding_is_at_the_end_and_marked():
    anchors_BA, valid_BA = draw(step_keys(0, 0, jnp.arange(2)), mask_of("..xxx...", "........"), count=4)
    assert valid_BA.tolist() == [[True, True, False, False], [False] * 4]
    assert anchors_BA.tolist() == [[2, 3, 0, 0], [0] * 4]


def test_one_of_n_is_uniform_over_rows_and_over_steps():
    mask_T = mask_of(".xxx..xxxxxx.x")[0]  # 7 valid anchors
    over_rows = step_keys(0, 3, jnp.arange(7000))
    over_steps = jax.vmap(lambda step: step_keys(0, step, jnp.array([5]))[0])(jnp.arange(7000))
    for keys_B in (over_rows, over_steps):
        anchors_BA, _ = draw(keys_B, jnp.broadcast_to(mask_T, (7000, 14)), count=1)
        positions, counts = np.unique(anchors_BA, return_counts=True)
        assert positions.tolist() == [1, 2, 6, 7, 8, 9, 10]
        assert scipy.stats.chisquare(counts).pvalue > SMALLEST_P


def test_every_subset_is_equally_likely():
    mask_T = mask_of(".xxx.xxx")[0]  # valid: 1, 2, 5, 6
    anchors_BA, _ = draw(step_keys(1, 0, jnp.arange(6000)), jnp.broadcast_to(mask_T, (6000, 8)), count=2)
    pairs, counts = np.unique(anchors_BA, axis=0, return_counts=True)
    assert [tuple(pair) for pair in pairs.tolist()] == list(itertools.combinations([1, 2, 5, 6], 2))
    assert scipy.stats.chisquare(counts).pvalue > SMALLEST_P


def test_draws_are_reproducible_and_fresh_each_step_seed_and_row():
    mask_BT = mask_of(*["." + "x" * 40] * 2)
    draws = functools.partial(drawn, mask_BT, 8)
    assert draws() == draws()
    seen = [*draws(), *draws(step=1), *draws(seed=1), *draws(rows=[7, 8])]
    assert len({tuple(row) for row in seen}) == len(seen)


def test_a_row_draws_the_same_whatever_stands_beside_it_and_however_it_is_padded():
    masks = [".xxxxxxxxxxxxxx.", "..xxxx..xxxxxxxx", "...............x", "xxxxxxxxx......."]
    together = drawn(mask_of(*masks), 4, rows=[10, 11, 12, 13])
    permuted = drawn(mask_of(*(masks[i] for i in (2, 0, 3, 1))), 4, rows=[12, 10, 13, 11])
    assert permuted == [together[i] for i in (2, 0, 3, 1)]
    for row, mask in enumerate(masks):
        assert drawn(mask_of(mask), 4, rows=[10 + row]) == [together[row]]
        assert drawn(mask_of(mask + "." * 9), 4, rows=[10 + row]) == [together[row]]


@pytest.mark.parametrize("count", [1, 3, 5, 6, 9])
def test_spread_anchors_are_distinct_valid_and_even(count):
    mask_BT = mask_of("..xxx..xxxx.", "............", ".xxxxxxxxxxx")  # 5, none and 10 valid
    anchors_BA, valid_BA = (np.asarray(x) for x in spread(mask_BT, count=count))
    candidates_BT = np.asarray(valid_anchors(mask_BT))
    assert valid_BA.sum(1).tolist() == [min(count, 5), 0, min(count, 10)]
    for anchors, valid, candidates in zip(anchors_BA, valid_BA, candidates_BT, strict=True):
        chosen = anchors[valid].tolist()
        assert chosen == sorted(set(chosen))
        assert candidates[chosen].all()
        ranks = np.searchsorted(np.flatnonzero(candidates), chosen)
        assert len(chosen) < 2 or np.ptp(np.diff(ranks)) <= 1


# Blocks. Tokens are 100 + position, so that a label names where it comes from.


def blocks_at(mask: str, anchors: list[int], width: int = 4):
    mask_BT = mask_of(mask)
    tokens_BT = 100 + jnp.arange(len(mask))[None]
    anchors_BA, valid_BA = jnp.array([anchors]), jnp.array([[anchor > 0 for anchor in anchors]])
    return blocks_of(tokens_BT, mask_BT, anchors_BA, valid_BA, width=width, mask_id=7)


def test_a_block_holds_its_anchor_and_masks_and_is_taught_the_token_at_each_slot():
    blocks = blocks_at("..xxxxxxxx", [2, 5])
    assert blocks.tokens[0].tolist() == [[102, 7, 7, 7], [105, 7, 7, 7]]
    assert blocks.labels[0].tolist() == [[102, 103, 104, 105], [105, 106, 107, 108]]  # no shift
    assert blocks.supervised[0].tolist() == [[False, True, True, True]] * 2  # the anchor proposes nothing


@pytest.mark.parametrize(
    ("mask", "anchor", "supervised"),
    [
        ("..xxx.xxxx", 2, [False, True, True, False, False, False]),  # nothing after the first gap, ever
        ("..xxx.xxxx", 3, [False, True, False, False, False, False]),
        ("..xxxxxxxx", 7, [False, True, True, False, False, False]),  # cut by the end of the row
        ("..xxxxxxxx", 8, [False, True, False, False, False, False]),
        ("..xxxxxxxx", 0, [False] * 6),  # padding
        ("..........", 4, [False] * 6),
    ],
)
def test_supervision_ends_at_the_first_unsupervised_token_and_at_the_end_of_the_row(mask, anchor, supervised):
    assert blocks_at(mask, [anchor], width=6).supervised[0, 0].tolist() == supervised


def test_rows_without_valid_anchors_teach_nothing():
    mask_BT = mask_of("........", ".x.x.x..", "..xxxx..")
    anchors_BA, valid_BA = draw(step_keys(0, 0, jnp.arange(3)), mask_BT, count=3)
    tokens_BT = jnp.zeros(mask_BT.shape, jnp.int32)
    blocks = blocks_of(tokens_BT, mask_BT, anchors_BA, valid_BA, width=4, mask_id=7)
    assert blocks.supervised.sum((1, 2)).tolist() == [0, 0, 3 + 2 + 1]
    assert blocks.valid.sum(1).tolist() == [0, 0, 3]


def test_a_random_cut_keeps_slots_with_their_weight_as_probability_and_always_a_prefix():
    A, weights_W = 4000, jnp.array([0.0, 1.0, 0.6, 0.25])
    mask_BT = mask_of("..xxxxxx")
    blocks = blocks_of(jnp.zeros((1, 8), jnp.int32), mask_BT, jnp.full((1, A), 3), jnp.ones((1, A), bool), 4, 7)
    cut = cut_at_random(step_keys(0, 0, jnp.arange(1)), blocks, weights_W).supervised[0]
    assert (cut[:, 2:] <= cut[:, 1:-1]).all()
    # standard deviation of a mean of 4,000 draws: at most 0.008
    np.testing.assert_allclose(cut.mean(0), weights_W, atol=0.03)
    assert not (cut & ~blocks.supervised[0]).any()

"""The tiles that the TPU kernels take: as large as pays, no larger than a few blocks fill, and never too large."""

import hypothesis
import jax
import jax.numpy as jnp
import pytest
from hypothesis import strategies as st

from dflash_jax.kernels import _tpu
from dflash_jax.kernels._tpu_layout import choose_tiles

PAPER = dict(blocks=512, width=16, groups=4, context_length=3072, itemsize=2)


@pytest.mark.parametrize(
    ("sizes", "tiles"),
    [
        ({}, (256, 512)),
        (dict(itemsize=4), (128, 512)),
        (dict(groups=1), (256, 512)),
        (dict(groups=2), (256, 512)),
        (dict(groups=3), (256, 512)),
        (dict(groups=5), (128, 512)),
        (dict(groups=7), (128, 512)),
        (dict(groups=8), (128, 512)),
        (dict(groups=16), (64, 512)),
        (dict(groups=32), (32, 512)),
        (dict(groups=9), (128, 384)),  # 1,152 rows: fewer are no multiple of 128
        (dict(groups=64), (32, 256)),
        (dict(groups=16, width=128), (128, 256)),
        (dict(context_length=600), (256, 512)),
        (dict(context_length=15), (256, 128)),
    ],
    ids=str,
)
def test_many_blocks(sizes, tiles):
    assert choose_tiles(**PAPER | sizes) == tiles


@pytest.mark.parametrize(
    ("sizes", "slots"),
    [
        (dict(blocks=1), 32),  # 128 rows
        (dict(blocks=3), 32),
        (dict(blocks=8), 64),  # two tiles, of which the first reads about half of the context
        (dict(blocks=16), 64),  # costs what 128 do, by this measure; the schedule of v5p is 0.3 % shorter
        (dict(blocks=17), 64),  # a tile of 128 more would be nearly empty
        (dict(blocks=24), 128),
        (dict(blocks=32), 128),
        (dict(blocks=64), 128),  # likewise, and 7 % shorter than with 256
        (dict(blocks=80), 256),
        (dict(blocks=1, groups=1), 128),
        (dict(blocks=3, groups=7), 128),
        (dict(blocks=1, groups=16), 32),
        (dict(blocks=1, width=128), 128),
        (dict(blocks=3, itemsize=4), 32),
    ],
    ids=str,
)
def test_few_blocks_get_no_larger_tile_than_they_fill(sizes, slots):
    assert choose_tiles(**PAPER | sizes).slots == slots


@hypothesis.settings(max_examples=300, deadline=None, derandomize=True)
@hypothesis.given(
    blocks=st.integers(1, 600),
    width=st.sampled_from([1, 2, 4, 8, 16, 32, 64, 128]),
    groups=st.integers(1, 72),
    context_length=st.integers(1, 5000),
    itemsize=st.sampled_from([2, 4]),
)
def test_any_size_gets_whole_blocks_and_lanes_and_a_bounded_score_tile(blocks, width, groups, context_length, itemsize):
    slots, keys = choose_tiles(blocks, width, groups, context_length, itemsize)
    assert slots % width == 0 and slots * groups % 128 == 0 and keys % 128 == 0
    assert keys <= min(512, context_length + 127)
    fewest = next(slots for slots in (32, 64, 128) if slots >= width and slots * groups % 128 == 0)
    assert slots == fewest or slots * groups <= 2048 // itemsize
    assert keys == 128 or slots * groups * keys <= 1024 * 1024 // itemsize
    assert slots == fewest or -(-blocks * width // slots) * slots < 2 * blocks * width  # the rest is padding


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("heads", [(1, 1), (4, 1), (8, 1), (16, 1)])
def test_tiles_of_the_largest_heads_are_taken(dtype, heads):
    N, K = heads
    q, block, context = (
        jax.ShapeDtypeStruct(size, dtype) for size in ((1, 512, 16, N, 256), (1, 512, 16, K, 256), (1, 3072, K, 256))
    )
    assert _tpu.unsupported(q, block, block, context, context) is None

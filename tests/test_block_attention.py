"""Block attention: the chunked path against the dense oracle, and the mask against the rule written out key by key."""

import functools
from typing import NamedTuple

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from dflash_jax.kernels._xla import CHUNK
from dflash_jax.kernels.block_attention import block_attention

# Both sides sum the same float32 products, of at most 1000 keys or a few hundred rows, in another order. Rounding is
# some 1e-6 of the largest entry; a key too many or too few is at least 1e-3.
TOLERANCE = 1e-5
# Weights, outputs and score gradients are rounded to 8 bits (0.4 %) between products, and some of it adds up.
BFLOAT16_TOLERANCE = 2e-2


class Shape(NamedTuple):
    """Sizes and static mask of a case, in the letters of the package."""

    B: int
    A: int
    W: int
    N: int
    K: int
    S: int
    window: int | None = None
    causal: bool = False
    H: int = 8


SHAPES = [
    Shape(2, 3, 2, 2, 2, S=1),
    Shape(1, 5, 4, 4, 2, S=15, causal=True),
    Shape(1, 1, 16, 8, 1, S=17),
    Shape(1, 7, 8, 4, 2, S=CHUNK),
    Shape(2, 3, 16, 4, 2, S=CHUNK + 1, window=7),
    Shape(1, 6, 5, 6, 3, S=1000, window=600, causal=True),
    Shape(1, 4, 10, 4, 1, S=1000),
]
SMALL = SHAPES[1]
LONG = SHAPES[4]


def random_arrays(shape: Shape, seed: int, dtype=np.float32) -> tuple[jax.Array, ...]:
    """q, k_block, v_block, k_context, v_context and a cotangent for the output."""
    B, A, W, N, K, S, H = *shape[:6], shape.H
    rng = np.random.default_rng(seed)
    sizes = [(B, A, W, N, H), (B, A, W, K, H), (B, A, W, K, H), (B, S, K, H), (B, S, K, H), (B, A, W, N, H)]
    return tuple(jnp.asarray(rng.normal(size=size), dtype) for size in sizes)


def random_ranges(shape: Shape, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Unsorted starts and ends in 0 … S; some are empty, one reaches the whole context."""
    rng = np.random.default_rng(seed)
    starts = rng.integers(0, shape.S, (shape.B, shape.A), dtype=np.int32)
    ends = rng.integers(0, shape.S + 1, (shape.B, shape.A), dtype=np.int32)
    starts[0, -1], ends[0, -1] = 0, shape.S
    return starts, ends


@functools.partial(jax.jit, static_argnames=("shape", "backend"))
def attend(arrays, starts, ends, *, shape: Shape, backend: str = "xla"):
    """Output and the gradients of the five arrays for the given cotangent."""
    *inputs, d_out = arrays

    def op(*inputs):
        return block_attention(
            *inputs,
            starts,
            ends,
            scale=shape.H**-0.5,
            window=shape.window,
            causal_in_block=shape.causal,
            backend=backend,
        )

    out, pull_back = jax.vjp(op, *inputs)
    return out, pull_back(d_out)


def assert_close(ours, wanted, tolerance: float) -> None:
    """Compares every array relative to its largest entry (at least 1)."""
    for name, mine, theirs in zip(
        ("out", "q", "k_block", "v_block", "k_context", "v_context"), ours, wanted, strict=True
    ):
        mine, theirs = np.asarray(mine, np.float32), np.asarray(theirs, np.float32)
        limit = tolerance * max(1.0, np.abs(theirs).max())
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=limit, err_msg=name)


def assert_same_as_dense(shape: Shape, arrays, starts, ends, tolerance: float = TOLERANCE) -> None:
    out, gradients = attend(arrays, starts, ends, shape=shape)
    wanted_out, wanted_gradients = attend(arrays, starts, ends, shape=shape, backend="reference")
    assert_close((out, *gradients), (wanted_out, *wanted_gradients), tolerance)
    assert out.dtype == arrays[0].dtype
    assert [g.dtype for g in gradients] == [array.dtype for array in arrays[:5]]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients_equal_the_dense_oracle(shape):
    assert_same_as_dense(shape, random_arrays(shape, 0), *random_ranges(shape, 1))


# The compiled functions of two shapes serve all examples: only values and ranges are drawn.
@hypothesis.settings(max_examples=30, deadline=None, derandomize=True)
@hypothesis.given(st.data())
def test_any_ranges_equal_the_dense_oracle(data):
    shape = data.draw(st.sampled_from([SMALL, LONG]))
    bounds = st.lists(st.integers(0, shape.S), min_size=shape.B * shape.A, max_size=shape.B * shape.A)
    starts, ends = (np.reshape(np.array(data.draw(bounds), np.int32), (shape.B, shape.A)) for _ in range(2))
    assert_same_as_dense(shape, random_arrays(shape, data.draw(st.integers(0, 99))), starts, ends)


def test_scores_in_the_hundreds_neither_overflow_nor_drift():
    shape = LONG
    q, *others = random_arrays(shape, 2)
    # scores up to some 500 are rounded by 3e-5, and so are the weights; gradients of q and k are 100 times larger too
    assert_same_as_dense(shape, (100 * q, *others), *random_ranges(shape, 3), tolerance=1e-3)


def test_bfloat16():
    shape = LONG
    starts, ends = random_ranges(shape, 3)
    arrays = random_arrays(shape, 2, jnp.bfloat16)
    wide = tuple(array.astype(jnp.float32) for array in arrays)
    out, gradients = attend(arrays, starts, ends, shape=shape)
    wanted_out, wanted_gradients = attend(wide, starts, ends, shape=shape, backend="reference")
    assert_close((out, *gradients), (wanted_out, *wanted_gradients), BFLOAT16_TOLERANCE)
    assert {array.dtype for array in (out, *gradients)} == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.parametrize("empty", [(0, 0), (9, 9), (9, 3)])
def test_an_empty_range_gives_zero_and_sends_no_gradient(empty):
    """Padding blocks: the others must come out as if the padding were not there, whatever it holds."""
    shape = SMALL
    arrays = random_arrays(shape, 4)
    starts, ends = np.array([[0, 0, 0, 2, 0]], np.int32), np.array([[15, 0, 4, 7, 1]], np.int32)
    starts[0, 1], ends[0, 1] = empty
    out, (dq, dk_block, dv_block, *d_context) = attend(arrays, starts, ends, shape=shape)
    for array in (out, dq, dk_block, dv_block):
        assert not np.any(array[:, 1])
        assert np.all(np.isfinite(array))
        assert np.all(np.any(array[:, [0, 2, 3, 4]] != 0, axis=(2, 3, 4)))

    other = tuple(array.at[:, 1].multiply(-50.0) for array in arrays[:3])
    d_out = arrays[5].at[:, 1].set(1e6)
    out2, (_, _, _, *d_context2) = attend((*other, *arrays[3:5], d_out), starts, ends, shape=shape)
    np.testing.assert_array_equal(out, out2)
    for mine, theirs in zip(d_context, d_context2, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_nothing_but_empty_ranges():
    shape = SMALL
    zeros = np.zeros((shape.B, shape.A), np.int32)
    out, gradients = attend(random_arrays(shape, 5), zeros, zeros, shape=shape)
    assert all(not np.any(array) for array in (out, *gradients))


# What may be seen, written out one pair at a time: W 6 has the slot 5 whose change must reach slot 1.

STARTS = np.array([[0, 4, 0, 9]], np.int32)  # blocks of two documents, a padding block, unsorted
ENDS = np.array([[3, 11, 0, 17]], np.int32)
MASKS = {
    "full": Shape(1, 4, 6, 2, 1, S=17),
    "causal": Shape(1, 4, 6, 2, 1, S=17, causal=True),
    "window": Shape(1, 4, 6, 2, 1, S=17, window=4),
    "window and causal": Shape(1, 4, 6, 2, 1, S=17, window=4, causal=True),
}


def visible(shape: Shape) -> np.ndarray:
    """bool [A, W, S + A·W]: what each slot may read of the context and of all blocks' slots."""
    seen = np.zeros((shape.A, shape.W, shape.S + shape.A * shape.W), bool)
    for block in range(shape.A):
        start, anchor = STARTS[0, block], ENDS[0, block]
        if anchor <= start:
            continue
        for slot in range(shape.W):
            for position in range(start, anchor):  # strictly before the anchor
                near = shape.window is None or anchor + slot - position < shape.window
                seen[block, slot, position] = near
            for other in range(shape.W):
                near = shape.window is None or slot - other < shape.window
                allowed = near and (other <= slot or not shape.causal)
                seen[block, slot, shape.S + block * shape.W + other] = allowed
    return seen


@pytest.mark.parametrize("shape", MASKS.values(), ids=MASKS)
def test_changing_a_key_or_a_value_changes_exactly_the_slots_that_see_it(shape):
    arrays = random_arrays(shape, 6)
    before = np.asarray(attend(arrays, STARTS, ENDS, shape=shape)[0])[0]
    seen = visible(shape)
    for key in range(seen.shape[2]):
        in_block = key - shape.S
        at = (0, key) if in_block < 0 else (0, in_block // shape.W, in_block % shape.W)
        for index in (3, 4) if in_block < 0 else (1, 2):  # key, then value
            changed = list(arrays)
            changed[index] = changed[index].at[at].add(3.0)
            after = np.asarray(attend(tuple(changed), STARTS, ENDS, shape=shape)[0])[0]
            # one visible key alone has weight 1 whatever its score: only its value can show
            alone = (seen.sum(-1) == 1) & seen[:, :, key] if index in (1, 3) else False
            np.testing.assert_array_equal((before != after).any((2, 3)), seen[:, :, key] & ~np.asarray(alone))


@pytest.mark.parametrize("shape", MASKS.values(), ids=MASKS)
def test_gradients_reach_exactly_what_a_slot_sees(shape):
    arrays, seen = random_arrays(shape, 7), visible(shape)
    for block in range(shape.A):
        for slot in range(shape.W):
            one_slot = jnp.zeros_like(arrays[5]).at[0, block, slot].set(arrays[5][0, block, slot])
            _, gradients = attend((*arrays[:5], one_slot), STARTS, ENDS, shape=shape)
            dq, dk_block, dv_block, dk_context, dv_context = (np.asarray(g[0]) for g in gradients)
            own = np.zeros((shape.A, shape.W), bool)
            own[block, slot] = seen[block, slot].sum() > 1
            np.testing.assert_array_equal(dq.any((2, 3)), own)
            for d_context, d_block, alone in ((dk_context, dk_block, 1), (dv_context, dv_block, 0)):
                reached = np.concatenate([d_context.any((1, 2)), d_block.any((2, 3)).reshape(-1)])
                wanted = seen[block, slot] if seen[block, slot].sum() > alone else np.zeros_like(reached)
                np.testing.assert_array_equal(reached, wanted)


@pytest.mark.parametrize("backend", ["xla", "reference"])
def test_both_backends_mean_the_same_mask_by_position(backend):
    """A window counts from the slot's own position: slot k of an anchor at p stands at p + k."""
    shape = Shape(1, 1, 3, 1, 1, S=8, window=4)
    arrays = random_arrays(shape, 8)
    one_slot = jnp.zeros_like(arrays[5]).at[0, 0, 2].set(1.0)  # position 6 + 2 reads positions 5, 6, 7, 8
    starts, ends = np.array([[0]], np.int32), np.array([[6]], np.int32)
    _, (*_, dv_context) = attend((*arrays[:5], one_slot), starts, ends, shape=shape, backend=backend)
    assert np.flatnonzero(np.asarray(dv_context[0]).any((1, 2))).tolist() == [5]


def test_memory_does_not_hold_the_dense_grid():
    def temporary_bytes(S: int) -> int:
        shape = Shape(1, 64, 16, 2, 1, S=S)
        arrays = jax.eval_shape(lambda: tuple(jnp.zeros(a) for a in _sizes(shape)))
        bounds = jax.ShapeDtypeStruct((1, 64), jnp.int32)
        return attend.lower(arrays, bounds, bounds, shape=shape).compile().memory_analysis().temp_size_in_bytes

    more_keys = 4 * CHUNK
    dense_growth = 64 * 16 * 2 * more_keys * 4  # one float32 score for each query row and further key
    growth = temporary_bytes(2 * CHUNK + more_keys) - temporary_bytes(2 * CHUNK)
    assert growth < dense_growth / 10


def _sizes(shape: Shape) -> list[tuple[int, ...]]:
    return [array.shape for array in jax.eval_shape(lambda: random_arrays(shape, 0))]


NAMES = ("q", "k_block", "v_block", "k_context", "v_context", "starts", "ends")


def abstract_inputs(**changes) -> list[jax.ShapeDtypeStruct]:
    shapes = dict(
        zip(NAMES, [(2, 3, 4, 4, 8), *[(2, 3, 4, 2, 8)] * 2, *[(2, 9, 2, 8)] * 2, (2, 3), (2, 3)], strict=True)
    )
    dtypes = dict.fromkeys(NAMES[:5], jnp.float32) | dict.fromkeys(NAMES[5:], jnp.int32)
    dtypes |= changes.pop("dtypes", {})
    return [jax.ShapeDtypeStruct(shape, dtypes[name]) for name, shape in (shapes | changes).items()]


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("q", (2, 3, 4, 8)),
        ("k_block", (2, 3, 4, 8)),
        ("k_block", (2, 3, 5, 2, 8)),
        ("v_block", (2, 2, 4, 2, 8)),
        ("k_context", (1, 9, 2, 8)),
        ("k_context", (2, 9, 2, 4)),
        ("v_context", (2, 8, 2, 8)),
        ("v_context", (2, 9, 1, 8)),
        ("starts", (2, 2)),
        ("ends", (3, 2)),
    ],
)
def test_shape_errors_name_the_array(name, shape):
    op = functools.partial(block_attention, scale=1.0)
    with pytest.raises(ValueError, match=rf"\b{name}\b.*{', '.join(map(str, shape))}"):
        jax.eval_shape(op, *abstract_inputs(**{name: shape}))


@pytest.mark.parametrize(
    ("inputs", "options", "message"),
    [
        ({"k_block": (2, 3, 4, 3, 8), "v_block": (2, 3, 4, 3, 8), "k_context": (2, 9, 3, 8), "v_context": (2, 9, 3, 8)},
         {}, "4 query heads are not a multiple of 3"),
        ({}, {"window": 0}, "window=0"),
        ({}, {"backend": "triton"}, "backend='triton'.*xla"),
        ({"dtypes": {"ends": jnp.float32}}, {}, "integers.*float32"),
        ({"k_context": (2, 0, 2, 8), "v_context": (2, 0, 2, 8)}, {}, "k_context"),
    ],
)  # fmt: skip
def test_other_errors_say_what_is_wrong(inputs, options, message):
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(functools.partial(block_attention, scale=1.0, **options), *abstract_inputs(**inputs))

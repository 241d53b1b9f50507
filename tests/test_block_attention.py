"""Block attention: every backend against the dense oracle, and the mask against the rule written out key by key."""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from block_attention_cases import (
    BFLOAT16_TOLERANCE,
    TOLERANCE,
    Shape,
    assert_same_as_dense,
    attend,
    random_arrays,
    random_ranges,
)
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

from dflash_jax.kernels import _tpu_layout
from dflash_jax.kernels._xla import CHUNK

SHAPES = [
    Shape(2, 3, 2, 2, 2, S=1),
    Shape(1, 5, 4, 4, 2, S=15, causal=True),
    Shape(1, 3, 4, 3, 1, S=16),
    Shape(1, 1, 16, 8, 1, S=17),
    Shape(1, 5, 3, 2, 1, S=127, window=20),
    Shape(2, 3, 16, 4, 2, S=128, window=7),
    Shape(1, 4, 8, 4, 2, S=129),
    Shape(1, 6, 5, 6, 3, S=1000, window=600, causal=True),
]
SMALL = SHAPES[1]
LONG = SHAPES[5]


@st.composite
def shapes(draw) -> Shape:
    """Few sizes, many masks: each example is compiled."""
    width, groups = draw(st.integers(2, 32)), draw(st.sampled_from([1, 2, 3]))
    K, H = draw(st.sampled_from([(1, 8), (2, 16), (1, 24)]))
    window = draw(st.none() | st.integers(1, 40))
    sizes = dict(B=draw(st.integers(1, 2)), A=draw(st.integers(1, 6)), S=draw(st.integers(1, 40)))
    return Shape(W=width, N=groups * K, K=K, H=H, window=window, causal=draw(st.booleans()), **sizes)


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


@pytest.mark.parametrize("backend", ["xla", "tpu"])
class TestEveryBackend:
    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    def test_values_and_gradients_equal_the_dense_oracle(self, backend, shape):
        assert_same_as_dense(shape, random_arrays(shape, 0), *random_ranges(shape, 1), backend=backend)

    @hypothesis.settings(max_examples=6, deadline=None, derandomize=True)
    @hypothesis.given(shape=shapes(), bfloat16=st.booleans(), seed=st.integers(0, 99))
    def test_any_shape_equals_the_dense_oracle(self, backend, shape, bfloat16, seed):
        dtype, tolerance = (jnp.bfloat16, BFLOAT16_TOLERANCE) if bfloat16 else (jnp.float32, TOLERANCE)
        arrays = random_arrays(shape, seed, dtype)
        assert_same_as_dense(shape, arrays, *random_ranges(shape, seed), tolerance, backend=backend)

    # The compiled functions of two shapes serve all examples: only values and ranges are drawn.
    @hypothesis.settings(max_examples=30, deadline=None, derandomize=True)
    @hypothesis.given(st.data())
    def test_any_ranges_equal_the_dense_oracle(self, backend, data):
        shape = data.draw(st.sampled_from([SMALL, LONG]))
        bounds = st.lists(st.integers(0, shape.S), min_size=shape.B * shape.A, max_size=shape.B * shape.A)
        starts, ends = (np.reshape(np.array(data.draw(bounds), np.int32), (shape.B, shape.A)) for _ in range(2))
        assert_same_as_dense(shape, random_arrays(shape, data.draw(st.integers(0, 99))), starts, ends, backend=backend)

    def test_scores_in_the_hundreds_neither_overflow_nor_drift(self, backend):
        shape = LONG
        q, *others = random_arrays(shape, 2)
        # scores up to some 500 are rounded by 3e-5, and so are the weights; gradients of k are 100 times larger too
        assert_same_as_dense(shape, (100 * q, *others), *random_ranges(shape, 3), tolerance=1e-3, backend=backend)

    @pytest.mark.parametrize("empty", [(0, 0), (9, 9), (9, 3)])
    def test_an_empty_range_gives_zero_and_sends_no_gradient(self, backend, empty):
        """Padding blocks: the others must come out as if the padding were not there, whatever it holds."""
        shape = SMALL
        arrays = random_arrays(shape, 4)
        starts, ends = np.array([[0, 0, 0, 2, 0]], np.int32), np.array([[15, 0, 4, 7, 1]], np.int32)
        starts[0, 1], ends[0, 1] = empty
        out, (dq, dk_block, dv_block, *d_context) = attend(arrays, starts, ends, shape=shape, backend=backend)
        for array in (out, dq, dk_block, dv_block):
            assert not np.any(array[:, 1])
            assert np.all(np.isfinite(array))
            assert np.all(np.any(array[:, [0, 2, 3, 4]] != 0, axis=(2, 3, 4)))

        other = tuple(array.at[:, 1].multiply(-50.0) for array in arrays[:3])
        changed = (*other, *arrays[3:5], arrays[5].at[:, 1].set(1e6))
        out2, (_, _, _, *d_context2) = attend(changed, starts, ends, shape=shape, backend=backend)
        np.testing.assert_array_equal(out, out2)
        for mine, theirs in zip(d_context, d_context2, strict=True):
            np.testing.assert_array_equal(mine, theirs)

    def test_nothing_but_empty_ranges(self, backend):
        shape = SMALL
        zeros = np.zeros((shape.B, shape.A), np.int32)
        out, gradients = attend(random_arrays(shape, 5), zeros, zeros, shape=shape, backend=backend)
        assert all(not np.any(array) for array in (out, *gradients))

    def test_padding_has_no_effect(self, backend):
        """More padding blocks and more context behind every range change no bit of what is real."""
        shape = SMALL
        arrays = random_arrays(shape, 9)
        starts, ends = random_ranges(shape, 9)
        out, gradients = attend(arrays, starts, ends, shape=shape, backend=backend)

        longer = shape._replace(A=shape.A + 4, S=shape.S + 9)
        padded = list(random_arrays(longer, 10))
        for index, array in enumerate(arrays):
            length = array.shape[1]
            padded[index] = padded[index].at[:, :length].set(array)
        empty = np.full((shape.B, 4), 3, np.int32)
        more = [np.concatenate([bounds, empty], axis=1) for bounds in (starts, ends)]
        out2, gradients2 = attend(tuple(padded), *more, shape=longer, backend=backend)
        for mine, theirs in zip((out, *gradients), (out2, *gradients2), strict=True):
            np.testing.assert_allclose(
                mine, theirs[:, : mine.shape[1]], rtol=0, atol=TOLERANCE
            )  # sums are cut elsewhere
            assert not np.any(theirs[:, mine.shape[1] :])

    @pytest.mark.parametrize("shape", MASKS.values(), ids=MASKS)
    def test_changing_a_key_or_a_value_changes_exactly_the_slots_that_see_it(self, backend, shape):
        arrays = random_arrays(shape, 6)
        before = np.asarray(attend(arrays, STARTS, ENDS, shape=shape, backend=backend)[0])[0]
        seen = visible(shape)
        for key in range(seen.shape[2]):
            in_block = key - shape.S
            at = (0, key) if in_block < 0 else (0, in_block // shape.W, in_block % shape.W)
            for index in (3, 4) if in_block < 0 else (1, 2):  # key, then value
                changed = list(arrays)
                changed[index] = changed[index].at[at].add(3.0)
                after = np.asarray(attend(tuple(changed), STARTS, ENDS, shape=shape, backend=backend)[0])[0]
                # one visible key alone has weight 1 whatever its score: only its value can show
                alone = (seen.sum(-1) == 1) & seen[:, :, key] if index in (1, 3) else False
                np.testing.assert_array_equal((before != after).any((2, 3)), seen[:, :, key] & ~np.asarray(alone))

    @pytest.mark.parametrize("shape", MASKS.values(), ids=MASKS)
    def test_gradients_reach_exactly_what_a_slot_sees(self, backend, shape):
        arrays, seen = random_arrays(shape, 7), visible(shape)
        for block in range(shape.A):
            for slot in range(shape.W):
                one_slot = jnp.zeros_like(arrays[5]).at[0, block, slot].set(arrays[5][0, block, slot])
                _, gradients = attend((*arrays[:5], one_slot), STARTS, ENDS, shape=shape, backend=backend)
                dq, dk_block, dv_block, dk_context, dv_context = (np.asarray(g[0]) for g in gradients)
                own = np.zeros((shape.A, shape.W), bool)
                own[block, slot] = seen[block, slot].sum() > 1
                np.testing.assert_array_equal(dq.any((2, 3)), own)
                for d_context, d_block, alone in ((dk_context, dk_block, 1), (dv_context, dv_block, 0)):
                    reached = np.concatenate([d_context.any((1, 2)), d_block.any((2, 3)).reshape(-1)])
                    wanted = seen[block, slot] if seen[block, slot].sum() > alone else np.zeros_like(reached)
                    np.testing.assert_array_equal(reached, wanted)


@pytest.mark.parametrize(
    ("A", "dtype", "slots", "tolerance"),
    [(24, jnp.float32, 128, TOLERANCE), (80, jnp.bfloat16, 256, BFLOAT16_TOLERANCE)],
)
def test_tiles_as_they_are_chosen(A, dtype, slots, tolerance):
    """Several tiles of the sizes that a TPU gets, on both sides."""
    shape, how = Shape(1, A, 16, 4, 1, S=600), dict(backend="tpu", tiles="chosen")
    arrays = random_arrays(shape, 0, dtype)
    to = _tpu_layout.layout(arrays[0], arrays[3])
    assert to.slots == slots and to.query_tiles > 1 and to.key_tiles > 1
    assert_same_as_dense(shape, arrays, *random_ranges(shape, 1), tolerance, **how)


def test_memory_of_a_tpu_is_used_as_declared():
    """The interpreter that models it: transfers happen late, and memory that nothing has written holds NaN."""
    how = dict(
        backend="tpu", interpreter=pltpu.InterpretParams(dma_execution_mode="on_wait", uninitialized_memory="nan")
    )
    assert_same_as_dense(SMALL, random_arrays(SMALL, 0), *random_ranges(SMALL, 1), **how)


@pytest.mark.parametrize("backend", ["xla", "tpu", "reference"])
def test_all_backends_mean_the_same_mask_by_position(backend):
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
        return (
            jax.jit(functools.partial(attend, shape=shape, backend="xla"))
            .lower(arrays, bounds, bounds)
            .compile()
            .memory_analysis()
            .temp_size_in_bytes
        )

    more_keys = 4 * CHUNK
    dense_growth = 64 * 16 * 2 * more_keys * 4  # one float32 score for each query row and further key
    growth = temporary_bytes(2 * CHUNK + more_keys) - temporary_bytes(2 * CHUNK)
    assert growth < dense_growth / 10


def _sizes(shape: Shape) -> list[tuple[int, ...]]:
    return [array.shape for array in jax.eval_shape(lambda: random_arrays(shape, 0))]

"""Long and deep passes of the target in pieces: queries in chunks, layers in loops; the same results."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import random_target

from dflash_jax.models import attention
from dflash_jax.models.attention import Segment, grouped_attention
from dflash_jax.training.step import hidden_and_taps


def test_layers_in_loops_give_what_they_give_one_by_one():
    target = random_target(num_layers=6).model
    tokens_BT = jnp.asarray(np.random.default_rng(0).integers(0, 61, (2, 10)), jnp.int32)
    (hidden, taps), (looped_hidden, looped_taps) = (
        hidden_and_taps(target, tokens_BT, layers=(0, 3), scan=scan) for scan in (False, True)
    )
    # the same products, fused otherwise; activations are of order one and more
    np.testing.assert_allclose(looped_taps, taps, rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(looped_hidden, hidden, rtol=1e-5, atol=1e-4)

    def loops(scan: bool) -> int:
        program = jax.make_jaxpr(lambda tokens: hidden_and_taps(target, tokens, layers=(0, 3), scan=scan))(tokens_BT)
        return str(program).count("scan[")

    assert (loops(False), loops(True)) == (0, 3)  # up to each tap, and to the end


@pytest.mark.parametrize("queries", [12, 14])  # three chunks of four; no multiple of four, so all at once
def test_chunks_of_queries_give_what_all_of_them_give(queries, monkeypatch):
    rng = np.random.default_rng(0)

    def array(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    q, sizes = array(2, queries, 4, 8), (20, 6)
    masks = [jnp.asarray(rng.random((2, queries, size)) < 0.6) for size in sizes]
    segments = [
        Segment(array(2, 2, size, 8), array(2, 2, size, 8), mask) for size, mask in zip(sizes, masks, strict=True)
    ]
    wanted = grouped_attention(q, segments, 0.3)
    monkeypatch.setattr(attention, "QUERY_CHUNK", 4)
    program = jax.make_jaxpr(lambda q: grouped_attention(q, segments, 0.3))(q)
    assert ("scan[" in str(program)) == (queries == 12)
    # the same products and sums of each query, at most in another order
    np.testing.assert_allclose(grouped_attention(q, segments, 0.3), wanted, rtol=2e-6, atol=2e-6)

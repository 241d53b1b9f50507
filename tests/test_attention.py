"""Dense attention of many queries runs in chunks of them, and gives what it gives at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.models import attention
from dflash_jax.models.attention import Segment, grouped_attention


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

"""Keeping less of the drafter's forward pass: the same gradients, and the attention's forward pass runs once."""

import jax
import jax.numpy as jnp
import numpy as np
from small_models import random_drafter, random_target

DRAFTER = random_drafter(random_target().config).model
rng = np.random.default_rng(0)
EMBEDDED, CONTEXT = (jnp.asarray(rng.normal(size=size), jnp.float32) for size in ((1, 3, 4, 32), (1, 20, 32)))
STARTS, ANCHORS = jnp.zeros((1, 3), jnp.int32), jnp.asarray([[4, 9, 15]])


def gradient(drafter, *, remat: bool):
    def loss(drafter):
        return jnp.square(drafter.packed(EMBEDDED, CONTEXT, STARTS, ANCHORS, backend="xla", remat=remat)).sum()

    return jax.grad(loss)(drafter)


def calls(name: str, *, remat: bool) -> int:
    return str(jax.make_jaxpr(lambda drafter: gradient(drafter, remat=remat))(DRAFTER)).count(f"{name}[")


def test_gradients_are_the_same_and_only_the_attention_is_kept():
    ours, wanted = (jax.jit(gradient, static_argnames="remat")(DRAFTER, remat=remat) for remat in (True, False))
    for mine, theirs in zip(jax.tree.leaves(ours), jax.tree.leaves(wanted), strict=True):
        scale = float(jnp.abs(theirs).max())
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-6 * scale)  # float32 sums in another order
    # a forward and a backward pass of attention for each of two layers, whatever is computed again
    assert calls("custom_jvp_call", remat=True) == calls("custom_jvp_call", remat=False) == 4
    assert calls("dot_general", remat=True) > calls("dot_general", remat=False)

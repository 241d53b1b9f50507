"""Top-k and top-p: which tokens of a distribution may be drawn at all."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def keep_top(logits_BWV: jax.Array, top_k_B: jax.Array, top_p_B: jax.Array) -> jax.Array:
    """The logits with −inf in place of every token outside the top-k, and then outside the top-p of what is left.

    Tokens are ranked by logit, equal ones by id, so that exactly top_k stay and the argmax always does.

    Args:
        logits_BWV: float32, already divided by the temperature.
        top_k_B: int32, how many of the likeliest tokens stay; 0 keeps all.
        top_p_B: float32, the smallest set of likeliest tokens with at least this mass stays, the mass measured after
            top-k; 1 keeps all.
    """
    V = logits_BWV.shape[-1]
    ids_BWV = jax.lax.broadcasted_iota(jnp.int32, logits_BWV.shape, logits_BWV.ndim - 1)
    falling_BWV, ranked_ids_BWV = jax.lax.sort((-logits_BWV, ids_BWV), num_keys=1, is_stable=True)
    ranked_BWV = -falling_BWV
    limit_B = jnp.where(top_k_B > 0, jnp.minimum(top_k_B, V), V)
    ranked_BWV = jnp.where(ids_BWV < limit_B[:, None, None], ranked_BWV, -jnp.inf)
    probs_BWV = jax.nn.softmax(ranked_BWV, axis=-1)
    before_BWV = jnp.cumsum(probs_BWV, axis=-1) - probs_BWV
    # A cumulative sum may round to 1 before the last token, so "all" is not left to it.
    inside_BWV = (before_BWV < top_p_B[:, None, None]) | (top_p_B >= 1)[:, None, None]
    count_BW1 = (inside_BWV & (ids_BWV < limit_B[:, None, None])).sum(-1, keepdims=True)
    last_BW1 = jnp.maximum(count_BW1 - 1, 0)
    # Comparing with the last token kept spares a scatter back to the order of the vocabulary.
    bound_BW1 = jnp.take_along_axis(ranked_BWV, last_BW1, axis=-1)
    bound_id_BW1 = jnp.take_along_axis(ranked_ids_BWV, last_BW1, axis=-1)
    kept_BWV = (logits_BWV > bound_BW1) | ((logits_BWV == bound_BW1) & (ids_BWV <= bound_id_BW1))
    return jnp.where(kept_BWV, logits_BWV, -jnp.inf)

"""How much of a proposal is kept (paper section 3.3; Leviathan et al., arXiv 2211.17192).

With argmax proposals the draft distribution is one-hot, and rejection sampling becomes: draw the target's token at
each slot, keep drafted tokens while they equal it, end with the target's token at the first difference. That leaves
the target's distribution unchanged at every temperature, and at temperature 0 it is greedy decoding.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def accepted_tokens(proposed_BV: jax.Array, chosen_BW: jax.Array) -> jax.Array:
    """Tokens a round yields before budget and stops: matching prefix + the target's own token, int32 [B] in 1 … W."""
    matches_BV = proposed_BV == chosen_BW[:, :-1]
    return 1 + jnp.cumprod(matches_BV.astype(jnp.int32), axis=1).sum(axis=1)


def cut_at_stop(chosen_BW: jax.Array, counts_B: jax.Array, stop_tokens: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """Shortens counts so that a stop token among the first counts_B tokens is the last; and says which rows stopped."""
    if not stop_tokens:
        return counts_B, jnp.zeros(counts_B.shape, bool)
    W = chosen_BW.shape[1]
    is_stop_BW = jnp.isin(chosen_BW, jnp.asarray(stop_tokens, chosen_BW.dtype))
    first_stop_B = jnp.where(is_stop_BW.any(axis=1), jnp.argmax(is_stop_BW, axis=1), W)
    return jnp.minimum(counts_B, first_stop_B + 1), first_stop_B < counts_B

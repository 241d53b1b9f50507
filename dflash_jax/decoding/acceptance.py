"""How much of a proposal is kept (paper section 3.3; Leviathan et al., arXiv 2211.17192).

With argmax proposals the draft distribution is one-hot, and rejection sampling becomes: draw the target's token at
each slot, keep drafted tokens while they equal it, end with the target's token at the first difference. That leaves
the target's distribution unchanged at every temperature, and at temperature 0 it is greedy decoding.

With sampled proposals a token drawn from q is kept with probability min(1, p/q), and the first that is not is replaced
by a draw from the residual (p − q)⁺; behind a block that was kept whole, q is 0 and the residual is p itself.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from dflash_jax.decoding.sampling import Purpose, draw, uniform


def accepted_tokens(proposed_BV: jax.Array, chosen_BW: jax.Array) -> jax.Array:
    """Tokens a round yields before budget and stops: matching prefix + the target's own token, int32 [B] in 1 … W."""
    return 1 + _leading(proposed_BV == chosen_BW[:, :-1])


def rejection_sample(
    proposed_BV: jax.Array, q_BVV: jax.Array, p_BWV: jax.Array, keys_B: jax.Array, positions_BW: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """What a round with sampled proposals yields before budget and stops.

    Args:
        proposed_BV: int32 [B, W−1] draft tokens.
        q_BVV: log-probabilities [B, W−1, V] of exactly the distributions they were drawn from.
        p_BWV: log-probabilities [B, W, V] of the target at the same slots and at the one behind them.
        keys_B, positions_BW: keys of the rows, and the positions of the W slots.

    Returns:
        Tokens int32 [B, W], of which the first count are valid: the kept draft tokens and one of the target; counts.
    """
    B, W, V = p_BWV.shape
    q_drawn_BV, p_drawn_BV = (
        jnp.take_along_axis(jnp.exp(log_probs), proposed_BV[..., None], axis=2)[..., 0]
        for log_probs in (q_BVV, p_BWV[:, :-1])
    )
    uniform_BV = uniform(keys_B, positions_BW[:, :-1], Purpose.ACCEPT)
    kept_B = _leading(uniform_BV * q_drawn_BV < p_drawn_BV)

    at_B11 = kept_B[:, None, None]
    q_BWV = jnp.concatenate([jnp.exp(q_BVV), jnp.zeros((B, 1, V))], axis=1)
    p_B1V, q_B1V = (jnp.take_along_axis(probs, at_B11, axis=1) for probs in (jnp.exp(p_BWV), q_BWV))
    residual_B1V = jnp.maximum(p_B1V - q_B1V, 0)
    # Where p = q a rejection has probability 0, but for rounding.
    residual_B1V = jnp.where(residual_B1V.any(-1, keepdims=True), residual_B1V, p_B1V)
    position_B1 = jnp.take_along_axis(positions_BW, kept_B[:, None], axis=1)
    own_B1 = draw(jnp.log(residual_B1V), keys_B, position_B1, Purpose.REPLACE)
    padded_BW = jnp.concatenate([proposed_BV, own_B1], axis=1)
    return jnp.where(jnp.arange(W) == kept_B[:, None], own_B1, padded_BW), kept_B + 1


def cut_at_stop(chosen_BW: jax.Array, counts_B: jax.Array, stop_tokens: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """Shortens counts so that a stop token among the first counts_B tokens is the last; and says which rows stopped."""
    if not stop_tokens:
        return counts_B, jnp.zeros(counts_B.shape, bool)
    W = chosen_BW.shape[1]
    is_stop_BW = jnp.isin(chosen_BW, jnp.asarray(stop_tokens, chosen_BW.dtype))
    first_stop_B = jnp.where(is_stop_BW.any(axis=1), jnp.argmax(is_stop_BW, axis=1), W).astype(jnp.int32)
    return jnp.minimum(counts_B, first_stop_B + 1), first_stop_B < counts_B


def _leading(kept_BV: jax.Array) -> jax.Array:
    """How many from the first on are kept, int32 [B]."""
    return jnp.cumprod(kept_BV.astype(jnp.int32), axis=1).sum(axis=1, dtype=jnp.int32)

"""The target's own choice at each position: argmax, or a draw keyed by (row, position).

Keying the draw by position and not by time makes a sampled text independent of how the positions were grouped into
rounds, of batch neighbours and of the drafter: speculative and autoregressive decoding with one seed give one text.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np


def row_keys(seed: int | np.integer | Sequence[int], count: int) -> jax.Array:
    """PRNG keys of `count` rows: from one seed and the row number, or from one seed a row."""
    if isinstance(seed, (int, np.integer)):
        return jax.vmap(lambda row: jax.random.fold_in(jax.random.key(seed), row))(jnp.arange(count))
    return jax.vmap(jax.random.key)(jnp.asarray(seed, jnp.uint32))


def choose(logits_BWV: jax.Array, keys_B: jax.Array, positions_BW: jax.Array, temperature: jax.Array) -> jax.Array:
    """The token the target puts at each position, int32 [B, W].

    Args:
        logits_BWV: float32 logits for the token at positions_BW.
        keys_B: from `row_keys`.
        positions_BW: the position each token will stand at.
        temperature: float32 scalar; 0 takes the argmax, else softmax(logits / temperature) is sampled.
    """

    def sampled(_):
        def noise(key, position):
            return jax.random.gumbel(jax.random.fold_in(key, position), logits_BWV.shape[-1:])

        noise_BWV = jax.vmap(jax.vmap(noise, in_axes=(None, 0)))(keys_B, positions_BW)
        return jnp.argmax(logits_BWV / jnp.maximum(temperature, 1e-6) + noise_BWV, axis=-1)

    def greedy(_):
        return jnp.argmax(logits_BWV, axis=-1)

    return jax.lax.cond(temperature > 0, sampled, greedy, None).astype(jnp.int32)

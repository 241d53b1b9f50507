"""Distributions of the rows and draws from them, keyed by (row, position).

Keying a draw by position and not by time makes a sampled text independent of how the positions were grouped into
rounds, of batch neighbours and, with argmax proposals, of the drafter: speculative and autoregressive decoding with
one seed give one text.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.decoding.nucleus import keep_top


class Sampling(NamedTuple):
    """How each row draws, all [B]: PRNG keys from `row_keys` · temperature float32, 0 is greedy and ignores the rest ·
    top_k int32, 0 keeps all · top_p float32, 1 keeps all. The order is temperature, top-k, top-p.
    """

    keys: jax.Array
    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array


class Purpose(enum.IntEnum):
    """Draws that sampled proposals need at one position; each has its own key."""

    PROPOSE = 1
    ACCEPT = 2
    REPLACE = 3


def row_keys(seed: int | np.integer | Sequence[int], count: int) -> jax.Array:
    """PRNG keys of `count` rows: from one seed and the row number, or from one seed a row."""
    if isinstance(seed, (int, np.integer)):
        return jax.vmap(lambda row: jax.random.fold_in(jax.random.key(seed), row))(jnp.arange(count))
    return jax.vmap(jax.random.key)(jnp.asarray(seed, jnp.uint32))


def choose(logits_BWV: jax.Array, sampling: Sampling, positions_BW: jax.Array, *, truncate: bool) -> jax.Array:
    """The token the target puts at each position, int32 [B, W]: its argmax, or a draw from the row's distribution.

    Args:
        logits_BWV: float32 logits for the token at positions_BW.
        sampling: of the rows.
        positions_BW: the position each token will stand at.
        truncate: whether top_k and top_p are looked at; without them no vocabulary is sorted.
    """
    greedy_BW = jnp.argmax(logits_BWV, axis=-1).astype(jnp.int32)

    def sampled(_):
        noise_BWV = _gumbel(_position_keys(sampling.keys, positions_BW), logits_BWV.shape[-1])
        drawn_BW = jnp.argmax(_tempered(logits_BWV, sampling, truncate) + noise_BWV, axis=-1).astype(jnp.int32)
        return jnp.where((sampling.temperature > 0)[:, None], drawn_BW, greedy_BW)

    return jax.lax.cond((sampling.temperature > 0).any(), sampled, lambda _: greedy_BW, None)


def log_distribution(logits_BWV: jax.Array, sampling: Sampling, *, truncate: bool) -> jax.Array:
    """Log-probabilities [B, W, V] that a row draws from; of a greedy row 0 at the argmax. Elsewhere −inf."""
    log_probs_BWV = jax.nn.log_softmax(_tempered(logits_BWV, sampling, truncate), axis=-1)
    argmax_BWV = jax.nn.one_hot(jnp.argmax(logits_BWV, axis=-1), logits_BWV.shape[-1], dtype=bool)
    greedy_BWV = jnp.where(argmax_BWV, 0.0, -jnp.inf)
    return jnp.where((sampling.temperature > 0)[:, None, None], log_probs_BWV, greedy_BWV)


def draw(log_probs_BWV: jax.Array, keys_B: jax.Array, positions_BW: jax.Array, purpose: Purpose) -> jax.Array:
    """A token of each distribution, int32 [B, W]. The log-probabilities need not be normalised."""
    noise_BWV = _gumbel(_position_keys(keys_B, positions_BW, purpose), log_probs_BWV.shape[-1])
    return jnp.argmax(log_probs_BWV + noise_BWV, axis=-1).astype(jnp.int32)


def uniform(keys_B: jax.Array, positions_BW: jax.Array, purpose: Purpose) -> jax.Array:
    """A number in [0, 1) for each position, float32 [B, W]."""
    keys_BW = _position_keys(keys_B, positions_BW, purpose)
    return jax.vmap(jax.vmap(lambda key: jax.random.uniform(key, dtype=jnp.float32)))(keys_BW)


def _tempered(logits_BWV: jax.Array, sampling: Sampling, truncate: bool) -> jax.Array:
    """Logits of what a row draws from; those of greedy rows are not used.

    The largest is 0 before anything is divided: divided by a small temperature it would overflow, or round in one part
    of a program otherwise than in another.
    """
    below_BWV = logits_BWV - logits_BWV.max(axis=-1, keepdims=True)
    tempered_BWV = below_BWV / jnp.maximum(sampling.temperature, 1e-6)[:, None, None]
    return keep_top(tempered_BWV, sampling.top_k, sampling.top_p) if truncate else tempered_BWV


def _position_keys(keys_B: jax.Array, positions_BW: jax.Array, purpose: Purpose | None = None) -> jax.Array:
    keys_BW = jax.vmap(jax.vmap(jax.random.fold_in, in_axes=(None, 0)))(keys_B, positions_BW)
    return keys_BW if purpose is None else jax.vmap(jax.vmap(lambda key: jax.random.fold_in(key, purpose)))(keys_BW)


def _gumbel(keys_BW: jax.Array, V: int) -> jax.Array:
    return jax.vmap(jax.vmap(lambda key: jax.random.gumbel(key, (V,), jnp.float32)))(keys_BW)

"""The drafter's protocol, and its simplest member: the drafter that proposes nothing.

A drafter is anything with these; the loop, the acceptance rules and the benchmark never ask which one they hold:

    tap_layers                                          target layers it wants to read
    max_width                                           widest block it can propose, anchor included
    init_cache(batch, length) → cache
    absorb(cache, taps_BTMD, positions_BT, anchors_B) → cache   after prefill and after every verify pass; taps at and
                                                        behind the next anchor are of tokens that were refused
    propose(target, cache, anchor_B, position_B, draw, width=W) → Proposal

Every leaf of a cache has the batch as its first axis, so that a row can be replaced. `draw` turns logits into tokens,
by argmax or by sampling as the rows want it; a drafter that proposes slot by slot calls it once a slot.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx


class Proposal(NamedTuple):
    """Draft tokens int32 [B, W−1]; log_probs [B, W−1, V] of the distribution they were drawn from.

    log_probs is None when the tokens were not drawn, such as the drafter's argmax.
    """

    tokens: jax.Array
    log_probs: jax.Array | None


# (logits [B, n, V] of n slots, positions int32 [B, n] those tokens will stand at) → the n tokens as a Proposal.
Draw = Callable[[jax.Array, jax.Array], Proposal]


class NoDrafter(nnx.Module):
    """The empty proposal: with it the speculative loop is plain autoregressive decoding."""

    tap_layers: tuple[int, ...] = ()
    max_width = 1

    def init_cache(self, batch: int, length: int) -> tuple:
        return ()

    def absorb(self, cache: tuple, taps_BTMD: jax.Array, positions_BT: jax.Array, anchors_B: jax.Array) -> tuple:
        return cache

    def propose(self, target, cache, anchor_B, position_B, draw: Draw, *, width: int) -> Proposal:
        return Proposal(jnp.zeros((anchor_B.shape[0], width - 1), anchor_B.dtype), None)

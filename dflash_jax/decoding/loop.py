"""The compiled decoding loop: draft, verify, accept, commit, with no host between tokens (paper section 3.3).

Invariant between rounds: of each row, `lengths` tokens are committed; the last of them, the anchor, stands at position
lengths − 1 and has not been through the target yet; both caches hold every position before it.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dflash_jax.decoding.acceptance import accepted_tokens, cut_at_stop
from dflash_jax.decoding.sampling import choose


class LoopSettings(NamedTuple):
    """What a compilation depends on, apart from shapes."""

    width: int
    stop_tokens: tuple[int, ...]


class LoopState(NamedTuple):
    """The carry. Shapes: tokens [B, S] prompt and committed tokens (junk beyond lengths) · lengths, limits int32 [B],
    a row ends at limits tokens · done bool [B] · stopped bool [B], ended by a stop token · acceptance int32 [B, S],
    tokens each round gave (0: not run) · rounds int32 [B] · keys [B] PRNG keys of the rows.
    """

    tokens: jax.Array
    lengths: jax.Array
    limits: jax.Array
    done: jax.Array
    stopped: jax.Array
    acceptance: jax.Array
    rounds: jax.Array
    keys: jax.Array
    target_cache: Any
    drafter_cache: Any


@functools.partial(jax.jit, static_argnames=("stop_tokens", "cache_length"))
def prefill(target, drafter, prompts_BP, lengths_B, limits_B, keys_B, temperature, *, stop_tokens, cache_length):
    """Runs the padded prompts, commits the first token of each row, and returns the LoopState.

    Args:
        prompts_BP: int32, each row's prompt from slot 0, padding behind it.
        lengths_B: prompt lengths, at least 1. limits_B: longest total length, more than the prompt's.
        cache_length: slots of the caches, at least max(limits) + width.
    """
    B, P = prompts_BP.shape
    positions_BP = jnp.broadcast_to(jnp.arange(P), (B, P))
    target_cache = target.init_cache(B, cache_length)
    hidden_BPD, taps_BPMD, target_cache = target.forward(
        prompts_BP, positions_BP, target_cache, taps=drafter.tap_layers
    )
    last_B1D = jnp.take_along_axis(hidden_BPD, (lengths_B - 1)[:, None, None], axis=1)
    first_B1 = choose(target.logits(last_B1D), keys_B, lengths_B[:, None], temperature)
    tokens_BS = jnp.pad(prompts_BP, ((0, 0), (0, cache_length - P)))
    _, stopped_B = cut_at_stop(first_B1, jnp.ones_like(lengths_B), stop_tokens)
    return LoopState(
        tokens=_put(tokens_BS, first_B1, lengths_B),
        lengths=lengths_B + 1,
        limits=limits_B,
        done=stopped_B | (lengths_B + 1 >= limits_B),
        stopped=stopped_B,
        acceptance=jnp.zeros((B, cache_length), jnp.int32),
        rounds=jnp.zeros((B,), jnp.int32),
        keys=keys_B,
        target_cache=target_cache,
        drafter_cache=drafter.absorb(drafter.init_cache(B, cache_length), taps_BPMD, positions_BP),
    )


@functools.partial(jax.jit, static_argnames=("settings",), donate_argnames=("state",))
def run_rounds(target, drafter, state: LoopState, temperature, max_rounds, *, settings: LoopSettings) -> LoopState:
    """Rounds until every row is done, or until max_rounds (a traced int32) more rounds were run."""

    def go_on(carry):
        state, count = carry
        return ~state.done.all() & (count < max_rounds)

    def body(carry):
        state, count = carry
        return one_round(target, drafter, state, temperature, settings), count + 1

    return jax.lax.while_loop(go_on, body, (state, jnp.int32(0)))[0]


def one_round(target, drafter, state: LoopState, temperature, settings: LoopSettings) -> LoopState:
    """Draft → verify → accept → commit, for all rows; rows that are done stay as they are."""
    position_B = state.lengths - 1
    anchor_B = jnp.take_along_axis(state.tokens, position_B[:, None], axis=1)[:, 0]
    proposal = drafter.propose(target, state.drafter_cache, anchor_B, position_B, state.keys, width=settings.width)

    block_BW = jnp.concatenate([anchor_B[:, None], proposal.tokens], axis=1)
    positions_BW = position_B[:, None] + jnp.arange(settings.width)
    hidden_BWD, taps_BWMD, target_cache = target.forward(
        block_BW, positions_BW, state.target_cache, taps=drafter.tap_layers
    )
    chosen_BW = choose(target.logits(hidden_BWD), state.keys, positions_BW + 1, temperature)

    counts_B = jnp.minimum(accepted_tokens(proposal.tokens, chosen_BW), state.limits - state.lengths)
    counts_B, stopped_B = cut_at_stop(chosen_BW, counts_B, settings.stop_tokens)
    counts_B = jnp.where(state.done, 0, counts_B)
    stopped_B = state.stopped | (stopped_B & ~state.done)
    lengths_B = state.lengths + counts_B
    return LoopState(
        tokens=_put(state.tokens, chosen_BW, state.lengths),
        lengths=lengths_B,
        limits=state.limits,
        done=state.done | stopped_B | (lengths_B >= state.limits),
        stopped=stopped_B,
        acceptance=_put(state.acceptance, counts_B[:, None], state.rounds),
        rounds=state.rounds + ~state.done,
        keys=state.keys,
        target_cache=target.commit(target_cache, lengths_B),
        drafter_cache=drafter.absorb(state.drafter_cache, taps_BWMD, positions_BW),
    )


def _put(rows_BS: jax.Array, new_BW: jax.Array, start_B: jax.Array) -> jax.Array:
    """Writes new_BW into each row from slot start_B on."""
    return jax.vmap(lambda row, new, start: jax.lax.dynamic_update_slice(row, new, (start,)))(
        rows_BS, new_BW.astype(rows_BS.dtype), start_B
    )

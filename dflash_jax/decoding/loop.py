"""The compiled decoding loop: draft, verify, accept, commit, with no host between tokens (paper section 3.3).

Invariant between rounds: of each row, `lengths` tokens are committed; the last of them, the anchor, stands at position
lengths − 1 and has not been through the target yet; both caches hold every position before it.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dflash_jax.decoding.acceptance import accepted_tokens, cut_at_stop, rejection_sample
from dflash_jax.decoding.flat import Flat
from dflash_jax.decoding.processing import LogitsProcessor, process
from dflash_jax.decoding.sampling import Purpose, Sampling, choose, draw, log_distribution
from dflash_jax.models.proposal import NoDrafter, Proposal
from dflash_jax.sharding import constrain


class LoopSettings(NamedTuple):
    """What a compilation depends on, apart from shapes.

    truncate: some row has a top-k or top-p. sampled_proposals: drafters may draw; else they take their argmax.
    """

    width: int
    stop_tokens: tuple[int, ...]
    truncate: bool = False
    sampled_proposals: bool = False
    logits_processor: LogitsProcessor | None = None


class LoopState(NamedTuple):
    """The carry; every leaf has the rows first. Shapes: tokens [B, S] prompt and committed tokens (junk beyond lengths)
    · lengths, limits int32 [B], a row ends at limits tokens · done bool [B] · stopped bool [B], ended by a stop token ·
    acceptance int32 [B, S], tokens each round gave (0: not run) · verified int32 [B, S], slots that could have given
    one, slot 0 counted: no more than the limit left, and none behind a stop token · rounds int32 [B] · sampling.
    """

    tokens: jax.Array
    lengths: jax.Array
    limits: jax.Array
    done: jax.Array
    stopped: jax.Array
    acceptance: jax.Array
    verified: jax.Array
    rounds: jax.Array
    sampling: Sampling
    target_cache: Any
    drafter_cache: Any


class Progress(NamedTuple):
    """What the host wants to know of some rounds: small arrays beside the state, which the next call consumes.

    tokens int32 [B, W], the first W tokens behind those that the rows had · counts int32 [B], how many tokens the rows
    gained · done bool [B] · rounds int32, how many were run · tried, kept int32 [W], over rows and rounds: how often
    slot k was verified while all before it were accepted, and how often it was accepted then (slot 0: always).
    """

    tokens: jax.Array
    counts: jax.Array
    done: jax.Array
    rounds: jax.Array
    tried: jax.Array
    kept: jax.Array


@functools.partial(jax.jit, static_argnames=("settings", "cache_length"))
def prefill(
    target,
    drafter,
    prompts_BP: jax.Array,
    lengths_B: jax.Array,
    limits_B: jax.Array,
    sampling: Sampling,
    *,
    settings: LoopSettings,
    cache_length: int,
) -> tuple[LoopState, Progress]:
    """Runs the padded prompts, commits the first token of each row, and returns the LoopState and that token.

    Args:
        prompts_BP: int32, each row's prompt from slot 0, padding behind it.
        lengths_B: prompt lengths, at least 1. limits_B: longest total length, more than the prompt's.
        settings: its width is not looked at.
        cache_length: slots of the caches, at least max(limits) + width.
    """
    B, P = prompts_BP.shape
    positions_BP = jnp.broadcast_to(jnp.arange(P), (B, P))
    target_cache = target.init_cache(B, cache_length)
    hidden_BPD, taps_BPMD, target_cache = target.forward(
        prompts_BP, positions_BP, target_cache, taps=drafter.tap_layers
    )
    last_B1D = jnp.take_along_axis(hidden_BPD, (lengths_B - 1)[:, None, None], axis=1)
    tokens_BS = jnp.pad(prompts_BP, ((0, 0), (0, cache_length - P)))
    logits_B1V = process(settings.logits_processor, target.logits(last_B1D), tokens_BS, lengths_B)
    first_B1 = choose(logits_B1V, sampling, lengths_B[:, None], truncate=settings.truncate)
    _, stopped_B = cut_at_stop(first_B1, jnp.ones_like(lengths_B), settings.stop_tokens)
    done_B = stopped_B | (lengths_B + 1 >= limits_B)
    state = LoopState(
        tokens=_put(tokens_BS, first_B1, lengths_B),
        lengths=lengths_B + 1,
        limits=limits_B,
        done=done_B,
        stopped=stopped_B,
        acceptance=jnp.zeros((B, cache_length), jnp.int32),
        verified=jnp.zeros((B, cache_length), jnp.int32),
        rounds=jnp.zeros((B,), jnp.int32),
        sampling=sampling,
        target_cache=target_cache,
        drafter_cache=drafter.absorb(drafter.init_cache(B, cache_length), taps_BPMD, positions_BP, lengths_B),
    )
    none_1 = jnp.zeros((1,), jnp.int32)
    progress = Progress(first_B1, jnp.ones_like(lengths_B), done_B, jnp.int32(0), tried=none_1, kept=none_1)
    return _placed(state, progress)


@functools.partial(jax.jit, donate_argnames=("state",))
def replace_row(state: LoopState, row: LoopState, slot: jax.Array) -> LoopState:
    """The state with its row at `slot` (a traced int32) replaced by the only row of `row`."""
    return jax.tree.map(lambda rows, new: rows.at[slot].set(new[0]), state, row)


@functools.partial(jax.jit, static_argnames=("settings",), donate_argnames=("state",))
def run_rounds(
    models: Flat, state: LoopState, max_rounds, done_rows, *, settings: LoopSettings
) -> tuple[LoopState, Progress]:
    """Rounds until done_rows rows are done, or until max_rounds more rounds were run (both traced int32).

    models: target and drafter.
    """
    target, drafter = models.models()
    W, before_B = settings.width, state.lengths

    def go_on(carry):
        state, count, *_ = carry
        return (state.done.sum() < done_rows) & (count < max_rounds)

    def body(carry):
        state, count, tried_W, kept_W = carry
        state, counts_B, verified_B = one_round(target, drafter, state, settings)
        slots_W, counts_B1 = jnp.arange(W), counts_B[:, None]
        tried_BW = (slots_W < verified_B[:, None]) & (slots_W <= counts_B1) & (counts_B1 > 0)
        tried_W, kept_W = (
            total_W + new_BW.sum(0, dtype=jnp.int32)
            for total_W, new_BW in ((tried_W, tried_BW), (kept_W, slots_W < counts_B1))
        )
        return state, count + 1, tried_W, kept_W

    none_W = jnp.zeros((W,), jnp.int32)
    state, count, tried_W, kept_W = jax.lax.while_loop(go_on, body, (state, jnp.int32(0), none_W, none_W))
    new_BW = jnp.take_along_axis(state.tokens, before_B[:, None] + jnp.arange(W), axis=1)
    return _placed(state, Progress(new_BW, state.lengths - before_B, state.done, count, tried_W, kept_W))


def one_round(target, drafter, state: LoopState, settings: LoopSettings) -> tuple[LoopState, jax.Array, jax.Array]:
    """Draft → verify → accept → commit, for all rows; rows that are done stay as they are.

    Returns the state, and of each row the tokens the round gave and the slots that it verified (see LoopState).
    """
    position_B = state.lengths - 1
    anchor_B = jnp.take_along_axis(state.tokens, position_B[:, None], axis=1)[:, 0]
    # A round of width 1 is a step of plain decoding whose features the drafter absorbs: it is not asked for anything.
    proposer = drafter if settings.width > 1 else NoDrafter()
    proposal = proposer.propose(
        *(target, state.drafter_cache, anchor_B, position_B, _draw(state.sampling, settings)), width=settings.width
    )
    block_BW = jnp.concatenate([anchor_B[:, None], proposal.tokens], axis=1)
    positions_BW = position_B[:, None] + jnp.arange(settings.width)
    hidden_BWD, taps_BWMD, target_cache = target.forward(
        block_BW, positions_BW, state.target_cache, taps=drafter.tap_layers
    )
    drafted_BS = _put(state.tokens, proposal.tokens, state.lengths)
    logits_BWV = process(settings.logits_processor, target.logits(hidden_BWD), drafted_BS, state.lengths)
    chosen_BW, counts_B = _accept(proposal, logits_BWV, state.sampling, positions_BW + 1, settings)

    verified_B = jnp.minimum(settings.width, state.limits - state.lengths)
    counts_B, stopped_B = cut_at_stop(chosen_BW, jnp.minimum(counts_B, verified_B), settings.stop_tokens)
    verified_B = jnp.where(stopped_B, counts_B, verified_B)
    counts_B, verified_B = (jnp.where(state.done, 0, x_B) for x_B in (counts_B, verified_B))
    stopped_B = state.stopped | (stopped_B & ~state.done)
    lengths_B = state.lengths + counts_B
    state = LoopState(
        tokens=_put(state.tokens, chosen_BW, state.lengths),
        lengths=lengths_B,
        limits=state.limits,
        done=state.done | stopped_B | (lengths_B >= state.limits),
        stopped=stopped_B,
        acceptance=_put(state.acceptance, counts_B[:, None], state.rounds),
        verified=_put(state.verified, verified_B[:, None], state.rounds),
        rounds=state.rounds + ~state.done,
        sampling=state.sampling,
        target_cache=target.commit(target_cache, lengths_B),
        drafter_cache=drafter.absorb(state.drafter_cache, taps_BWMD, positions_BW, lengths_B - 1),
    )
    return state, counts_B, verified_B


def _placed(state: LoopState, progress: Progress) -> tuple[LoopState, Progress]:
    """On a mesh, caches are divided by rows and heads, and every device has the small arrays that the host reads."""

    def place(path, leaf):
        return constrain(leaf, *(("rows", "heads") if "cache" in jax.tree_util.keystr(path) else ()))

    return jax.tree_util.tree_map_with_path(place, (state, progress))


def _draw(sampling: Sampling, settings: LoopSettings):
    """How a drafter turns logits into tokens (proposal.Draw)."""

    def argmax(logits_BVV, positions_BV):
        return Proposal(jnp.argmax(logits_BVV, axis=-1).astype(jnp.int32), None)

    def sampled(logits_BVV, positions_BV):
        log_probs_BVV = log_distribution(logits_BVV, sampling, truncate=settings.truncate)
        return Proposal(draw(log_probs_BVV, sampling.keys, positions_BV, Purpose.PROPOSE), log_probs_BVV)

    return sampled if settings.sampled_proposals else argmax


def _accept(
    proposal: Proposal, logits_BWV: jax.Array, sampling: Sampling, positions_BW: jax.Array, settings: LoopSettings
) -> tuple[jax.Array, jax.Array]:
    """Tokens [B, W] and how many of them the target allows, by the rule that the proposal's kind asks for."""
    if proposal.log_probs is None:
        chosen_BW = choose(logits_BWV, sampling, positions_BW, truncate=settings.truncate)
        return chosen_BW, accepted_tokens(proposal.tokens, chosen_BW)
    p_BWV = log_distribution(logits_BWV, sampling, truncate=settings.truncate)
    return rejection_sample(proposal.tokens, proposal.log_probs, p_BWV, sampling.keys, positions_BW)


def _put(rows_BS: jax.Array, new_BW: jax.Array, start_B: jax.Array) -> jax.Array:
    """Writes new_BW into each row from slot start_B on."""
    return jax.vmap(lambda row, new, start: jax.lax.dynamic_update_slice(row, new, (start,)))(
        rows_BS, new_BW.astype(rows_BS.dtype), start_B
    )

"""Continuous batching: a fixed number of slots, each given the next prompt as soon as its row is done.

All rounds run in one compiled shape. The first prompts, and any later ones that find every slot free, are prefilled
together; a prompt that finds its neighbours still running is prefilled alone and put into its slot.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.decoding.loop import LoopState, prefill, replace_row, run_rounds
from dflash_jax.decoding.request import Request, prompt_bucket


@dataclass(frozen=True)
class Timings:
    """Wall-clock seconds of one call, shared by all its results; the first with new shapes includes compilation.

    prefill_seconds is the time of all prompts, decode_seconds that of all rounds, batch_rounds how many were run
    (a round advances every slot).
    """

    prefill_seconds: float
    decode_seconds: float
    batch_rounds: int


@dataclass(frozen=True)
class DecodedRow:
    """New tokens of one prompt, tokens each round gave, and whether a stop token ended it."""

    tokens: list[int]
    acceptance_lengths: list[int]
    stopped: bool


def decode_all(
    request: Request, size: int, finished: Callable[[int], object] = lambda rows: None
) -> tuple[list[DecodedRow], Timings]:
    """Decodes every prompt of the request in `size` slots.

    Args:
        request: with at least one prompt and a budget of at least one token.
        size: at least 1, at most the number of prompts.
        finished: called with how many rows ended since the last call.

    Returns:
        The rows in the order of the prompts, and the timings of all of them together.
    """
    waiting = collections.deque(range(len(request.prompts)))
    results: dict[int, DecodedRow] = {}
    slots: list[int | None] = [None] * size
    state: LoopState | None = None
    clock, rounds = _Clock(), 0
    while waiting or len(results) < len(request.prompts):
        state = _fill(request, state, slots, waiting)
        clock.charge("prefill", state)
        before_B = np.array(state.rounds)
        # With prompts waiting, the first slot that comes free is reason enough to return.
        state = _advance(request, state, done_rows=1 if waiting else size)
        clock.charge("decode", state)
        rounds += int((np.array(state.rounds) - before_B).max())
        done_B = np.array(state.done)
        ended = {slot: row for slot, row in enumerate(slots) if row is not None and done_B[slot]}
        results |= _harvest(request, state, ended)
        for slot in ended:
            slots[slot] = None
        if not any(row is not None for row in slots):
            state = None  # before the next caches are allocated
        finished(len(ended))
    timings = Timings(clock.seconds["prefill"], clock.seconds["decode"], rounds)
    return [results[row] for row in range(len(request.prompts))], timings


def start(request: Request, rows: Sequence[int], size: int) -> LoopState:
    """Prefills the given rows; slots without one are filled with one-token rows that end at once."""
    prompts = [request.prompts[row] for row in rows] + [[0]] * (size - len(rows))
    limits = [request.limits[row] for row in rows] + [2] * (size - len(rows))
    padded_BP = np.zeros((size, prompt_bucket(max(map(len, prompts)))), np.int32)
    for slot, prompt in enumerate(prompts):
        padded_BP[slot, : len(prompt)] = prompt
    of_rows_B = jnp.asarray([*rows, *[rows[0]] * (size - len(rows))])
    return prefill(
        *(request.target, request.drafter, jnp.asarray(padded_BP)),
        jnp.asarray([len(prompt) for prompt in prompts], jnp.int32),
        jnp.asarray(limits, jnp.int32),
        jax.tree.map(lambda values: values[of_rows_B], request.sampling),
        # What a prefill does not depend on is set to one value, so that all widths share a compilation.
        settings=request.settings._replace(width=1, sampled_proposals=False),
        cache_length=request.cache_length,
    )


def one_round_of(request: Request, state: LoopState) -> LoopState:
    """One more round of every row; the given state is consumed."""
    return _advance(request, state, done_rows=len(state.done), max_rounds=1)


def _advance(request: Request, state: LoopState, *, done_rows: int, max_rounds: int | None = None) -> LoopState:
    limit = request.cache_length if max_rounds is None else max_rounds
    return run_rounds(
        *(request.target, request.drafter, state, jnp.int32(limit), jnp.int32(done_rows)), settings=request.settings
    )


def _fill(
    request: Request, state: LoopState | None, slots: list[int | None], waiting: collections.deque[int]
) -> LoopState:
    """Gives waiting rows to empty slots, and returns the state that holds them."""
    if state is None:
        slots[:] = [waiting.popleft() if waiting else None for _ in slots]
        return start(request, [row for row in slots if row is not None], len(slots))
    filled: LoopState = state
    for slot, row in enumerate(slots):
        if row is None and waiting:
            slots[slot] = new = waiting.popleft()
            filled = replace_row(filled, start(request, [new], 1), jnp.int32(slot))
    return filled


def _harvest(request: Request, state: LoopState, ended: dict[int, int]) -> dict[int, DecodedRow]:
    """What was decoded in the given slots (slot → row)."""
    tokens_BS, acceptance_BS = np.asarray(state.tokens), np.asarray(state.acceptance)
    lengths_B, rounds_B, stopped_B = (np.asarray(x) for x in (state.lengths, state.rounds, state.stopped))
    return {
        row: DecodedRow(
            tokens_BS[slot, len(request.prompts[row]) : lengths_B[slot]].tolist(),
            acceptance_BS[slot, : rounds_B[slot]].tolist(),
            bool(stopped_B[slot]),
        )
        for slot, row in ended.items()
    }


class _Clock:
    """Adds the time since the last charge to a part, once the given arrays are there."""

    def __init__(self):
        self.seconds, self.last = collections.Counter(), time.perf_counter()

    def charge(self, part: str, arrays) -> None:
        jax.block_until_ready(arrays)
        now = time.perf_counter()
        self.seconds[part] += now - self.last  # pyright: ignore[reportArgumentType]
        self.last = now

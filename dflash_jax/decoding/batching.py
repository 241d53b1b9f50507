"""Continuous batching: a fixed number of slots, each given the next prompt as soon as its row is done.

All rounds run in one compiled shape. The first prompts, and any later ones that find every slot free, are prefilled
together; a prompt that finds its neighbours still running is prefilled alone and put into its slot.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.decoding.loop import LoopState, Progress, prefill, replace_row
from dflash_jax.decoding.request import Request, prompt_bucket
from dflash_jax.decoding.runner import Runner
from dflash_jax.decoding.stats import Clock, Stats
from dflash_jax.sharding import on_mesh


@dataclass(frozen=True)
class DecodedRow:
    """New tokens of one prompt, tokens each round gave and slots it verified, and whether a stop token ended it."""

    tokens: list[int]
    acceptance_lengths: list[int]
    verified_lengths: list[int]
    stopped: bool

    @property
    def rounds(self) -> list[tuple[int, int]]:
        """(accepted, verified) of each round, slot 0 counted."""
        return list(zip(self.acceptance_lengths, self.verified_lengths, strict=True))


def decode_all(
    request: Request, size: int, clock: Clock, finished: Callable[[int], object] = lambda rows: None
) -> tuple[list[DecodedRow], Stats]:
    """Decodes every prompt of the request in `size` slots.

    Args:
        request: with at least one prompt and a budget of at least one token.
        size: at least 1, at most the number of prompts.
        clock: started with the call.
        finished: called with how many rows ended since the last call.

    Returns:
        The rows in the order of the prompts, and the Stats of all of them together.
    """
    waiting = collections.deque(range(len(request.prompts)))
    results: dict[int, DecodedRow] = {}
    slots: list[int | None] = [None] * size
    state: LoopState | None = None
    runner, first_token_seconds = Runner(request, size, clock), None
    while waiting or len(results) < len(request.prompts):
        state = _fill(request, state, slots, waiting)
        jax.block_until_ready(state)
        spent, _ = clock.charge("prefill")
        first_token_seconds = spent if first_token_seconds is None else first_token_seconds
        # With prompts waiting, the first slot that comes free is reason enough to return.
        state, done_B = runner.run(state, done_rows=1 if waiting else size)
        ended = {slot: row for slot, row in enumerate(slots) if row is not None and done_B[slot]}
        results |= harvest(request, state, ended)
        for slot in ended:
            slots[slot] = None
        if not any(row is not None for row in slots):
            state = None  # before the next caches are allocated
        finished(len(ended))
    rows = [results[row] for row in range(len(request.prompts))]
    return rows, clock.stats(first_token_seconds or 0.0, runner.rounds_by_width, [row.rounds for row in rows])


def start(request: Request, rows: Sequence[int], size: int) -> tuple[LoopState, Progress]:
    """Prefills the given rows; slots without one are filled with one-token rows that end at once."""
    prompts = [request.prompts[row] for row in rows] + [[0]] * (size - len(rows))
    limits = [request.limits[row] for row in rows] + [2] * (size - len(rows))
    padded_BP = np.zeros((size, prompt_bucket(max(map(len, prompts)))), np.int32)
    for slot, prompt in enumerate(prompts):
        padded_BP[slot, : len(prompt)] = prompt
    of_rows_B = jnp.asarray([*rows, *[rows[0]] * (size - len(rows))])
    with on_mesh(request.mesh):
        return prefill(
            *(request.target, request.drafter, jnp.asarray(padded_BP)),
            jnp.asarray([len(prompt) for prompt in prompts], jnp.int32),
            jnp.asarray(limits, jnp.int32),
            jax.tree.map(lambda values: values[of_rows_B], request.sampling),
            # What a prefill does not depend on is set to one value, so that all widths share a compilation.
            settings=request.settings._replace(width=1, sampled_proposals=False),
            cache_length=request.cache_length,
        )


def harvest(request: Request, state: LoopState, ended: dict[int, int]) -> dict[int, DecodedRow]:
    """What was decoded in the given slots (slot → row)."""
    tokens_BS, acceptance_BS, verified_BS, lengths_B, rounds_B, stopped_B = jax.device_get(
        (state.tokens, state.acceptance, state.verified, state.lengths, state.rounds, state.stopped)
    )
    return {
        row: DecodedRow(
            tokens_BS[slot, len(request.prompts[row]) : lengths_B[slot]].tolist(),
            acceptance_BS[slot, : rounds_B[slot]].tolist(),
            verified_BS[slot, : rounds_B[slot]].tolist(),
            bool(stopped_B[slot]),
        )
        for slot, row in ended.items()
    }


def _fill(
    request: Request, state: LoopState | None, slots: list[int | None], waiting: collections.deque[int]
) -> LoopState:
    """Gives waiting rows to empty slots, and returns the state that holds them."""
    if state is None:
        slots[:] = [waiting.popleft() if waiting else None for _ in slots]
        return start(request, [row for row in slots if row is not None], len(slots))[0]
    filled: LoopState = state
    for slot, row in enumerate(slots):
        if row is None and waiting:
            slots[slot] = new = waiting.popleft()
            prefilled = start(request, [new], 1)[0]
            with on_mesh(request.mesh):
                filled = replace_row(filled, prefilled, jnp.int32(slot))
    return filled

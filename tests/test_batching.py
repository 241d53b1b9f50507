"""Continuous batching: slots are refilled one by one, and nothing about a row's result says so."""

import dataclasses
import functools
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import random_drafter, random_prompts, random_target

from dflash_jax.decoding.generate import generate
from dflash_jax.decoding.loop import prefill, replace_row, run_rounds

W = 4
LONGEST = 2 * W + 1
TARGET = random_target()
DRAFTER = random_drafter(TARGET.config, block_size=W)
PROMPTS = random_prompts([3, 30, 1, 7, 5, 20, 2])
ALL = range(len(PROMPTS))


@functools.cache
def alone(row: int) -> list[int]:
    """What the row says by itself, without a drafter."""
    return generate(TARGET, [PROMPTS[row]], max_new_tokens=LONGEST, stop_token_ids=[])[0].tokens


@functools.cache
def stops() -> list[int]:
    """Tokens that end four of the rows after one, three, six and four tokens, or sooner. One set: each is compiled."""
    return [alone(row)[place] for row, place in ((0, 0), (1, 2), (3, 5), (5, 3))]


def wanted(row: int, budget: int = LONGEST) -> list[int]:
    text = alone(row)[:budget]
    return text[: next((i + 1 for i, token in enumerate(text) if token in stops()), budget)]


def decode(rows, drafter=DRAFTER, *, size: int, budget: int = LONGEST, **options):
    prompts = [PROMPTS[row] for row in rows]
    options = {"drafter": drafter, "max_new_tokens": budget, "stop_token_ids": stops(), "batch_size": size} | options
    return generate(TARGET, prompts, **options)


def test_refilled_slots_give_every_row_what_it_gets_alone():
    assert {len(wanted(row)) for row in ALL} >= {1, LONGEST}
    results = decode(ALL, size=2)
    assert [result.tokens for result in results] == [wanted(row) for row in ALL]
    for prompt, result in zip(PROMPTS, results, strict=True):
        assert result.prompt_length == len(prompt)
        assert sum(result.acceptance_lengths) == len(result.tokens) - 1
        assert result.finish_reason == ("stop" if result.tokens[-1] in stops() else "length")


def test_a_hundred_greedy_tokens_of_a_row_are_those_it_gets_alone():
    """With the drafter in slots that are refilled, and without it one by one."""
    options = {"max_new_tokens": 100, "stop_token_ids": []}
    results = generate(TARGET, PROMPTS, drafter=DRAFTER, batch_size=3, **options)
    assert [len(result.tokens) for result in results] == [100] * len(PROMPTS)
    for prompt, result in zip(PROMPTS, results, strict=True):
        assert result.tokens == generate(TARGET, [prompt], **options)[0].tokens


def test_a_slot_does_not_wait_for_its_neighbours():
    """The number of rounds is that of a schedule in which each prompt takes the slot that comes free first."""
    results = decode(ALL, size=2)
    rounds = [len(result.acceptance_lengths) for result in results]
    slots = [0, 0]
    for needed in rounds:
        slots[slots.index(min(slots))] += needed
    assert results[0].stats.batch_rounds == max(slots)
    assert max(slots) < sum(max(rounds[first : first + 2]) for first in range(0, len(rounds), 2))


def test_more_prompts_compile_nothing_new():
    decode([0, 3, 4, 6, 5], size=3)
    before = [function._cache_size() for function in (prefill, replace_row, run_rounds)]
    decode([*ALL, *ALL], size=3)
    assert [function._cache_size() for function in (prefill, replace_row, run_rounds)] == before


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    rows=st.lists(st.sampled_from(ALL), min_size=1, max_size=6),
    budget=st.integers(0, LONGEST),
    stopping=st.booleans(),
    width=st.sampled_from([2, W, "adaptive"]),
    size=st.integers(1, 3),
)
def test_any_prompts_budget_stops_width_and_batch_size(rows, budget, stopping, width, size):
    chosen = {} if stopping else {"stop_token_ids": []}
    results = decode(rows, size=size, budget=budget, width=width, **chosen)
    texts = [wanted(row, budget) if stopping else alone(row)[:budget] for row in rows]
    assert [result.tokens for result in results] == texts
    assert [sum(r.acceptance_lengths) for r in results] == [max(0, len(r.tokens) - 1) for r in results]


def test_a_bar_counts_finished_prompts(capsys):
    decode(ALL, size=2, progress=True)
    assert f"{len(PROMPTS)}/{len(PROMPTS)}" in capsys.readouterr().err
    decode(ALL, size=2, progress="plain")
    assert (said := capsys.readouterr().err).strip().startswith("plain: ") and f"{len(PROMPTS)}/{len(PROMPTS)}" in said
    decode(ALL, size=2)
    assert not capsys.readouterr().err
    with pytest.raises(ValueError, match="progress=3 must be True, False, a label or a function"):
        decode(ALL, size=2, progress=3)


def test_one_warning_past_the_length_that_the_drafter_was_made_for():
    drafter = dataclasses.replace(DRAFTER, config=dataclasses.replace(DRAFTER.config, max_position_embeddings=32))
    with pytest.warns(UserWarning, match=r"may reach 33 tokens.* made for 32 \(max_position_embeddings\)") as seen:
        results = decode(ALL, drafter, size=2, budget=3)
    assert len(seen) == 1
    assert [result.tokens for result in results] == [wanted(row, 3) for row in ALL]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        decode(ALL, drafter, size=2, budget=2)

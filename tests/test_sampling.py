"""Sampling: speculative decoding draws from the target's own distribution, and one seed gives one text."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from exact_sampling import DRAFTER, DRAWS, PROMPT, SMALLEST_P, TARGET, V, drawn_counts, exact_joint, p_value
from small_models import random_prompts, rigged, script

from dflash_jax.decoding.acceptance import accepted_tokens, cut_at_stop
from dflash_jax.decoding.generate import generate
from dflash_jax.decoding.sampling import Sampling, choose, row_keys


def test_the_exact_distribution_is_worth_testing():
    for temperature in (1.0, 0.7):
        joint = exact_joint(temperature)
        assert joint.sum() == pytest.approx(1.0, abs=1e-5)
        assert joint.max() < 0.5
        # the third token depends on the second: independent draws from the marginals would be seen
        pair = joint.sum(0)
        independent = pair.sum(1, keepdims=True) * pair.sum(0, keepdims=True)
        assert np.abs(pair - independent).max() > 0.02


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_drawn_tokens_follow_the_exact_joint_distribution(temperature):
    """The first token comes from prefill; the other two from one round, or from two where a proposal is refused."""
    counts, results = drawn_counts(DRAFTER, temperature, seed=1)
    pairs = counts.sum(0)
    assert p_value(pairs, exact_joint(temperature).sum(0)) > SMALLEST_P
    assert p_value(counts, exact_joint(temperature)) > SMALLEST_P
    rounds = np.bincount([len(result.acceptance_lengths) for result in results], minlength=3)
    assert rounds[1] > DRAWS / 20, "no proposal was accepted"
    assert rounds[2] > DRAWS / 20, "no proposal was refused"
    # The test can tell: the same counts do not fit another temperature.
    assert p_value(counts, exact_joint(1.7 - temperature)) < 1e-9


def test_accepted_and_refused_rounds_together_are_unbiased_for_any_proposal():
    """A drafter that proposes one and the same token always: its acceptance rate is that token's probability."""
    for token in (0, 4):
        rows = script([PROMPT], [[token] * 9]).repeat(DRAWS, axis=0)
        counts, results = drawn_counts(rigged(rows, 3, width=4, vocab_size=V), 1.0, seed=2)
        assert p_value(counts, exact_joint(1.0)) > SMALLEST_P
        accepted = np.mean([result.acceptance_lengths[0] > 1 for result in results])
        wanted = exact_joint(1.0).sum(0)[token].sum()
        assert accepted == pytest.approx(wanted, abs=4 * np.sqrt(wanted * (1 - wanted) / DRAWS))


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
def test_one_seed_gives_one_text_with_and_without_a_drafter(temperature):
    prompts = random_prompts([1, 4, 9, 3], vocab_size=V)
    options = {"max_new_tokens": 30, "temperature": temperature, "seed": 11}
    plain = generate(TARGET, prompts, **options)
    drafted = generate(TARGET, prompts, drafter=DRAFTER, **options)
    assert [result.tokens for result in drafted] == [result.tokens for result in plain]
    assert sum(len(result.acceptance_lengths) for result in drafted) < sum(len(r.acceptance_lengths) for r in plain)


def test_seeds_and_rows_differ_and_temperature_zero_has_no_seed():
    sampled = [generate(TARGET, [PROMPT] * 4, max_new_tokens=30, temperature=1.0, seed=seed) for seed in (0, 1)]
    assert len({tuple(result.tokens) for results in sampled for result in results}) == 8
    greedy = [generate(TARGET, [PROMPT] * 4, max_new_tokens=30, seed=seed) for seed in (0, 1)]
    assert len({tuple(result.tokens) for results in greedy for result in results}) == 1


# The pieces.


def rows_at(temperature: float, keys_B) -> Sampling:
    zeros_B = jnp.zeros(keys_B.shape)
    return Sampling(keys_B, zeros_B + temperature, zeros_B.astype(int), zeros_B + 1)


def test_a_choice_depends_on_row_and_position_only():
    logits_BWV = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 50)), jnp.float32)
    keys_B, positions_BW = row_keys([4, 9], 2), jnp.array([[5, 6, 7], [1, 2, 3]])
    together_BW = choose(logits_BWV, rows_at(1.0, keys_B), positions_BW, truncate=False)
    for row, slot in itertools.product(range(2), range(3)):
        cut = slice(row, row + 1), slice(slot, slot + 1)
        alone = choose(logits_BWV[cut], rows_at(1.0, keys_B[cut[0]]), positions_BW[cut], truncate=False)
        assert alone.item() == together_BW[row, slot]


def test_a_low_temperature_is_greedy():
    logits_BWV = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 50)), jnp.float32)
    for temperature in (0.0, 1e-4):
        rows = rows_at(temperature, row_keys(0, 2))
        chosen_BW = choose(logits_BWV, rows, jnp.arange(6).reshape(2, 3), truncate=False)
        np.testing.assert_array_equal(chosen_BW, logits_BWV.argmax(-1))


def test_accepted_are_the_leading_matches_and_one():
    chosen_BW = jnp.array([[1, 2, 3, 4]] * 5)
    proposed_BV = jnp.array([[1, 2, 3], [1, 2, 9], [1, 9, 3], [9, 2, 3], [9, 9, 9]])
    assert accepted_tokens(proposed_BV, chosen_BW).tolist() == [4, 3, 2, 1, 1]
    assert accepted_tokens(jnp.zeros((2, 0), int), jnp.ones((2, 1), int)).tolist() == [1, 1]


def test_stop_tokens_count_only_among_what_was_accepted():
    chosen_BW = jnp.array([[7, 2, 3, 4], [1, 2, 7, 7], [1, 2, 7, 4], [1, 2, 3, 4]])
    counts_B, stopped_B = cut_at_stop(chosen_BW, jnp.array([4, 4, 2, 3]), (6, 7))
    assert counts_B.tolist() == [1, 3, 2, 3]
    assert stopped_B.tolist() == [True, True, False, False]
    counts_B, stopped_B = cut_at_stop(chosen_BW, jnp.array([4, 4, 2, 3]), ())
    assert counts_B.tolist() == [4, 4, 2, 3]
    assert not stopped_B.any()

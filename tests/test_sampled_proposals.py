"""Top-k, top-p and sampled proposals: the target's distribution exactly, whatever the drafter draws from."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact_sampling import DRAFTER, PROMPT, SMALLEST_P, TARGET, V, counted, draw_many, exact_joint, nucleus, p_value
from small_models import RiggedDrafter, random_drafter, random_prompts, script, scripted

from dflash_jax.checkpoints.huggingface import LoadedDrafter
from dflash_jax.decoding.acceptance import rejection_sample
from dflash_jax.decoding.generate import generate
from dflash_jax.decoding.nucleus import keep_top
from dflash_jax.decoding.sampling import Purpose, Sampling, draw, log_distribution, row_keys

# temperature, top_k, top_p
SETTINGS = [(1.0, None, None), (0.7, None, None), (1.0, None, 0.8), (1.0, 3, None), (0.7, 3, 0.8)]
PROMPTS = random_prompts([2, 5, 3, 5, 4], vocab_size=V)  # one number of rows, for one set of programs
FORCE = {
    forced: lambda logits_BV, tokens_BS, lengths_B, forced=forced: logits_BV.at[:, 3].set(forced)
    for forced in (2e9, 1e12, 3e38)
}


def sampling_of(temperature: float, top_p: float | None) -> Sampling:
    """Of one row."""
    values = jnp.float32([temperature]), jnp.int32([0]), jnp.float32([1 if top_p is None else top_p])
    return Sampling(row_keys(0, 1), *values)


@pytest.mark.parametrize("forced", [2e9, 1e12, 3e38])
@pytest.mark.parametrize("top_p", [None, 0.9])
def test_a_huge_logit_is_certain(forced, top_p):
    """As a hook may set one; at a temperature that takes it beyond float32, too."""
    logits_1WV = jnp.full((1, 2, V), -1.5).at[:, :, 3].set(forced)
    for temperature in (1e-6, 0.1, 0.7, 1.0, 3.0):
        sampling = sampling_of(temperature, top_p)
        log_probs_1WV = jax.jit(log_distribution, static_argnames="truncate")(logits_1WV, sampling, truncate=True)
        np.testing.assert_array_equal(np.exp(log_probs_1WV[0]), np.eye(V)[[3, 3]])
    for proposals in ("argmax", "sampled"):
        options = {"temperature": 0.7, "proposals": proposals, "logits_processor": FORCE[forced], "top_p": top_p}
        (result,) = generate(TARGET, [PROMPT], drafter=DRAFTER, max_new_tokens=5, **options)
        assert result.tokens == [3] * 5


@pytest.mark.parametrize("proposals", ["argmax", "sampled"])
def test_drawn_tokens_follow_the_exact_joint_distribution(proposals):
    """Rows of all settings share one batch. p_value is 0 if a single draw leaves the nucleus."""
    draws = 1500
    rows = {
        name: [value for value in values for _ in range(draws)]
        for name, values in zip(("temperature", "top_k", "top_p"), zip(*SETTINGS, strict=True), strict=True)
    }
    results = draw_many(draws * len(SETTINGS), DRAFTER, seed=3, proposals=proposals, **rows)
    for index, (temperature, top_k, top_p) in enumerate(SETTINGS):
        of_setting = results[index * draws : (index + 1) * draws]
        counts, exact = counted(of_setting), exact_joint(temperature, top_k, top_p)
        assert p_value(counts.sum(0), exact.sum(0)) > SMALLEST_P
        assert p_value(counts, exact) > SMALLEST_P
        rounds = np.bincount([len(result.acceptance_lengths) for result in of_setting], minlength=3)
        assert rounds[1] > draws / 20, "no proposal was accepted"
        assert rounds[2] > draws / 20, "no proposal was refused"
        if top_k or top_p:
            assert (exact == 0).sum() > 10  # there was something to leave out …
            assert p_value(exact_joint(temperature) * draws, exact) == 0  # … and the test would see it


def test_mixed_rows_each_follow_their_own_settings():
    """Greedy and sampled rows of one batch, and a sampled row that no neighbour's nucleus reaches."""
    rows = {
        "temperature": [0.0, 1.0, 0.7, 0.0, 1.3],
        "top_k": [2, None, 3, None, 0],
        "top_p": [0.5, 0.8, 1.0, None, None],
        "seed": [1, 2, 3, 4, 5],
    }
    for options in ({"drafter": DRAFTER}, {"drafter": DRAFTER, "proposals": "sampled"}):
        together = generate(TARGET, PROMPTS, max_new_tokens=20, **rows, **options)
        order = [3, 1, 4, 0, 2]
        permuted_rows = {name: [values[row] for row in order] for name, values in rows.items()}
        permuted = generate(TARGET, [PROMPTS[row] for row in order], max_new_tokens=20, **permuted_rows, **options)
        assert permuted == [together[row] for row in order]
        greedy = generate(TARGET, PROMPTS, max_new_tokens=20)
        assert [together[row].tokens for row in (0, 3)] == [greedy[row].tokens for row in (0, 3)]
        refilled = generate(TARGET, PROMPTS, max_new_tokens=20, batch_size=2, **rows, **options)
        assert refilled == together


def test_truncated_sampling_gives_one_text_with_and_without_a_drafter():
    options = {"max_new_tokens": 30, "temperature": 1.0, "top_k": 3, "top_p": 0.8, "seed": 11}
    plain, drafted = (generate(TARGET, PROMPTS, drafter=drafter, **options) for drafter in (None, DRAFTER))
    assert [result.tokens for result in drafted] == [result.tokens for result in plain]
    whole = generate(TARGET, PROMPTS, max_new_tokens=30, temperature=1.0, seed=11)
    assert [result.tokens for result in whole] != [result.tokens for result in plain]


def test_top_k_1_is_greedy():
    options = {"drafter": DRAFTER, "max_new_tokens": 12}
    greedy = generate(TARGET, PROMPTS, **options)
    for proposals in ("argmax", "sampled"):
        assert generate(TARGET, PROMPTS, temperature=2.0, top_k=1, proposals=proposals, **options) == greedy


@jax.tree_util.register_pytree_node_class
class DrawnDrafter(RiggedDrafter):
    """Draws the tokens that a RiggedDrafter proposes, near temperature 0 with certainty."""

    def propose(self, target, cache, anchor_B, position_B, draw, *, width: int):
        tokens_BV = super().propose(target, cache, anchor_B, position_B, draw, width=width).tokens
        return draw(jax.nn.one_hot(tokens_BV, self.vocab_size), position_B[:, None] + jnp.arange(1, width))


@pytest.mark.parametrize("right", [0, 2, 3])
def test_a_stop_token_ends_the_text_wherever_in_a_drawn_block_it_falls(right):
    """Row k stops at its k-th token. What was accepted behind a stop token is dropped."""
    W, stop = 4, 7
    places = range(2 * W + 2)
    prompts, answers = [[1 + place] for place in places], [[20 + i for i in range(30)] for _ in places]
    for place, answer in zip(places, answers, strict=True):
        answer[place] = answer[place + 2] = stop
    rows = script(prompts, answers)
    drafter = LoadedDrafter(DrawnDrafter(rows, jnp.int32(right), W), None, "a drafter that draws")
    options = {"max_new_tokens": 20, "temperature": 0.01, "proposals": "sampled"}
    results = generate(scripted(rows, stop_token_ids=(stop,)), prompts, drafter=drafter, **options)
    for place, answer, result in zip(places, answers, results, strict=True):
        assert (result.tokens, result.finish_reason) == (answer[: place + 1], "stop")
        assert result.acceptance_lengths[:-1] == [right + 1] * (len(result.acceptance_lengths) - 1)
        assert sum(result.acceptance_lengths) == place


def test_a_drawn_mask_token_is_kept_when_the_target_says_it():
    greedy = [result.tokens for result in generate(TARGET, PROMPTS, max_new_tokens=30)]
    said = max(set(greedy[0]), key=greedy[0].count)
    drafter = random_drafter(TARGET.config, target_layer_ids=(0,), num_layers=1, mask_token_id=said)
    options = {"max_new_tokens": 30, "temperature": 2.0, "top_k": 1, "proposals": "sampled"}
    results = generate(TARGET, PROMPTS, drafter=drafter, **options)
    assert [result.tokens for result in results] == greedy
    assert max(max(result.acceptance_lengths) for result in results) > 1


# The pieces.


def test_what_is_kept_is_what_the_definition_keeps():
    rng = np.random.default_rng(0)
    logits_BWV = rng.normal(size=(8, 4, V)).astype(np.float32) * 2
    logits_BWV[:, 0] = np.round(logits_BWV[:, 0])  # equal logits: the lower id goes first
    top_k_B, top_p_B = np.array([0, 1, 2, 3, 5, 9, 3, 0]), np.array([1.0, 1.0, 0.5, 0.8, 0.3, 0.9, 1e-6, 0.999])
    kept_BWV = np.asarray(keep_top(jnp.asarray(logits_BWV), jnp.asarray(top_k_B), jnp.asarray(top_p_B, jnp.float32)))
    probs_BWV = np.asarray(jax.nn.softmax(jnp.asarray(logits_BWV)), np.float64)
    for row, slot in itertools.product(range(8), range(4)):
        wanted = nucleus(probs_BWV[row, slot], top_k_B[row], top_p_B[row]) > 0
        np.testing.assert_array_equal(np.isfinite(kept_BWV[row, slot]), wanted)
        np.testing.assert_array_equal(kept_BWV[row, slot][wanted], logits_BWV[row, slot][wanted])


def test_top_p_1_keeps_tokens_that_a_rounded_sum_would_lose():
    logits_BWV = jnp.zeros((1, 1, 4)).at[0, 0].set(jnp.array([0.0, -20.0, -40.0, -60.0]))
    all_B = jnp.zeros((1,), jnp.int32)
    np.testing.assert_array_equal(keep_top(logits_BWV, all_B, jnp.ones((1,))), logits_BWV)


def test_rejection_sampling_is_exact_for_any_pair_of_distributions():
    """One slot: q puts mass where p has none and the other way round. Acceptance is Σ min(p, q)."""
    p, q = np.array([0.5, 0.3, 0.2, 0.0]), np.array([0.1, 0.2, 0.3, 0.4])
    B = 20_000
    keys_B, positions_BW = row_keys(5, B), jnp.tile(jnp.array([[7, 8]]), (B, 1))
    q_BVV = jnp.broadcast_to(jnp.log(q), (B, 1, 4))
    p_BWV = jnp.broadcast_to(jnp.log(jnp.stack([p, p[::-1]])), (B, 2, 4))
    proposed_BV = draw(q_BVV, keys_B, positions_BW[:, :1], Purpose.PROPOSE)
    tokens_BW, counts_B = map(np.asarray, rejection_sample(proposed_BV, q_BVV, p_BWV, keys_B, positions_BW))
    assert p_value(np.bincount(tokens_BW[:, 0], minlength=4), p) > SMALLEST_P
    accepted = counts_B == 2
    wanted = np.minimum(p, q).sum()
    assert accepted.mean() == pytest.approx(wanted, abs=4 * np.sqrt(wanted * (1 - wanted) / B))
    assert p_value(np.bincount(tokens_BW[accepted, 1], minlength=4), p[::-1]) > SMALLEST_P


def test_equal_distributions_accept_everything():
    rng = np.random.default_rng(1)
    B = 500
    keys_B, positions_BW = row_keys(2, B), jnp.tile(jnp.arange(4)[None], (B, 1))
    p_BWV = jax.nn.log_softmax(jnp.asarray(rng.normal(size=(B, 4, V)), jnp.float32))
    proposed_BV = draw(p_BWV[:, :-1], keys_B, positions_BW[:, :-1], Purpose.PROPOSE)
    tokens_BW, counts_B = rejection_sample(proposed_BV, p_BWV[:, :-1], p_BWV, keys_B, positions_BW)
    assert (counts_B == 4).all()
    np.testing.assert_array_equal(tokens_BW[:, :-1], proposed_BV)


def test_the_distribution_of_a_greedy_row_is_its_argmax():
    logits_BWV = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, V)), jnp.float32)
    rows = Sampling(row_keys(0, 2), jnp.array([0.0, 1.0]), jnp.zeros(2, jnp.int32), jnp.ones(2))
    probs_BWV = np.exp(log_distribution(logits_BWV, rows, truncate=True))
    np.testing.assert_array_equal(probs_BWV[0], np.eye(V)[np.asarray(logits_BWV[0].argmax(-1))])
    np.testing.assert_allclose(probs_BWV[1], jax.nn.softmax(logits_BWV[1]), rtol=1e-6)  # float32 rounding


def test_greedy_and_untruncated_programs_sort_nothing():
    rows = Sampling(row_keys(0, 1), jnp.ones(1), jnp.zeros(1, jnp.int32), jnp.ones(1))
    logits_BWV = jnp.zeros((1, 2, V))
    programs = {
        truncate: jax.jit(log_distribution, static_argnames="truncate").lower(logits_BWV, rows, truncate=truncate)
        for truncate in (False, True)
    }
    assert "stablehlo.sort" in programs[True].as_text()
    assert "stablehlo.sort" not in programs[False].as_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": -1}, "top_k=-1"),
        ({"top_k": 2.5}, "top_k=2.5"),
        ({"top_p": 0.0}, r"top_p=0\.0"),
        ({"top_p": 1.5}, r"top_p=1\.5"),
        ({"temperature": [0.0, -1.0]}, r"temperature=-1\.0"),
        ({"temperature": float("inf")}, "temperature=inf"),
        ({"temperature": [1.0]}, "temperature lists 1 values for 2 prompts"),
        ({"top_k": [1, 2, 3]}, "top_k lists 3 values for 2 prompts"),
        ({"seed": [1, 2**32]}, "seed=4294967296"),
        ({"proposals": "tree"}, "proposals='tree'"),
        ({"logits_processor": 3}, "logits_processor=3"),
    ],
)
def test_errors_name_the_option(options, message):
    with pytest.raises(ValueError, match=message):
        generate(TARGET, [PROMPT, PROMPT], max_new_tokens=2, **options)


def test_an_option_that_does_not_exist_is_named():
    with pytest.raises(TypeError, match="repetition_penalty"):
        generate(TARGET, [PROMPT], repetition_penalty=1.1)

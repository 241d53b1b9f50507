"""The hook on the logits: one function at every slot, so that speculative decoding is autoregressive decoding."""

import jax.numpy as jnp
import pytest
from small_models import random_drafter, random_prompts, random_target, rigged, script

from dflash_jax.decoding.generate import generate

V, W = 61, 4
TARGET = random_target()
DRAFTER = random_drafter(TARGET.config, block_size=W)
PROMPTS = random_prompts([1, 5, 12, 40])
BUDGET = 18


def never_twice(logits_BV, tokens_BS, lengths_B):
    """Bans every token that a row holds already. A scatter drops V, which fills the slots behind the tokens."""
    rows_B1 = jnp.arange(logits_BV.shape[0])[:, None]
    return logits_BV.at[rows_B1, tokens_BS].set(-jnp.inf)


def by_length(logits_BV, tokens_BS, lengths_B):
    """Prefers the token of a row's length, so that a slot that is told a wrong length shows."""
    return logits_BV.at[jnp.arange(logits_BV.shape[0]), lengths_B % V].add(1e4)


def texts(results) -> list[list[int]]:
    return [result.tokens for result in results]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_ban_on_repetition_holds_at_every_slot_of_a_block(temperature):
    options = {"max_new_tokens": BUDGET, "temperature": temperature, "logits_processor": never_twice}
    plain = texts(generate(TARGET, PROMPTS, **options))
    for prompt, text in zip(PROMPTS, plain, strict=True):
        assert len(set(text)) == BUDGET
        assert not set(text) & set(prompt)
    assert texts(generate(TARGET, PROMPTS, drafter=DRAFTER, **options)) == plain
    # a perfect drafter: every slot of every block is kept, each judged behind the drafted tokens before it
    drafted = generate(TARGET, PROMPTS, drafter=rigged(script(PROMPTS, plain), W - 1, W), **options)
    assert texts(drafted) == plain
    assert drafted[0].acceptance_lengths[:-1] == [W] * ((BUDGET - 1) // W)
    sampled = generate(TARGET, PROMPTS, drafter=DRAFTER, proposals="sampled", **options)
    assert all(len(set(result.tokens)) == BUDGET for result in sampled)


@pytest.mark.parametrize("right", [0, 2, W - 1])
def test_each_slot_is_told_how_many_tokens_it_has_before_it(right):
    wanted = [[(len(prompt) + i) % V for i in range(BUDGET)] for prompt in PROMPTS]
    drafter = rigged(script(PROMPTS, wanted), right, W)
    options = {"max_new_tokens": BUDGET, "logits_processor": by_length}
    assert texts(generate(TARGET, PROMPTS, drafter=drafter, **options)) == wanted


def test_one_banned_token_is_never_said():
    plain = texts(generate(TARGET, PROMPTS, max_new_tokens=BUDGET))
    banned = plain[0][3]

    def ban(logits_BV, tokens_BS, lengths_B):
        return logits_BV.at[:, banned].set(-jnp.inf)

    results = texts(generate(TARGET, PROMPTS, drafter=DRAFTER, max_new_tokens=BUDGET, logits_processor=ban))
    assert all(banned not in text for text in results)
    assert results[0][:3] == plain[0][:3]


def test_a_result_made_of_constants_is_taken():
    """JAX gives such an array a weak type."""

    def only_three(logits_BV, tokens_BS, lengths_B):
        return jnp.broadcast_to(jnp.where(jnp.arange(V) == 3, 0.0, -jnp.inf), logits_BV.shape)

    (result,) = generate(TARGET, [[1]], max_new_tokens=4, logits_processor=only_three)
    assert result.tokens == [3] * 4


def test_a_callable_without_a_hash_is_an_error():
    class Ban:
        __hash__ = None

        def __call__(self, logits_BV, tokens_BS, lengths_B):
            return logits_BV

    for wrong in (Ban(), 3):
        with pytest.raises(ValueError, match=r"logits_processor=.* must be None, or a function or callable that has"):
            generate(TARGET, [[1]], max_new_tokens=4, logits_processor=wrong)


def test_no_result_is_an_error():
    with pytest.raises(ValueError, match="logits_processor returned a NoneType; it must return an array"):
        generate(TARGET, [[1]], max_new_tokens=2, logits_processor=lambda logits, tokens, lengths: None)


def test_a_result_of_another_shape_is_an_error():
    with pytest.raises(ValueError, match=r"logits_processor returned float32\[1\]; .* float32\[1,61\]"):
        generate(TARGET, [[1]], max_new_tokens=2, logits_processor=lambda logits, tokens, lengths: logits[:, 0])

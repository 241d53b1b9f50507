"""In the loop a drafter proposes what its packed training pass would, whatever its windows and masks.

That the text is right says nothing of this: wrong proposals only cost speed. So accepted counts are compared with
those that the training pass predicts, in a small vocabulary where an untrained drafter is right now and then.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import random_drafter, random_prompts, random_target
from test_drafter_mask import KINDS

from dflash_jax.decoding.generate import generate

V, W = 9, 6
TARGET = random_target(vocab_size=V)
PROMPTS = random_prompts([3, 25, 1, 12, 8], vocab_size=V - 1)
BUDGET = 40


@jax.jit
def proposals(drafter, tokens_T: jax.Array) -> jax.Array:
    """What the packed pass proposes behind every position: int32 [T, W−1]."""
    T, c = len(tokens_T), drafter.config
    positions_1T = jnp.arange(T)[None]
    _, taps_1TMD, _ = TARGET.model.forward(tokens_T[None], positions_1T, taps=drafter.tap_layers)
    masks_TV = jnp.full((T, W - 1), c.mask_token_id)
    embedded_1TWD = TARGET.model.embed(jnp.concatenate([tokens_T[:, None], masks_TV], axis=1))[None]
    starts_1T = jnp.zeros((1, T), jnp.int32)
    hidden_1TWD = drafter.packed(embedded_1TWD, drafter.fuse(taps_1TMD), starts_1T, positions_1T)
    return jnp.argmax(TARGET.model.logits(hidden_1TWD[0, :, 1:]), axis=-1)


def predicted(drafter, prompt: list[int], answer: list[int]) -> list[int]:
    """Tokens that each round gives."""
    text = prompt + answer
    proposed_TV = np.asarray(proposals(drafter, jnp.asarray(text, jnp.int32)))
    length, counts = len(prompt) + 1, []
    while length < len(text):
        right = 0
        for token, wanted in zip(proposed_TV[length - 1], text[length:], strict=False):
            if token != wanted:
                break
            right += 1
        counts.append(min(right + 1, len(text) - length))
        length += counts[-1]
    return counts


@pytest.mark.parametrize("kind", KINDS)
def test_rounds_accept_what_the_training_pass_predicts(kind):
    """Two slots for five rows, so that rows are put into slots whose windows are full of others."""
    drafter = random_drafter(TARGET.config, block_size=W, **KINDS[kind])
    rows = generate(TARGET, PROMPTS, drafter=drafter, max_new_tokens=BUDGET, batch_size=2)
    counts = [row.acceptance_lengths for row in rows]
    assert counts == [predicted(drafter.model, prompt, row.tokens) for prompt, row in zip(PROMPTS, rows, strict=True)]
    assert len({count for row in counts for count in row}) > 2 and all(len(row.tokens) == BUDGET for row in rows)

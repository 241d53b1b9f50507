"""A target of five tokens whose every continuation can be enumerated, and the chi-square against it."""

import functools
import itertools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import scipy.stats
from small_models import random_drafter, random_target

from dflash_jax.decoding import request
from dflash_jax.decoding.generate import generate

V = 5
# Its logits are spread so that a token has between 1 % and 86 %: neither uniform nor certain.
TARGET = random_target(factor=14.0, vocab_size=V, num_layers=2, hidden_size=16)
DRAFTER = random_drafter(TARGET.config, target_layer_ids=(0,), num_layers=1)
PROMPT = [3, 0, 1]
DRAWS = 4000
# Seeds are fixed, so these tests can't flicker; a distribution that is slightly off falls far below.
SMALLEST_P = 1e-3


def nucleus(probabilities: np.ndarray, top_k: int | None, top_p: float | None) -> np.ndarray:
    """Top-k, then top-p of what is left, by the book: likeliest first until the mass is reached."""
    order = sorted(range(V), key=lambda token: -probabilities[token])[: top_k or V]
    kept, mass = np.zeros(V), 0.0
    total = sum(probabilities[token] for token in order)
    for token in order:
        if mass < (top_p or 1.0):
            kept[token] = probabilities[token]
            mass += probabilities[token] / total
    return kept / kept.sum()


@functools.cache
def exact_joint(temperature: float, top_k: int | None = None, top_p: float | None = None) -> np.ndarray:
    """The target's probability of every continuation of PROMPT by three tokens, [V, V, V], by a pass over each."""
    continuations = list(itertools.product(range(V), repeat=3))
    tokens_BT = jnp.asarray([PROMPT + list(continuation) for continuation in continuations])
    positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
    hidden_BTD, _, _ = jax.jit(TARGET.model.forward)(tokens_BT, positions_BT)
    probs_BTV = jax.nn.softmax(TARGET.model.logits(hidden_BTD) / temperature)[:, len(PROMPT) - 1 : -1]
    probs_BTV = np.apply_along_axis(nucleus, 2, np.asarray(probs_BTV, np.float64), top_k, top_p)
    chosen_BT = np.take_along_axis(probs_BTV, np.asarray(tokens_BT)[:, len(PROMPT) :, None], axis=2)[..., 0]
    return chosen_BT.prod(1).reshape(V, V, V)


def drawn_counts(drafter, temperature: float, seed: int) -> tuple[np.ndarray, list]:
    """How often each continuation was drawn, [V, V, V], and the results."""
    results = draw_many(DRAWS, drafter, temperature=temperature, seed=seed)
    return counted(results), results


def draw_many(draws: int, drafter, **options) -> list:
    """So many texts of three tokens behind PROMPT, which is padded to four tokens: thousands of rows feel 32."""
    with mock.patch.object(request, "SHORTEST_PROMPT_BUCKET", 4):
        return generate(TARGET, [PROMPT] * draws, drafter=drafter, max_new_tokens=3, **options)


def counted(results) -> np.ndarray:
    """How often each text of three tokens came, [V, V, V]."""
    counts = np.zeros((V, V, V), int)
    for result in results:
        counts[tuple(result.tokens)] += 1
    return counts


def p_value(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """Chi-square, with cells of fewer than five expected draws taken together; 0 if something impossible was drawn."""
    if counts[probabilities == 0].any():
        return 0.0
    possible = probabilities > 0
    expected = probabilities[possible] / probabilities.sum() * counts.sum()
    seen, rare = counts[possible], expected < 5
    pooled = [np.append(x[~rare], x[rare].sum()) if rare.any() else x for x in (seen, expected)]
    return scipy.stats.chisquare(*pooled).pvalue

"""Benchmark cells measured on scripted models, with drafters that are right for so many slots."""

import numpy as np
from small_models import rigged, script, scripted

from dflash_jax.evaluation import benchmark
from dflash_jax.evaluation.benchmark_config import DecodingConfig
from dflash_jax.evaluation.benchmark_results import PromptSet, Results

PROMPTS = [[1, 2, 3], [4, 5], [6]]
ANSWERS = np.random.default_rng(0).integers(1, 60, (3, 40)).tolist()
DECODING = DecodingConfig(max_new_tokens=25, repetitions=1)


def measured(right: int):
    """A cell at batch 1 with a drafter whose first `right` proposals of four are right. 24 tokens follow the first."""
    results = []
    for prompt, answer in zip(PROMPTS, ANSWERS, strict=True):
        script_BS = script([prompt], [answer])
        target, drafter = scripted(script_BS), rigged(script_BS, right, 5)
        results += benchmark.measure(target, drafter, "scripted", [prompt], [5], 0.0, 1, DECODING)
    return results


def results_of(cell) -> Results:
    settings = {
        "models": {"target": "t", "drafter": "d", "target_dtype": "float32", "drafter_dtype": "float32"},
        "decoding": {"max_new_tokens": 25, "seed": 0, "proposals": "argmax", "repetitions": 1},
    }
    part = PromptSet("scripted", 1, 3, 3.0, 3, "")
    return Results(settings, "cpu", "cpu", "0", "default", "", 5, 61, None, {}, None, [part], [cell])

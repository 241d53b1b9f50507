"""Decodes in a process of its own and prints, as JSON, the tokens of the last call and what had to be compiled.

python tests/fresh_process.py short | long_then_short | lengths | memory

memory prints instead, for each width, live arrays and blocks of Python's heap before and after fifty calls.
"""

import gc
import json
import sys

import conftest  # noqa: F401  the settings of the tests
import jax
from small_models import random_drafter, random_prompts, random_target

from dflash_jax.decoding.generate import generate

LENGTHS = range(1, 41)


def models():
    target = random_target(num_layers=2)
    drafter = random_drafter(target.config, target_layer_ids=(0,), num_layers=1, layer_types=("full_attention",))
    return target, drafter


def memory() -> None:
    target, drafter = models()
    prompts = random_prompts([3, 7, 5])

    def held_after(calls: int, width) -> tuple[int, int]:
        for _ in range(calls):
            generate(target, prompts, drafter=drafter, width=width, max_new_tokens=12, batch_size=2)
        gc.collect()
        return len(jax.live_arrays()), sys.getallocatedblocks()

    # An adaptive width may still find a program to compile in the first calls.
    held = {width: [held_after(12, width), held_after(50, width)] for width in (4, "adaptive")}
    print(json.dumps(held))


def main(mode: str) -> None:
    compiled, missed = [], []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, _, **of: event.endswith("backend_compile_duration") and compiled.append(str(of.get("fun_name")))
    )
    jax.monitoring.register_event_listener(lambda event, **_: event.endswith("/cache_misses") and missed.append(event))
    target, drafter = models()

    def decode(prompts, budget: int):
        options = {"max_new_tokens": budget, "temperature": 0.7, "seed": 5}
        return [result.tokens for result in generate(target, prompts, drafter=drafter, **options)]

    decode([[1]], 3)
    if mode == "long_then_short":
        decode(random_prompts([30, 2, 7]), 180)
    if mode == "lengths":
        compiled.clear()
        for length in LENGTHS:
            tokens = decode(random_prompts([length]), 100)
    else:
        tokens = decode(random_prompts([5, 20, 1], seed=1), 40)
    print(json.dumps({"tokens": tokens, "compiled": compiled, "missed": len(missed)}))


if __name__ == "__main__":
    memory() if sys.argv[1] == "memory" else main(sys.argv[1])

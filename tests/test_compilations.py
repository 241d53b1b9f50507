"""Nothing is compiled twice, nothing piles up, and no call leaves a trace in the next."""

import gc
import json
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import jax
import pytest
from small_models import random_drafter, random_prompts, random_target

from dflash_jax.decoding.generate import generate

HERE = Path(__file__).parent
CACHE = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}


def fresh_process(mode: str, **environment: str) -> dict:
    path = os.pathsep.join([str(HERE.parent), str(HERE)])
    done = subprocess.run(
        [sys.executable, HERE / "fresh_process.py", mode],
        env=os.environ | {"PYTHONPATH": path} | environment,
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def first_process(tmp_path_factory) -> tuple[dict, dict]:
    """A process that decodes long texts and then short ones, and the environment of its cache."""
    environment = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path_factory.mktemp("programs")), **CACHE}
    return fresh_process("long_then_short", **environment), environment


def test_a_second_process_with_the_persistent_cache_compiles_nothing(first_process):
    """And a call behind a long one gives what it gives in a process of its own."""
    first, environment = first_process
    assert first["missed"] > 0 and {"jit(prefill)", "jit(run_rounds)"} <= set(first["compiled"])
    second = fresh_process("short", **environment)
    assert second["missed"] == 0
    assert second["tokens"] == first["tokens"]


def test_forty_prompt_lengths_compile_once_a_bucket(first_process):
    """Prompts of 1 to 40 tokens, 100 new ones each: buckets of 32 and 64 tokens. A call before has compiled one."""
    compiled = fresh_process("lengths", **first_process[1])["compiled"]
    assert compiled.count("jit(prefill)") == 1
    assert compiled.count("jit(run_rounds)") == 0
    assert len(compiled) <= 2


@pytest.mark.parametrize("width", [4, "adaptive"])
def test_memory_is_flat_over_fifty_calls(width):
    target = random_target(num_layers=2)
    drafter = random_drafter(target.config, target_layer_ids=(0,), num_layers=1, layer_types=("full_attention",))
    prompts = random_prompts([3, 7, 5])

    def decode() -> tuple[int, int]:
        generate(target, prompts, drafter=drafter, width=width, max_new_tokens=12, batch_size=2)
        gc.collect()
        return len(jax.live_arrays()), tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        for _ in range(12):  # an adaptive width may still find a program to compile
            arrays, size = decode()
        for _ in range(50):
            last_arrays, last_size = decode()
    finally:
        tracemalloc.stop()
    assert last_arrays <= arrays
    assert last_size - size < 50 * 1024  # less than a kilobyte a call: every result holds more

"""Nothing is compiled twice, nothing piles up, and no call leaves a trace in the next."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.long
def test_memory_is_flat_over_fifty_calls(first_process):
    """In a process of its own, where nothing else comes and goes."""
    held = fresh_process("memory", **first_process[1])
    assert set(held) == {"4", "adaptive"}
    for (arrays, blocks), (last_arrays, last_blocks) in held.values():
        assert last_arrays <= arrays
        assert (
            last_blocks - blocks < 50 * 20
        )  # a result that is held takes 40 blocks; libraries still fill their caches

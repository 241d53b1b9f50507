"""Adaptive width in the decoding loop: the text is the same, and rounds go where they pay."""

import functools
import sys
import threading
import time
import types
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import RiggedDrafter, random_drafter, random_prompts, random_target, rigged, script, scripted

from dflash_jax.checkpoints.huggingface import LoadedDrafter
from dflash_jax.decoding import request, runner
from dflash_jax.decoding.adaptive import RoundCosts
from dflash_jax.decoding.flat import flatten
from dflash_jax.decoding.generate import generate, stream
from dflash_jax.decoding.loop import LoopSettings, prefill, run_rounds
from dflash_jax.decoding.recent import Recent
from dflash_jax.decoding.request import Options, checked_options

W = 4
TARGET = random_target()
DRAFTER = random_drafter(TARGET.config, block_size=W)
PROMPTS = random_prompts([1, 40, 5, 12, 3])
LONGEST = 40
SECONDS = {1: 1.0, 2: 1.3, 4: 1.5}


class Letters:
    """A tokenizer of one character a token."""

    def decode(self, tokens, skip_special_tokens=False) -> str:
        return "".join(chr(45 + token) for token in tokens)


@functools.cache
def plain_answers(temperature: float) -> list[list[int]]:
    results = generate(TARGET, PROMPTS, max_new_tokens=LONGEST, temperature=temperature, seed=3)
    return [result.tokens for result in results]


@functools.cache
def long_answer(temperature: float) -> list[int]:
    return generate(TARGET, [PROMPTS[2]], max_new_tokens=150, temperature=temperature)[0].tokens


@pytest.fixture
def known_costs(monkeypatch):
    """Rounds cost what SECONDS says, whatever the clock measures."""

    class Fixed(RoundCosts):
        def add(self, width, rounds, seconds):
            pass

        def get(self, width):
            return SECONDS[width]

        def fresh(self, width):
            return True

        def trusted(self, width):
            return True

    monkeypatch.setattr(runner, "RoundCosts", Fixed)
    monkeypatch.setattr(runner, "_COSTS", Recent(9))
    monkeypatch.setattr(runner, "_CONTROLLERS", weakref.WeakKeyDictionary())


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_text_is_that_of_plain_decoding(temperature):
    """Uneven rows, more prompts than slots, costs found on the way; called again when they are known."""
    options = {"max_new_tokens": LONGEST, "temperature": temperature, "seed": 3, "batch_size": 2}
    for _ in range(2):
        results = generate(TARGET, PROMPTS, drafter=DRAFTER, width="adaptive", **options)
        assert [result.tokens for result in results] == plain_answers(temperature)
        assert all(sum(result.acceptance_lengths) == LONGEST - 1 for result in results)
    at_once = generate(TARGET, PROMPTS[:2], drafter=DRAFTER, width="adaptive", **options)
    assert [result.tokens for result in at_once] == plain_answers(temperature)[:2]


@pytest.mark.usefixtures("known_costs")
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(("right", "most_used"), [(0, 1), (1, 2), (3, 4)])
def test_rounds_go_to_the_width_that_pays(temperature, right, most_used):
    """Always wrong: nearly plain decoding. One slot right: 2 / 1.3. All right: 4 / 1.5, the most tokens a second."""
    answer = long_answer(temperature)
    options = {"drafter": rigged(script([PROMPTS[2]], [answer]), right, W), "max_new_tokens": 150}
    (result,) = generate(TARGET, [PROMPTS[2]], temperature=temperature, width="adaptive", **options)
    assert result.tokens == answer
    rounds = result.stats.rounds_by_width
    seconds = sum(SECONDS[width] * count for width, count in rounds.items())
    fixed = min(SECONDS[width] * 149 / min(width, right + 1) for width in SECONDS)
    assert max(rounds, key=lambda width: rounds[width]) == most_used
    assert seconds <= (1.1 if right == 0 else 1.05) * fixed


@pytest.mark.usefixtures("known_costs")
def test_streams_adapt_too():
    tokens = [20 + index % 26 for index in range(120)]
    rows = script([[1, 2]], [tokens])
    target = scripted(rows, tokenizer=Letters())
    for right, most_used in ((0, 1), (3, 4)):
        pieces = stream(target, [1, 2], drafter=rigged(rows, right, W), width="adaptive", max_new_tokens=120)
        assert "".join(pieces) == Letters().decode(tokens)
        assert pieces.stats is not None
        rounds = pieces.stats.rounds_by_width
        assert max(rounds, key=lambda width: rounds[width]) == most_used


def test_a_slow_reader_is_no_cost_of_rounds(monkeypatch):
    """Nor is it where the next round has been launched meanwhile and ended long before it is asked for."""
    made, pause, tokens = [], 0.05, [20 + index % 26 for index in range(100)]
    monkeypatch.setattr(runner, "RoundCosts", lambda: made.append(RoundCosts()) or made[-1])
    monkeypatch.setattr(runner, "_COSTS", Recent(9))
    rows = script([[1, 2]], [tokens])
    drafter = rigged(rows, 3, W)
    for _ in stream(scripted(rows, tokenizer=Letters()), [1, 2], drafter=drafter, width="adaptive", max_new_tokens=100):
        time.sleep(pause)
    (costs,) = made
    timed = [cost for width in (1, 2, 4) if (cost := costs.get(width)) is not None]
    assert len(timed) > 1 and all(0 < cost < pause / 2 for cost in timed)


def test_costs_are_measured_once_for_a_program(monkeypatch):
    made = []
    monkeypatch.setattr(runner, "RoundCosts", lambda: made.append(RoundCosts()) or made[-1])
    monkeypatch.setattr(runner, "_COSTS", Recent(9))
    rows = script([[1, 2]], [[5] * 200])
    target, options = scripted(rows), {"max_new_tokens": 150, "width": "adaptive"}
    for right in (3, 0):  # the value is data: the same program
        generate(target, [[1, 2]], drafter=rigged(rows, right, W), **options)
    (costs,) = made
    assert all(0 < costs.get(width) < 1 for width in (1, 2))
    generate(target, [[1, 2]] * 2, drafter=rigged(script([[1, 2]] * 2, [[5] * 200] * 2), 3, W), **options)
    assert len(made) == len(runner._COSTS) == 2


def test_no_more_logits_processors_are_kept_than_programs_are_remembered(monkeypatch):
    monkeypatch.setattr(runner, "PROGRAMS", 2)
    monkeypatch.setattr(runner, "_COSTS", Recent(2))
    monkeypatch.setattr(runner, "_CONTROLLERS", weakref.WeakKeyDictionary())
    rows = script([[1, 2]], [[5] * 20])
    target, drafter = scripted(rows), rigged(rows, 3, W)
    for _ in range(3):
        options = {"logits_processor": lambda logits_BV, tokens_BS, lengths_B: logits_BV, "max_new_tokens": 8}
        generate(target, [[1, 2]], drafter=drafter, width="adaptive", **options)
    (of_drafter,) = runner._CONTROLLERS.values()
    assert len(runner._COSTS) == len(of_drafter) == 2


def test_what_was_asked_for_last_is_kept():
    recent = Recent(2)
    for key in ("a", "b", "a", "c", "a"):
        assert recent.get(key, lambda key=key: [key]) == [key]
    kept = recent.get("a", list)
    assert kept == ["a"] and recent.get("b", list) == [] and recent.get("a", list) is kept
    assert len(recent) == 2


def test_threads_may_share_what_is_remembered():
    recent, wrong = Recent(1), []

    def ask(key: int) -> None:
        for _ in range(3000):
            try:
                wrong.extend(value for value in recent.get(key, lambda: [key]) if value != key)
            except Exception as error:
                wrong.append(error)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=ask, args=(key,)) for key in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert not wrong


def test_devices_of_several_processes_are_refused(monkeypatch):
    """Their clocks differ, so they would choose other widths."""
    monkeypatch.setattr(request, "mesh_of", lambda _: types.SimpleNamespace(is_multi_process=True))
    with pytest.raises(ValueError, match="width='adaptive' works on the devices of one process"):
        generate(TARGET, PROMPTS, drafter=DRAFTER, width="adaptive")


def test_programs_that_are_compiled_at_every_launch_end(monkeypatch):
    """As under jax.checking_leaks: what a launch costs is then never known."""
    launch = runner.Runner._launch

    def compiling(self, *arguments):
        state, launched = launch(self, *arguments)
        self._compilations += 1
        return state, launched

    monkeypatch.setattr(runner, "_COSTS", Recent(9))
    monkeypatch.setattr(runner, "_CONTROLLERS", weakref.WeakKeyDictionary())
    monkeypatch.setattr(runner.Runner, "_launch", compiling)
    (result,) = generate(TARGET, PROMPTS[:1], drafter=DRAFTER, width="adaptive", max_new_tokens=9)
    assert result.tokens == plain_answers(0.0)[0][:9]


def test_sampled_proposals_are_refused():
    with pytest.raises(ValueError, match="width='adaptive' needs proposals='argmax'"):
        generate(TARGET, PROMPTS, drafter=DRAFTER, width="adaptive", proposals="sampled", temperature=1.0)


def test_without_a_drafter_adaptive_is_plain():
    results = generate(TARGET, PROMPTS, max_new_tokens=LONGEST, width="adaptive")
    assert [result.tokens for result in results] == plain_answers(0.0)
    assert set(results[0].stats.rounds_by_width) == {1}


@jax.tree_util.register_pytree_node_class
class Unhashable(RiggedDrafter):
    """As a dataclass is that compares its fields."""

    __hash__ = None


@pytest.mark.usefixtures("known_costs")
def test_a_drafter_that_has_no_hash_is_begun_with_anew():
    answer = plain_answers(0.0)[2]
    drafter = LoadedDrafter(Unhashable(script([PROMPTS[2]], [answer]), jnp.int32(3), W), None, "an unhashable drafter")
    for _ in range(2):
        (result,) = generate(TARGET, [PROMPTS[2]], drafter=drafter, width="adaptive", max_new_tokens=LONGEST)
        assert result.tokens == answer
    assert not runner._CONTROLLERS


# Rounds of width 1.


@jax.tree_util.register_pytree_node_class
class Silent(RiggedDrafter):
    """Fails when it is asked for a proposal."""

    def propose(self, *_, **__):
        raise AssertionError("asked for a proposal")


def test_a_round_of_width_1_does_not_ask_the_drafter():
    answer = plain_answers(0.0)[0]
    rows = script(PROMPTS[:1], [answer])
    silent = LoadedDrafter(Silent(rows, jnp.int32(0), W), None, "a silent drafter")
    (result,) = generate(TARGET, PROMPTS[:1], drafter=silent, width=1, max_new_tokens=LONGEST)
    assert result.tokens == answer
    with pytest.raises(AssertionError, match="asked for a proposal"):
        generate(TARGET, PROMPTS[:1], drafter=silent, width=2, max_new_tokens=LONGEST)


def test_a_drafter_reads_on_through_rounds_of_width_1():
    """Its context after plain rounds is that after drafted ones, so it can come back at any time."""
    prompt, (_, greedy) = PROMPTS[2], checked_options(Options(), 1, W)
    arguments = (jnp.asarray([prompt]), jnp.asarray([len(prompt)]), jnp.asarray([100]), greedy)
    models, caches = flatten(TARGET.model, DRAFTER.model), []
    for width in (1, W):
        settings = LoopSettings(width, ())
        state, _ = prefill(TARGET.model, DRAFTER.model, *arguments, settings=settings, cache_length=256)
        state, progress = run_rounds(models, state, jnp.int32(200), jnp.int32(1), settings=settings)
        assert progress.done.all()
        caches.append(state.drafter_cache)
    read = 99  # the last token has not been through the target
    plain, drafted = (np.stack([*cache.keys, *cache.values])[..., :read, :] for cache in caches)
    assert (np.abs(plain).max(-1) > 0).all()
    np.testing.assert_allclose(plain, drafted, rtol=1e-4, atol=1e-4)  # float32 passes of other shapes

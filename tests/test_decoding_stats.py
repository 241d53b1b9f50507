"""What a call says about itself: counts against rigged drafters, and that compilation is apart from the rest."""

import concurrent.futures
import math
import time

import jax
import pytest
from small_models import random_prompts, random_target, rigged, script, scripted

from dflash_jax.decoding import runner
from dflash_jax.decoding.generate import generate, stream
from dflash_jax.decoding.stats import Clock, compile_seconds, position_acceptance
from dflash_jax.evaluation.heldout import decoding_report

W = 4
ANSWER = [20 + index % 30 for index in range(60)]
ROWS = script([[1, 2, 3]], [ANSWER])


class Letters:
    def decode(self, tokens, skip_special_tokens=False) -> str:
        return "".join(chr(45 + token) for token in tokens)


TARGET = scripted(ROWS, tokenizer=Letters())


def run(right: int, budget: int, **options):
    (result,) = generate(TARGET, [[1, 2, 3]], drafter=rigged(ROWS, right, W), max_new_tokens=budget, **options)
    return result


def test_counts_of_a_rigged_drafter():
    """Two of three slots right; ten rounds of three tokens. Then a budget that leaves the last round two tokens."""
    stats = run(2, 31).stats
    assert (stats.decode_tokens, stats.rounds_by_width, stats.batch_rounds) == (30, {W: 10}, 10)
    assert stats.position_acceptance == [1.0, 1.0, 0.0]
    assert stats.tokens_per_second == pytest.approx(30 / stats.decode_seconds)
    cut = run(3, 1 + 4 + 2)
    assert (cut.acceptance_lengths, cut.verified_lengths) == ([4, 2], [4, 2])
    assert cut.stats.position_acceptance == [1.0, 1.0, 1.0]


def test_slots_without_room_or_behind_a_stop_token_are_not_counted_as_refused():
    stop = run(3, 60, stop_token_ids=[ANSWER[6]])
    assert (stop.acceptance_lengths, stop.verified_lengths) == ([4, 2], [4, 2])
    assert stop.stats.position_acceptance == [1.0, 1.0, 1.0]
    assert position_acceptance([(1, 3), (2, 3), (3, 3), (1, 2), (1, 1)]) == [0.5, 1 / 3]
    assert position_acceptance([]) == []


def test_an_evaluation_counts_slots_as_a_call_does():
    """Of rounds cut by budget and stop token, too. A slot that no round verified is listed, with 0."""
    cut, stop = run(3, 1 + 4 + 2), run(3, 60, stop_token_ids=[ANSWER[6]])
    for result in (run(2, 31), cut, stop):
        assert decoding_report([result], W).position_acceptance == result.stats.position_acceptance
    assert decoding_report([cut, run(0, 11)], W).position_acceptance == [2 / 11, 1 / 9, 1 / 8]
    assert decoding_report([run(3, 3)], W).position_acceptance == [1.0, 0.0, 0.0]


def test_a_batch_is_counted_as_a_whole():
    """Rows of one call share its stats; a prompt without a round gives none."""
    rows = script([[1, 2, 3]] * 3, [ANSWER] * 3)
    results = generate(scripted(rows), [[1, 2, 3]] * 3, drafter=rigged(rows, 1, W), max_new_tokens=21)
    assert results[0].stats is results[2].stats
    assert results[0].stats.decode_tokens == 60
    assert results[0].stats.rounds_by_width == {W: 10}
    single = run(1, 1)
    assert single.stats.rounds_by_width == {}
    assert math.isnan(single.stats.tokens_per_second)


def test_streams_tell_what_generate_tells():
    for budget in (0, 1, 2, 30):
        pieces = stream(TARGET, [1, 2, 3], drafter=rigged(ROWS, 2, W), max_new_tokens=budget)
        assert pieces.stats is None
        assert "".join(pieces) == Letters().decode(ANSWER[:budget])
        wanted = run(2, budget).stats
        for name in ("decode_tokens", "rounds_by_width", "position_acceptance"):
            assert getattr(pieces.stats, name) == getattr(wanted, name)


def test_a_call_launches_its_rounds_at_once(monkeypatch):
    """And again only where a slot comes free while prompts wait."""
    launched = []
    run_rounds = runner.run_rounds
    monkeypatch.setattr(runner, "run_rounds", lambda *a, **k: launched.append(1) or run_rounds(*a, **k))
    assert run(2, 31).stats.batch_rounds == 10 and len(launched) == 1
    target, prompts = random_target(num_layers=1), random_prompts([3] * 7)
    generate(target, prompts, max_new_tokens=21)
    assert len(launched) == 2
    generate(target, prompts, max_new_tokens=21, batch_size=2)
    assert len(launched) == 2 + 4  # without a drafter rows end together, two by two


def test_a_stream_charges_its_seconds_where_they_were_spent():
    """Until the first token, and from there to the last, the reader's own time counted."""
    "".join(stream(TARGET, [1, 2, 3], drafter=rigged(ROWS, 2, W), max_new_tokens=31))
    start = time.perf_counter()
    pieces = stream(TARGET, [1, 2, 3], drafter=rigged(ROWS, 2, W), max_new_tokens=31)
    next(pieces)
    first = time.perf_counter() - start
    time.sleep(0.5)
    "".join(pieces)
    wall = time.perf_counter() - start
    stats = pieces.stats
    assert stats.compile_seconds == 0
    assert 0.5 * first < stats.first_token_seconds == stats.prefill_seconds <= first
    assert 0.5 <= stats.decode_seconds <= wall - stats.first_token_seconds
    assert stats.run_seconds == pytest.approx(wall, rel=0.1)


def test_a_stream_is_a_round_ahead_and_copies_once_a_round(monkeypatch):
    launched, copied = [], []
    run_rounds, device_get = runner.run_rounds, jax.device_get
    monkeypatch.setattr(runner, "run_rounds", lambda *a, **k: launched.append(1) or run_rounds(*a, **k))
    monkeypatch.setattr(jax, "device_get", lambda x: copied.append(1) or device_get(x))
    pieces = stream(TARGET, [1, 2, 3], drafter=rigged(ROWS, 2, W), max_new_tokens=1 + 3 * 4)
    assert next(pieces) and (len(launched), len(copied)) == (0, 1)
    for rounds in range(1, 4):
        assert len(next(pieces)) == 3
        assert (len(launched), len(copied)) == (rounds + 1, rounds + 1)
    assert len(next(pieces)) == 3 and next(pieces, None) is None
    assert (len(launched), len(copied)) == (5, 6)  # one that finds nothing to do; the history, for the stats


def test_compilation_is_apart_from_the_rest():
    """A new shape is compiled once; wall time is the sum of the parts."""
    target, prompts = random_target(num_layers=1), random_prompts([7] * 5)
    start = time.perf_counter()
    first = generate(target, prompts, max_new_tokens=5)[0].stats
    wall = time.perf_counter() - start
    assert first.compile_seconds > 0.5 * wall  # such a model runs for milliseconds
    assert first.compile_seconds + first.run_seconds == pytest.approx(wall, rel=0.05)
    assert 0 < first.first_token_seconds <= first.prefill_seconds
    again = generate(target, prompts, max_new_tokens=5)[0].stats
    assert again.compile_seconds == 0
    assert again.run_seconds < 0.5 * wall


def test_nested_compilations_count_once():
    @jax.jit
    def inner(x):
        return jax.numpy.sin(x) + 1

    start, clock, before = time.perf_counter(), Clock(), compile_seconds()
    inside = time.perf_counter()
    jax.jit(lambda x: inner(x) * inner(x * 2))(jax.numpy.ones(13))
    inside = time.perf_counter() - inside
    compiled = compile_seconds() - before
    spent, compiling = clock.charge("part")
    assert compiling and 0 < compiled <= inside
    assert inside <= spent + compiled <= time.perf_counter() - start


def test_a_stream_that_another_thread_reads_keeps_its_counts_of_time():
    """Compilation is counted by thread: here this one has compiled, and the other has not yet."""
    jax.jit(lambda x: x + 1)(1)
    assert compile_seconds() > 0
    text = stream(TARGET, [1, 2, 3], drafter=rigged(ROWS, 2, W), max_new_tokens=31)
    started = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(1) as other:
        other.submit(lambda: list(text)).result()
    waited, stats = time.perf_counter() - started, text.stats
    assert stats is not None and stats.decode_tokens == 30
    assert stats.compile_seconds >= 0
    assert stats.run_seconds + stats.compile_seconds <= waited + 1.0  # the call itself checks its arguments before

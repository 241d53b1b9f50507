"""TensorBoard and Weights & Biases: what they are given, and that both are optional."""

import dataclasses
import importlib.machinery
import sys
import types
from pathlib import Path

import pytest
from event_files import event_scalars
from tiny_run import settings

from dflash_jax.config import ConfigError, ExperimentConfig
from dflash_jax.evaluation.training_run import train
from dflash_jax.training.trackers import TensorBoard, trackers_for


def logged(directory: Path, **fields) -> ExperimentConfig:
    return settings("absent", directory, directory, **{f"logging__{name}": value for name, value in fields.items()})


class Run:
    def __init__(self, **arguments):
        self.arguments, self.lines, self.finished = arguments, [], False

    def log(self, values, step):
        self.lines.append((step, values))

    def finish(self):
        self.finished = True


@pytest.fixture
def wandb(monkeypatch) -> list[Run]:
    """In the place of the package; the runs that were begun."""
    runs, module = [], types.ModuleType("wandb")
    module.__spec__ = importlib.machinery.ModuleSpec("wandb", None)
    module.init = lambda **arguments: runs.append(Run(**arguments)) or runs[-1]
    monkeypatch.setitem(sys.modules, "wandb", module)
    return runs


def test_nothing_is_tracked_unasked(tmp_path):
    assert trackers_for(logged(tmp_path), tmp_path, 0) == []


def test_a_run_there_has_the_settings_and_goes_on_after_a_stop(wandb, tmp_path):
    experiment = logged(tmp_path, wandb_project="drafters")
    for step in (0, 5):
        (tracker,) = trackers_for(experiment, tmp_path, step)
        tracker.log("train", step + 5, {"loss": 2.0, "position_accuracy": [0.5, 0.25], "skipped_steps": 0})
        tracker.close()
    first, second = wandb
    assert first.finished and first.arguments["config"] == dataclasses.asdict(experiment)
    assert (first.arguments["project"], first.arguments["name"]) == ("drafters", tmp_path.name)
    assert first.arguments["id"] == second.arguments["id"] and second.arguments["resume"] == "allow"
    values = {"train/loss": 2.0, "train/position_accuracy/1": 0.5, "train/position_accuracy/2": 0.25}
    assert first.lines == [(5, values | {"train/skipped_steps": 0.0})]


def test_event_files_are_added_to(tmp_path):
    for begun in (0, 5):
        tracker = TensorBoard(tmp_path, begun)
        tracker.log("train", begun + 5, {"loss": 2.0 + begun})
        tracker.close()
    scalars = event_scalars(tmp_path)
    assert scalars["train/loss", 10] == 7.0
    # The second file says that what lies behind step 5 counts no more; files of one second share a name.
    assert scalars.get(("train/loss", 5), 2.0) == 2.0


@pytest.mark.parametrize(
    ("field", "value", "package", "extra"),
    [("tensorboard", True, "tensorboardX", "tensorboard"), ("wandb_project", "drafters", "wandb", "wandb")],
)
def test_a_package_that_is_missing_is_told_first(tmp_path, monkeypatch, field, value, package, extra):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    message = rf"logging.{field}={value!r}: needs the package {package}: pip install 'dflash-jax\[{extra}\]'"
    with pytest.raises(ConfigError, match=message):
        train(logged(tmp_path, **{field: value}))  # its target is absent, too

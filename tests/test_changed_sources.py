"""A run goes on where its files were moved, or features come from elsewhere, and not where what is in them differs."""

import logging
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from tiny_run import bits, own_rows, settings, write_rows, write_target

from dflash_jax.config import ConfigError
from dflash_jax.data import features
from dflash_jax.evaluation.training_run import prepare
from dflash_jax.training.trainer import Trainer


def experiment(files: Path, directory: Path, **fields):
    """Four steps on the chats of the folder, with a checkpoint after two."""
    chosen = {"data__heldout_file": str(files / "heldout.jsonl"), "evaluation__decode_prompts": 0}
    chosen |= {"training__steps": 4, "checkpoint__every_steps": 2}
    return settings(files / "target", files / "chats.jsonl", directory, **chosen | fields)


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    """Holds target, chats, held-out chats and their features."""
    folder = tmp_path_factory.mktemp("files")
    target = write_target(folder / "target")
    write_rows(folder / "chats.jsonl", own_rows(target, 8))
    write_rows(folder / "heldout.jsonl", own_rows(target, 8, seed=1))
    features.run(experiment(folder, folder), folder / "stored", say=lambda text: None)
    return folder


SOURCES = {"online": {}, "memory": {"training__feature_cache": "memory"}, "stored": {"data__features": "stored"}}


def source(files: Path, name: str) -> dict:
    return {field: str(files / value) if value == "stored" else value for field, value in SOURCES[name].items()}


@pytest.fixture(scope="module")
def whole(files, tmp_path_factory) -> dict[str, Trainer]:
    """A finished run on each source of features."""
    runs = {}
    for name in SOURCES:
        runs[name] = prepare(experiment(files, tmp_path_factory.mktemp(name), **source(files, name)))
        runs[name].run()
    return runs


def cut_off(trainer: Trainer, directory: Path) -> Path:
    """What the run leaves that is killed after two steps."""
    shutil.copytree(trainer.directory / "checkpoints" / "2", directory / "checkpoints" / "2")
    return directory


@pytest.mark.parametrize(
    ("before", "after"), [("online", "stored"), ("stored", "online"), ("memory", "stored"), ("stored", "memory")]
)
def test_features_may_come_from_another_source(files, whole, tmp_path, caplog, before, after):
    caplog.set_level(logging.INFO, "dflash_jax")
    again = prepare(experiment(files, cut_off(whole[before], tmp_path), **source(files, after)))
    assert again.run().steps == 4
    assert "the source of features has changed" in caplog.text and "data.features: " in caplog.text
    for ours, theirs in zip(*(jax.tree.leaves(run.state) for run in (again, whole[after])), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
    # The run has the new source now, and can be given up and taken up again.
    caplog.clear()
    prepare(experiment(files, tmp_path, **source(files, after))).run()
    assert "has changed" not in caplog.text


def test_everything_may_be_moved_to_the_bit(files, whole, tmp_path, caplog):
    caplog.set_level(logging.INFO, "dflash_jax")
    moved = tmp_path / "elsewhere"
    shutil.copytree(files, moved)
    (moved / "chats.jsonl").rename(moved / "renamed.jsonl")
    fields = source(moved, "stored") | {"data__train_file": str(moved / "renamed.jsonl")}
    again = prepare(experiment(moved, cut_off(whole["stored"], tmp_path / "run"), **fields))
    again.run()
    assert bits(again.state) == bits(whole["stored"].state)
    for field in ("model.target", "data.train_file", "data.heldout_file"):
        assert any(f"{field}: '{files}" in line and "same content" in line for line in caplog.messages), field
    assert f"data.features: '{files}/stored' there, '{moved}/stored' now" in caplog.text


def test_moved_files_of_other_content_are_refused_by_field(files, whole, tmp_path):
    other = Path(shutil.copytree(files, tmp_path / "other"))
    write_rows(other / "chats.jsonl", own_rows(files / "target", 8, seed=2))
    write_rows(other / "heldout.jsonl", own_rows(files / "target", 8, seed=3))
    run = cut_off(whole["online"], tmp_path / "run")
    with pytest.raises(ConfigError, match="holds a run with other settings") as error:
        prepare(experiment(other, run)).run()
    for name in ("train_file", "heldout_file"):
        assert f"data.{name}: '{files}" in str(error.value)
        assert f"data.{name}: its content has changed" in str(error.value)
    assert "model.target" not in str(error.value)
    with pytest.raises(ConfigError, match=r"data\.heldout_file: '.*' there, '' now\)"):
        prepare(experiment(files, run, data__heldout_file="")).run()


def test_features_of_other_rows_or_layers_are_refused_as_ever(files, whole, tmp_path):
    run = cut_off(whole["online"], tmp_path / "run")
    other = experiment(files, tmp_path, model__target_layer_ids=(0, 1), evaluation__rows=4)
    features.run(other, tmp_path / "layers", say=lambda text: None)
    with pytest.raises(ConfigError, match=r"they are of layers \[0, 1\], the drafter reads \[0, 2\]"):
        prepare(experiment(files, run, data__features=str(tmp_path / "layers")))
    write_rows(tmp_path / "chats.jsonl", own_rows(files / "target", 8, seed=2))
    rows = experiment(files, tmp_path, data__train_file=str(tmp_path / "chats.jsonl"))
    features.run(rows, tmp_path / "rows", say=lambda text: None)
    with pytest.raises(ConfigError, match="they are of other train rows"):
        prepare(experiment(files, run, data__features=str(tmp_path / "rows")))


def test_a_checkpoint_of_a_version_without_a_hash_is_compared_by_name(files, whole, tmp_path):
    def resumed(files: Path) -> Trainer:
        trainer = prepare(experiment(files, tmp_path / "run"))
        position = trainer.checkpoints.restore_position(2)
        del position["inputs"]["data.heldout_file"]
        trainer.checkpoints.restore_position = lambda step: position
        return trainer

    cut_off(whole["online"], tmp_path / "run")
    with pytest.raises(ConfigError, match=r"other settings \(data\.heldout_file: '.*' there, '.*moved.*' now\)"):
        resumed(Path(shutil.copytree(files, tmp_path / "moved"))).run()
    assert resumed(files).run().steps == 4

"""Stored features: what is written, what survives, and that training on them is training online."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from checkpoint_folders import rewrite, shard
from tiny_run import bits, own_rows, read_metrics, settings, write_config, write_rows, write_target

from dflash_jax.checkpoints.huggingface import load_target
from dflash_jax.checkpoints.safetensors_io import fingerprint
from dflash_jax.checkpoints.target_files import has_all_weights
from dflash_jax.config import ConfigError
from dflash_jax.data import features
from dflash_jax.data.feature_store import StoredSplit
from dflash_jax.data.locks import only_writer
from dflash_jax.data.pipeline import collate
from dflash_jax.data.prepared import PreparedRow, write_prepared
from dflash_jax.data.records import read_chats
from dflash_jax.data.rows import rows_from_regenerated
from dflash_jax.evaluation.training_run import prepare, rows_in_use
from dflash_jax.training.features import OnlineFeatures, StoredFeatures

ROOT = Path(__file__).parents[1]
TABLES = {"model.embed_tokens.weight", "lm_head.weight"}
SMALL = 30_000  # bytes of a shard: two passes of four short rows, or one of long ones


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    """Holds target, chats of two lengths, held-out chats, and features of both in several shards."""
    folder = tmp_path_factory.mktemp("files")
    target = write_target(folder / "target")
    write_rows(folder / "chats.jsonl", [*own_rows(target, 17), *own_rows(target, 8, seed=1, length=7)])
    write_rows(folder / "heldout.jsonl", own_rows(target, 10, seed=2))
    features.run(experiment(folder, folder), folder / "stored", shard_bytes=SMALL, say=lambda text: None)
    return folder


def experiment(files: Path, directory: Path, **fields):
    """A run of 8 steps that does not decode; on stored features where data__features is given."""
    chosen = {"data__heldout_file": str(files / "heldout.jsonl"), "evaluation__decode_prompts": 0}
    chosen |= {"training__steps": 8, "training__loss": "teacher"}
    chosen |= {"logging__every_steps": 1, "checkpoint__every_steps": 4}
    return settings(files / "target", files / "chats.jsonl", directory, **chosen | fields)


def store(run, out: Path, **options) -> tuple[str, str]:
    """The closing table of the command, and what it said before."""
    said: list[str] = []
    return features.run(run, out, **{"shard_bytes": SMALL, **options}, say=said.append), "\n".join(said)


def lines_of(table: str) -> set[str]:
    return {" ".join(line.split()) for line in table.splitlines()}


def shards_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


# What is written


BUCKETS = {"data__length_buckets": (16, 32)}


@pytest.mark.parametrize("fields", [BUCKETS, {"model__target_dtype": "bfloat16", "training__loss": "labels"}])
def test_stored_features_are_those_of_the_target_and_take_the_bytes_that_were_told(files, tmp_path, fields):
    run = experiment(files, tmp_path, **fields)
    table, said = store(run, tmp_path / "out")
    estimate = int(re.search(r"([\d,]+) bytes \(", said)[1].replace(",", ""))
    written = sum(map(len, shards_of(tmp_path / "out").values()))
    assert estimate == pytest.approx(written, rel=0.05)
    assert {"train rows 25", "heldout rows 8", "tapped layers [0, 2]"} <= lines_of(table)

    dtype, names = run.model.target_dtype, ("taps", "hidden") if fields is BUCKETS else ("taps",)
    target = load_target(files / "target", dtype=dtype)
    online = OnlineFeatures(target.model, (0, 2), with_hidden=True)
    tolerance = 1e-6 if dtype == "float32" else 2**-7  # a step of bfloat16
    for split, count in (("train", 25), ("heldout", 8)):
        rows, stored = rows_in_use(run, target, split).rows, StoredSplit(tmp_path / "out", split)
        assert (stored.schema.splits[split].rows, stored.schema.hidden) == (count, fields is BUCKETS)
        for row in range(count):
            length = len(rows[row].tokens)
            padded = next(bucket for bucket in run.data.length_buckets if bucket >= length)
            batch = collate(rows, [row] * 4, padded)
            alone = online(batch)
            for name in names:
                mine, its_own = stored.read(name, row), np.asarray(getattr(alone, name)[0, :length])
                assert mine.dtype == its_own.dtype == np.dtype(dtype)
                np.testing.assert_allclose(*(x.astype(np.float32) for x in (mine, its_own)), tolerance, tolerance)


def test_a_command_killed_before_a_shard_has_its_name_goes_on_behind_the_last_that_has(files, tmp_path, capsys):
    out = tmp_path / "out"
    arguments = ["--config", str(write_config(tmp_path / "config.py", experiment(files, files)))]
    arguments += [f"--out={out}", f"--shard_gb={SMALL / 1e9}"]
    killed = f"""
import os, signal, sys
from dflash_jax.data import feature_store, features
seen, to_disk = [], feature_store._to_disk
def stop(path):
    to_disk(path)
    seen.append(path)
    if len(seen) == 4:  # the schema, two shards, and this one
        os.kill(os.getpid(), signal.SIGKILL)
feature_store._to_disk = stop
features.main(["features", *{arguments!r}])
"""
    program = subprocess.run([sys.executable, "-c", killed], cwd=ROOT, env=os.environ, capture_output=True, text=True)
    assert program.returncode == -signal.SIGKILL, program.stderr
    assert "bytes a token" in program.stdout
    before = {path.name: path.stat() for path in out.glob("*.safetensors")}
    assert len(before) == 2 and len(list(out.glob("*.tmp"))) == 1
    with pytest.raises(ValueError, match="lacks 4 of 6 shards of train rows"):
        StoredSplit(out, "train")

    features.main(["features", *arguments])
    assert {"shards written 6", "shards from before 2"} <= lines_of(capsys.readouterr().out)
    assert shards_of(out) == shards_of(files / "stored") and not list(out.glob("*.tmp"))
    for name, stat in before.items():
        assert (out / name).stat().st_ino == stat.st_ino and (out / name).stat().st_mtime_ns == stat.st_mtime_ns
    features.main(["features", *arguments])
    assert "nothing was left to compute" in capsys.readouterr().out


def test_a_disk_that_is_too_small_is_told_before_anything_is_written(files, tmp_path, monkeypatch):
    free = 1000
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    with pytest.raises(ValueError, match=r"--out=.*: [\d,]+ bytes .*still to be written.* 1,000 bytes .*are free"):
        store(experiment(files, files), tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".lock"]
    # What is there already needs no room.
    assert "shards from before 8" in lines_of(store(experiment(files, files), files / "stored")[0])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model__target_layer_ids": (0, 1)}, r"layers was \[0, 2\] and is now \[0, 1\]"),
        ({"model__target_dtype": "bfloat16"}, r"dtype was 'float32' and is now 'bfloat16'"),
        ({"data__max_rows": 20}, r"train\.rows was 25 and is now 20; train\.rows_sha256 was"),
        ({"training__loss": "labels"}, r"hidden was True and is now False"),
        ({"model__target": "other"}, r"tables_sha256 was .*; target_fingerprint was "),
    ],
)
def test_other_features_are_not_mixed_with_those_there(files, tmp_path, fields, message):
    if "model__target" in fields:
        fields = {"model__target": str(write_target(tmp_path / "other", seed=1))}
    before = shards_of(files / "stored")
    with pytest.raises(ValueError, match=rf"stored was begun with other settings: .*{message}.*another --out"):
        store(experiment(files, files, **fields), files / "stored")
    assert shards_of(files / "stored") == before


def test_shards_that_nothing_describes_are_not_taken_for_those_asked_for(files, tmp_path):
    shutil.copytree(files / "stored", tmp_path / "out")
    (tmp_path / "out" / "schema.json").unlink()
    with pytest.raises(ValueError, match=r"out holds heldout-00000-of-\d+.safetensors without schema.json; delete"):
        store(experiment(files, files, model__target_layer_ids=(0, 1)), tmp_path / "out")
    assert not (tmp_path / "out" / "schema.json").exists()


# Training on them


@pytest.fixture(scope="module")
def offline(files, tmp_path_factory):
    """A finished run on stored features."""
    trainer = prepare(experiment(files, tmp_path_factory.mktemp("run"), data__features=str(files / "stored")))
    trainer.run()
    return trainer


CLOCKS = {"kind", "seconds", "tokens_per_second", "steps_per_second"}


def numbers(directory: Path) -> list[dict]:
    """What the lines of a run's metrics say, by name and place in a list."""
    return [
        {f"{name}.{i}": x for name in line.keys() - CLOCKS for i, x in enumerate(np.ravel(line[name]).tolist())}
        for line in read_metrics(directory)
    ]


def test_training_on_stored_features_is_training_online(files, offline, tmp_path):
    online = prepare(experiment(files, tmp_path))
    online.run()
    mine, theirs = (numbers(run.directory) for run in (offline, online))
    assert len(mine) == 9
    for ours, others in zip(mine, theirs, strict=True):
        assert ours == pytest.approx(others, rel=1e-6)
    for ours, others in zip(jax.tree.leaves(offline.state), jax.tree.leaves(online.state), strict=True):
        np.testing.assert_allclose(ours, others, rtol=1e-6, atol=1e-6)


def test_a_run_on_stored_features_resumes_to_the_bit(files, offline, tmp_path):
    shutil.copytree(offline.directory / "checkpoints" / "4", tmp_path / "checkpoints" / "4")
    again = prepare(experiment(files, tmp_path, data__features=str(files / "stored")))
    assert again.run().steps == 8
    assert bits(again.state) == bits(offline.state)
    assert numbers(tmp_path) == numbers(offline.directory)[4:]


def test_packed_rows_have_the_features_of_each_row_alone(files, offline, tmp_path):
    fields = {"data__packing": True, "data__length_buckets": (64,), "training__rows_per_step": 2}
    online = prepare(experiment(files, tmp_path / "online", **fields))
    stored = prepare(experiment(files, tmp_path / "stored", **fields, data__features=str(files / "stored")))
    batch = next(stored.batches)
    assert (batch["row_index_BP"] >= 0).sum(axis=1).min() > 1
    held_BT = np.arange(64) < batch["length_B"][:, None]
    for ours, theirs in zip(stored.features(batch), online.features(batch), strict=True):
        np.testing.assert_allclose(np.asarray(ours)[held_BT], np.asarray(theirs)[held_BT], rtol=1e-5, atol=1e-5)


def test_features_of_a_prepared_set_serve_runs_on_its_first_rows(files, tmp_path):
    rows, _ = rows_from_regenerated(read_chats(files / "chats.jsonl")[0], max_length=32)
    made_for = {"target": "own", "target_fingerprint": fingerprint(files / "target")}
    prepared = [PreparedRow(row, "train", "chats.jsonl", 1) for row in rows]
    write_prepared(tmp_path / "set", prepared, made_for)
    fields = {"data__train_file": str(tmp_path / "set"), "data__heldout_file": ""}
    store(experiment(files, tmp_path, **fields, data__max_rows=24), tmp_path / "out")
    fields["data__features"] = str(tmp_path / "out")
    trainer = prepare(experiment(files, tmp_path / "run", **fields, data__max_rows=8))
    batch = next(trainer.batches)
    assert trainer.features(batch).taps.shape == (4, 32, 2, 32)
    with pytest.raises(ConfigError, match=r"of 24 train rows, data\.max_rows asks for 25"):
        prepare(experiment(files, tmp_path / "run", **fields))
    short = experiment(files, tmp_path, **fields, data__max_length=16, data__length_buckets=(16,))
    message = r"data\.train_file='.*set': row \d+ has 22 tokens, and .* data\.length_buckets=\(16,\) .*max_length"
    with pytest.raises(ConfigError, match=message):
        store(short, tmp_path / "other")


# A target that is not all there


def without_layers(files: Path, folder: Path, how: str) -> Path:
    """A copy of the target that has lost its weights but for embedding and head."""
    shutil.copytree(files / "target", folder)
    if how == "one file":
        rewrite(folder, lambda tensors: {name: x for name, x in tensors.items() if name in TABLES})
        return folder
    shard(folder, 20)
    weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    for name in {*weight_map.values()} - {weight_map[table] for table in TABLES}:
        (folder / name).unlink()
    return folder


@pytest.mark.parametrize("how", ["one file", "shards"])
def test_embedding_and_head_are_enough_to_train_and_to_evaluate_on_fixed_anchors(files, offline, tmp_path, how, caplog):
    target = without_layers(files, tmp_path / "target", how)
    assert has_all_weights(files / "target") and not has_all_weights(target)
    stored = {"data__features": str(files / "stored"), "model__target": str(target), "evaluation__every_steps": 4}
    stored["evaluation__decode_prompts"] = 4
    trainer = prepare(experiment(files, tmp_path / "run", **stored))
    outcome = trainer.run()
    assert bits(trainer.state) == bits(offline.state)
    assert (outcome.acceptance_length, outcome.steps) == (None, 8) and outcome.drafter_dir.is_dir()
    evaluations = [line for line in read_metrics(tmp_path / "run") if line["kind"] == "evaluation"]
    (theirs,) = (line for line in read_metrics(offline.directory) if line["kind"] == "evaluation")
    assert [line["step"] for line in evaluations] == [4, 8]
    assert evaluations[-1]["loss"] == theirs["loss"] and "acceptance_length" not in evaluations[-1]
    assert caplog.text.count("held-out chats are not decoded") == 1


def test_layers_are_not_loaded_where_nothing_needs_them(files, tmp_path):
    fields = {"data__features": str(files / "stored"), "data__heldout_file": ""}
    trainer = prepare(experiment(files, tmp_path, **fields))
    assert not trainer.target.has_layers and trainer.target.fingerprint == fingerprint(files / "target")
    decodes = {"data__heldout_file": str(files / "heldout.jsonl"), "evaluation__decode_prompts": 3}
    trainer = prepare(experiment(files, tmp_path, **fields | decodes))
    assert trainer.target.has_layers and len(trainer.evaluate.prompts) == 3
    absent = without_layers(files, tmp_path / "target", "one file")
    for start in ("regression", "target"):
        fields |= {"model__initialisation": start, "model__target": str(absent)}
        with pytest.raises(ConfigError, match=f"weights of it are missing, which model.initialisation='{start}' needs"):
            prepare(experiment(files, tmp_path / "run", **fields))
    (tmp_path / "run" / "checkpoints" / "4").mkdir(parents=True)  # a run to go on with, whose start is long past
    assert not prepare(experiment(files, tmp_path / "run", **fields)).target.has_layers


def test_another_target_is_refused_unless_allowed(files, tmp_path):
    other = write_target(tmp_path / "other", seed=1)
    fields = {"data__features": str(files / "stored"), "model__target": str(other)}
    for prompts, reason in ((0, "whose embedding or head differs"), (4, "target_fingerprint")):
        refused = experiment(files, tmp_path / "run", **fields, evaluation__decode_prompts=prompts)
        message = rf"data\.features=.*made for another target \(.*{reason}.*data\.allow_other_target=True"
        with pytest.raises(ConfigError, match=message):
            prepare(refused)
    allowed = prepare(experiment(files, tmp_path / "run", **fields, data__allow_other_target=True, training__steps=0))
    assert allowed.run().steps == 0


def test_another_target_with_the_same_embedding_is_refused_where_its_weights_tell(files, tmp_path):
    shutil.copytree(files / "target", tmp_path / "target")
    rewrite(tmp_path / "target", lambda tensors: {name: x + (name not in TABLES) for name, x in tensors.items()})
    fields = {"data__features": str(files / "stored"), "model__target": str(tmp_path / "target")}
    with pytest.raises(ConfigError, match=r"data\.features=.*made for another target \(.*target_fingerprint"):
        prepare(experiment(files, tmp_path / "run", **fields, data__heldout_file=""))


# What a run refuses


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"data__features": "absent"},
            "absent holds no features; make them with python -m dflash_jax.data.features",
        ),
        ({"data__features": ""}, "data.features='': must be a folder of features"),
        ({"training__feature_cache": "memory"}, "training.feature_cache='memory': must be 'none' where data.features"),
        ({"model__target_layer_ids": (0, 1)}, r"of layers \[0, 2\], the drafter reads \[0, 1\]"),
        ({"model__target_dtype": "bfloat16"}, "float32, model.target_dtype is bfloat16"),
        ({"data__max_length": 16}, r"of other heldout rows \(.*heldout\.jsonl'\) than file"),
        ({"data__max_rows": 24}, r"of other train rows \(.*chats\.jsonl'\) than file"),
        ({"evaluation__rows": 9}, "of 8 heldout rows, evaluation.rows asks for 9"),
    ],
)
def test_features_that_do_not_fit_the_run_are_refused(files, tmp_path, fields, message):
    with pytest.raises(ConfigError, match=message):
        prepare(experiment(files, tmp_path, **{"data__features": str(files / "stored")} | fields))


def test_a_warm_start_decides_the_layers(files, offline):
    start = {"model__warm_start": str(offline.drafter_dir), "model__target_layer_ids": (), "model__num_taps": 3}
    assert "nothing was left to compute" in store(experiment(files, files, **start), files / "stored")[0]


def test_what_was_not_stored_comes_from_the_target_or_is_refused(files, tmp_path):
    fields = {"training__loss": "labels", "data__heldout_file": ""}
    store(experiment(files, tmp_path, **fields), tmp_path / "out")
    stored = {"data__features": str(tmp_path / "out"), "training__steps": 0}
    whole = prepare(experiment(files, tmp_path, **stored, training__loss="labels", model__initialisation="target"))
    assert isinstance(whole.features, StoredFeatures) and isinstance(whole.evaluate.features, OnlineFeatures)
    with pytest.raises(ConfigError, match="no features of heldout rows; there are train"):
        prepare(experiment(files, tmp_path, **stored, training__loss="labels"))
    with pytest.raises(ConfigError, match="without the final hidden states"):
        prepare(experiment(files, tmp_path, **stored, data__heldout_file=""))


def test_a_shard_of_other_features_is_named_before_training_and_by_the_command(files, tmp_path):
    out = Path(shutil.copytree(files / "stored", tmp_path / "out"))
    other = {"model__target": str(write_target(tmp_path / "other", seed=1))}
    store(experiment(files, files, **other), tmp_path / "others")
    name = "train-00002-of-00006.safetensors"
    shutil.copy(tmp_path / "others" / name, out / name)  # of the same rows, in the same shapes
    message = rf"out/{name} is of other features than schema\.json beside it, .*; delete it and run the command"
    with pytest.raises(ConfigError, match=rf"data\.features='.*out': .*{message}"):
        prepare(experiment(files, tmp_path / "run", data__features=str(out)))
    with pytest.raises(ValueError, match=message):
        store(experiment(files, files), out)
    (out / name).unlink()
    assert "shards from before 7" in lines_of(store(experiment(files, files), out)[0])
    assert shards_of(out) == shards_of(files / "stored")


def test_one_process_at_a_time_writes(files):
    with only_writer(files / "stored"), pytest.raises(ValueError, match="in use by another process"):
        store(experiment(files, files), files / "stored")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shard_gb=0"], "--shard_gb=0.0: must be more than 0"),
        (["--shard_gb=inf"], "--shard_gb=inf: must be more than 0, and finite"),
        (["--config.data.nothing=1"], "data.nothing: no such field"),
        (["--config.model.target=absent"], "model.target='absent'"),
        (["--config.data.train_file=absent.jsonl"], "data.train_file='absent.jsonl'"),
    ],
)
def test_wrong_flags_are_one_message(files, tmp_path, capsys, arguments, message):
    config = write_config(tmp_path / "config.py", experiment(files, files))
    with pytest.raises(SystemExit):
        features.main(["features", f"--config={config}", f"--out={tmp_path}/out", *arguments])
    assert message in capsys.readouterr().err

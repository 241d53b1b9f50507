"""Stored features on disk: how rows are shared out, and files that are not what schema.json says, by their headers."""

import dataclasses
import json
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from dflash_jax.data import feature_store
from dflash_jax.data.feature_store import (
    FeatureSchema,
    SplitSchema,
    StoredSplit,
    plan_shards,
    read_index,
    read_schema,
    shard_path,
    tensors_of,
    write_schema,
    write_shard,
)

LENGTHS = [9, 2, 5, 2, 8, 7, 1]
SCHEMA = FeatureSchema(
    target="own",
    target_fingerprint="0" * 16,
    tokenizer_sha256=None,
    tables_sha256="1" * 64,
    layers=(0, 2),
    hidden=True,
    hidden_size=4,
    dtype="bfloat16",
    pass_rows=2,
    length_buckets=(16,),
    scan_layers=False,
    shard_bytes=200,
    splits={"train": SplitSchema("chats.jsonl", "2" * 64, len(LENGTHS), sum(LENGTHS), 3)},
)
NAMES = [f"train-{index:05}-of-00003.safetensors" for index in range(3)]


def write(folder: Path, schema: FeatureSchema = SCHEMA) -> Path:
    """Features of LENGTHS; row r is r everywhere."""
    folder.mkdir(exist_ok=True)
    write_schema(folder, schema)
    for index, rows in enumerate(plan_shards(LENGTHS, token_bytes=24, pass_rows=2, shard_bytes=200)):
        lengths = [LENGTHS[row] for row in rows]
        tensors = {name: np.empty(*of) for name, of in tensors_of(schema, len(rows), sum(lengths)).items()}
        for name in {"taps", "hidden"} & tensors.keys():
            tensors[name][:] = np.repeat(rows, lengths).reshape(-1, *[1] * (tensors[name].ndim - 1))
        tensors["rows"][:], tensors["lengths"][:] = rows, lengths
        write_shard(folder, schema, "train", index, tensors)
    return folder


@pytest.fixture
def folder(tmp_path) -> Path:
    return write(tmp_path / "stored")


def refused(folder: Path, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StoredSplit(folder, "train")


def test_shards_are_planned_by_length_in_whole_passes():
    assert plan_shards(LENGTHS, token_bytes=10, pass_rows=2, shard_bytes=80) == [[6, 1, 3, 2], [5, 4], [0]]
    assert plan_shards(LENGTHS, token_bytes=10, pass_rows=3, shard_bytes=10**9) == [[6, 1, 3, 2, 5, 4, 0]]


def test_what_was_written_is_read_row_by_row_and_folders_can_be_moved(folder, tmp_path):
    stored = StoredSplit(folder.rename(tmp_path / "moved"), "train")
    assert stored.schema == SCHEMA
    for row, length in enumerate(LENGTHS):
        for name, sizes in (("taps", (2, 4)), ("hidden", (4,))):
            found = stored.read(name, row)
            assert (found.shape, found.dtype) == ((length, *sizes), ml_dtypes.bfloat16) and (found == row).all()


def test_no_features_are_read_to_open_a_folder(folder, monkeypatch):
    read = []

    class Watched:
        def __init__(self, *arguments, **options):
            self.file = safe_open(*arguments, **options)

        def __enter__(self):
            return self

        def __exit__(self, *exception):
            pass

        def get_tensor(self, name):
            read.append(name)
            return self.file.get_tensor(name)

        def __getattr__(self, name):
            return getattr(self.file, name)

    monkeypatch.setattr(feature_store, "safe_open", Watched)
    StoredSplit(folder, "train")
    assert read == ["rows", "lengths"] * 3


@pytest.mark.parametrize("kept", [0, 5, 100, -1])
def test_a_shard_that_was_cut_short_is_named(folder, kept):
    (folder / NAMES[1]).write_bytes((folder / NAMES[1]).read_bytes()[:kept])
    refused(folder, rf"stored/{NAMES[1]} is broken \(.*\); delete it and run the command that wrote it again")


@pytest.mark.parametrize(
    "fields",
    [
        {"target_fingerprint": "3" * 16},
        {"layers": (0, 3)},
        {"dtype": "float32"},
        {"hidden": False},
        {"pass_rows": 4},
        {"splits": {"train": dataclasses.replace(SCHEMA.splits["train"], rows_sha256="4" * 64)}},
    ],
)
def test_a_shard_of_other_features_is_named(folder, tmp_path, fields):
    other = write(tmp_path / "other", dataclasses.replace(SCHEMA, **fields))
    shutil.copy(other / NAMES[1], folder / NAMES[1])
    refused(folder, f"stored/{NAMES[1]} is of other features than schema.json beside it, or not in .* delete it")
    # The other way round: schema.json is not of these shards.
    shutil.copy(folder / "schema.json", other / "schema.json")
    refused(other, f"other/{NAMES[0]} is of other features")


def test_names_of_target_and_files_may_change(folder):
    named = dataclasses.replace(SCHEMA.splits["train"], source="elsewhere/chats.jsonl")
    write_schema(folder, dataclasses.replace(SCHEMA, target="moved", splits={"train": named}))
    assert StoredSplit(folder, "train").schema.target == "moved"


def test_a_shard_in_the_place_of_another_is_named(folder):
    shutil.copy(folder / NAMES[0], folder / NAMES[2])
    refused(folder, f"{NAMES[2]} is of other features than schema.json beside it, or not in its place")
    (folder / NAMES[2]).unlink()
    refused(folder, rf"stored lacks 1 of 3 shards of train rows \({NAMES[2]} …\)")


def changed(folder: Path, change) -> None:
    """Writes the second shard anew, with its hash as it was."""
    path = shard_path(folder, "train", 1, 3)
    with safe_open(path, framework="numpy") as shard:
        metadata = shard.metadata()
    save_file(change(load_file(path)), path, metadata=metadata)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: {**x, "rows": x["rows"][::-1].copy()}, "is of other features"),
        (lambda x: {**x, "lengths": x["lengths"] + 1}, "is of other features"),
        (lambda x: {**x, "rows": x["rows"].astype(np.int64)}, "is of other features"),
        (lambda x: {**x, "taps": x["taps"][1:].copy()}, r"holds .*'taps': \(\(14, 2, 4\), .* describes .*\(15, 2, 4\)"),
        (lambda x: {**x, "taps": x["taps"].astype(np.float32)}, "holds .*'F32'.* describes .*'BF16'"),
        (lambda x: {**x, "hidden": x["hidden"][:, :3].copy()}, r"holds .*\(15, 3\).* describes .*\(15, 4\)"),
        (lambda x: {name: x[name] for name in x if name != "hidden"}, "holds .* describes .*'hidden'"),
        (lambda x: {**x, "more": x["rows"]}, "holds .*'more'.* describes"),
        (lambda x: {name: x[name] for name in x if name != "rows"}, "is broken .*rows"),
    ],
)
def test_tensors_that_do_not_match_the_schema_are_named(folder, change, message):
    changed(folder, lambda tensors: tensors)
    assert read_index(folder, SCHEMA, "train", 1)[0].tolist() == [5, 4]
    changed(folder, change)
    refused(folder, rf"stored/{NAMES[1]} {message}.*; delete it")


@pytest.mark.parametrize(
    "change",
    [
        lambda content: "{",
        lambda content: "[]",
        lambda content: json.dumps(content | {"kind": "dflash_jax features 1"}),
        lambda content: json.dumps(content | {"splits": {}, "layers": "02"}),
        lambda content: json.dumps(content | {"hidden_size": "4"}),
        lambda content: json.dumps(content | {"dtype": "float16"}),
        lambda content: json.dumps(content | {"splits": {"train": {"rows": 7}}}),
        lambda content: json.dumps({name: content[name] for name in content if name != "dtype"}),
    ],
)
def test_a_schema_that_can_not_be_read_is_named(folder, change):
    path = folder / "schema.json"
    path.write_text(change(json.loads(path.read_text())))
    with pytest.raises(ValueError, match="stored/schema.json does not describe features that this version can read"):
        read_schema(folder)

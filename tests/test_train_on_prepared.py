"""Training on a prepared set is training on its rows; a set or file made for another target is refused."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import tiny_run
from tiny_tokenizer import tiny_tokenizer

from dflash_jax.checkpoints.safetensors_io import fingerprint
from dflash_jax.checkpoints.target_files import describe_target
from dflash_jax.config import ConfigError
from dflash_jax.data.prepared import PreparedRow, write_prepared
from dflash_jax.data.records import read_chats
from dflash_jax.data.rows import TrainingRow, rows_from_regenerated
from dflash_jax.evaluation.training_run import last_prompt, train, training_rows


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A target, a file of its regenerated chats, and those chats in a prepared set that says who made it."""
    folder = tmp_path_factory.mktemp("data")
    target = tiny_run.write_target(folder / "target")
    chats = tiny_run.write_rows(folder / "chats.jsonl", tiny_run.own_rows(target, 10))
    rows, _ = rows_from_regenerated(read_chats(chats)[0], max_length=32)
    made_of = [PreparedRow(row, split, "chats.jsonl", 1) for row in rows for split in ("train", "heldout")]
    for name, made_for in {"own": fingerprint(target), "other": "0" * 16}.items():
        write_prepared(folder / name, made_of, {"target": name, "target_fingerprint": made_for})
    return folder


def run(data, out, train_file, heldout_file, **fields):
    fields = {"training__steps": 4, "evaluation__decode_max_new_tokens": 6} | fields
    return tiny_run.settings(
        data / "target", data / train_file, out, data__heldout_file=str(data / heldout_file), **fields
    )


def test_a_prepared_set_trains_as_the_file_of_its_rows(data, tmp_path):
    outcomes = [
        train(run(data, tmp_path / name, name, name, data__max_rows=9, logging__every_steps=2))
        for name in ("chats.jsonl", "own")
    ]
    files, sets = (tiny_run.read_metrics(tmp_path / name) for name in ("chats.jsonl", "own"))
    timeless = [
        [{name: value for name, value in line.items() if "second" not in name} for line in lines]
        for lines in (files, sets)
    ]
    assert timeless[0] == timeless[1] and len(files) > 2
    assert outcomes[0].acceptance_length == outcomes[1].acceptance_length
    exported = [(outcome.drafter_dir / "model.safetensors").read_bytes() for outcome in outcomes]
    assert exported[0] == exported[1]


def test_what_was_made_for_another_target_is_refused_unless_allowed(data, tmp_path):
    with pytest.raises(ConfigError, match=r"data\.train_file=.*made for another target \('other'.*allow_other_target"):
        train(run(data, tmp_path / "a", "other", "own"))
    with pytest.raises(ConfigError, match=r"data\.heldout_file=.*made for another target"):
        train(run(data, tmp_path / "b", "own", "other"))
    chats = tmp_path / "chats.jsonl"
    chats.write_bytes((data / "chats.jsonl").read_bytes())
    (tmp_path / "chats.jsonl.meta.json").write_text(json.dumps({"target_fingerprint": "0" * 16, "target": "x"}))
    with pytest.raises(ConfigError, match=r"chats\.jsonl.* was made for another target \('x'"):
        train(run(data, tmp_path / "c", chats, "own"))
    allowed = run(data, tmp_path / "d", chats, "other", data__allow_other_target=True, training__steps=0)
    assert train(allowed).steps == 0


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_rows_that_no_bucket_holds_are_told(data, tmp_path, split):
    short = {"data__max_length": 16, "data__length_buckets": (16,)}
    files = ("own", "chats.jsonl") if split == "train" else ("chats.jsonl", "own")
    message = rf"data\.{split}_file='.*own': row \d+ has 22 tokens, and the last of data\.length_buckets=\(16,\) is "
    with pytest.raises(ConfigError, match=message + r"shorter; .* \(data\.max_length does not cut a prepared set"):
        train(run(data, tmp_path, *files, **short))


def test_a_set_for_another_tokenizer_is_refused(data):
    experiment = run(data, data, "own", "own")
    made_for = json.loads((data / "own/prepared_chats/1.0.0/metadata.json").read_text())
    target = SimpleNamespace(
        fingerprint=made_for["target_fingerprint"],
        tokenizer=tiny_tokenizer("qwen3"),
        config=SimpleNamespace(vocab_size=tiny_run.VOCABULARY),
    )
    (row,) = rows_from_regenerated(read_chats(data / "chats.jsonl")[0][:1], max_length=32)[0]
    made_for |= {"tokenizer_sha256": "e" * 64}
    write_prepared(data / "tokens", [PreparedRow(row, "train", "a", 1)], made_for)
    with pytest.raises(ConfigError, match="made for another tokenizer"):
        training_rows(str(data / "tokens"), "data.train_file", experiment, target, split="train")


def test_the_prompt_of_a_row_is_what_precedes_its_last_answer():
    mask = np.asarray([0, 0, 1, 1, 0, 0, 1, 1, 0], bool)
    assert last_prompt(TrainingRow("a", np.arange(9), mask)) == [0, 1, 2, 3, 4, 5]
    assert last_prompt(TrainingRow("a", np.arange(3), np.asarray([0, 1, 1], bool))) == [0]
    assert last_prompt(TrainingRow("a", np.arange(2), np.ones(2, bool))) == []


def test_a_target_without_tokenizer_cannot_be_prepared_for(data):
    with pytest.raises(ValueError, match=r"has no tokenizer\.json; chats can't be rendered"):
        describe_target(data / "target")

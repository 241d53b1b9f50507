"""The preparing command: every row is kept or reported, splits don't leak, the set says what it was made for."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizer import tiny_tokenizer

from dflash_jax.checkpoints.target_files import TargetDescription
from dflash_jax.data import prepare, prepared, records
from dflash_jax.data.prepared import PreparedSplit
from dflash_jax.data.preview import preview
from dflash_jax.data.provenance import tokenizer_hash
from dflash_jax.data.report import ReadReport, histogram
from dflash_jax.data.rows import TrainingRow, make_rows
from dflash_jax.data.turns import TurnRenderer

TOKENIZER = tiny_tokenizer("qwen3")
TARGET = TargetDescription(TOKENIZER, 400, "f" * 16, "tiny", (TOKENIZER.eos_token_id,), 1024)
OFF = {"enable_thinking": False}
SETTINGS = prepare.PrepareSettings(template_arguments=OFF, max_length=64, heldout=0.25)


def user(text):
    return {"role": "user", "content": text}


def answer(text):
    return {"role": "assistant", "content": text}


def chat(i):
    return {"id": f"c{i}", "messages": [user(f"Question {i}?"), answer(f"Answer {i}: blue.")]}


def write(path, rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def all_rows(out):
    builder = prepared.find_folder(out)
    splits = sorted(path.name.split("-")[1].split(".")[0] for path in builder.glob("lengths-*.npy"))
    return {split: PreparedSplit(out, split) for split in splits}


BAD = [
    "[]",
    "{",
    json.dumps({"messages": [answer("x")]}),
    json.dumps({"messages": [{"role": "system", "content": "x"}]}),
]
BAD += [json.dumps({"messages": [user("a"), user("b")]}), json.dumps({"messages": [user("a"), answer(" ")]})]
BAD += [json.dumps({"input_ids": [1, 2, 900], "loss_mask": [0, 1, 1]}), json.dumps({**chat(1), "split": "../x"})]
BAD += [json.dumps({"messages": [user("long " * 90), answer("never reached")]})]
GOOD = [json.dumps(chat(i)) for i in range(4)]
GOOD += [json.dumps({"input_ids": [1, 2, 3], "labels": [-100, 2, 3]})]
GOOD += [json.dumps({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho ho."}] * 2})]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([*BAD, *GOOD, "", GOOD[0]]) | st.text(max_size=20), max_size=40))
def test_rows_in_are_rows_kept_and_rows_reported(tmp_path_factory, lines):
    path = tmp_path_factory.getbasetemp() / "property.jsonl"
    data = "".join(line.replace("\n", " ") + "\n" for line in lines).encode("utf-8", "surrogatepass")
    path.write_bytes(data)
    report = ReadReport("x")
    read = records.iterate(path, prepare._parse, report)
    renderer = TurnRenderer(TOKENIZER, template_arguments=OFF)
    made = list(make_rows(read, report, max_length=64, embedding_rows=400, renderer=renderer))
    numbers = [source.line for source, _ in made] + [row.line for row in report.skipped]
    assert sorted(numbers) == [n for n, line in enumerate(data.split(b"\n"), start=1) if line.strip()]
    assert report.rows_in == report.rows_out + len(report.skipped) == len(numbers) and report.rows_out == len(made)
    rows = [row for _, several in made for row in several]
    assert report.lengths == [len(row.tokens) for row in rows]
    assert report.supervised == sum(int(row.loss_mask.sum()) for row in rows)
    assert report.rows_out == sum(line in GOOD for line in lines) and all(len(several) >= 1 for _, several in made)


def test_a_set_is_made_with_its_report_and_provenance(tmp_path):
    source = write(tmp_path / "chats.jsonl", [*GOOD, *BAD])
    shown = []
    report = prepare.prepare(source, tmp_path / "set", TARGET, SETTINGS, show=lambda _, row: shown.append(row.id))
    rows = {split: list(found) for split, found in all_rows(tmp_path / "set").items()}
    assert report.rows_in == len(GOOD) + len(BAD) and report.rows_out == len(GOOD)
    assert [row.line for row in report.skipped] and {row.line for row in report.skipped} == set(
        range(len(GOOD) + 1, len(GOOD) + len(BAD) + 1)
    )
    ids = sorted(row.id for split in rows.values() for row in split)
    assert ids == sorted(shown) == sorted(["c0", "c1", "c2", "c3", "line-5", "line-6.0", "line-6.1"])
    table = [" ".join(line.split()) for line in report.table().splitlines()]
    assert f"rows read {len(GOOD) + len(BAD)}" in table and f"rows kept {len(GOOD)}" in table
    assert "training rows 7" in table and "skipped: broken JSON 1 row 8" in table
    assert f"tokens {sum(report.lengths)}" in table and "truncated rows 0" in table
    assert any(line.startswith(f"supervised tokens {report.supervised} ") for line in table)
    made_of = prepared.read_provenance(tmp_path / "set")
    assert made_of["target"] == "tiny" and made_of["target_fingerprint"] == TARGET.fingerprint
    assert made_of["tokenizer_sha256"] == tokenizer_hash(TOKENIZER) and made_of["template_arguments"] == OFF
    assert list(made_of["files"]) == ["chats.jsonl"] and made_of["max_length"] == 64
    split = next(iter(all_rows(tmp_path / "set").values()))
    assert split.origin(0)[0] == "chats.jsonl" and 1 <= split.origin(0)[1] <= len(GOOD)


@pytest.mark.long  # processes that import all of it
def test_any_number_of_workers_makes_the_same_set_and_report(tmp_path):
    source = write(tmp_path / "chats.jsonl", [*(json.dumps(chat(i)) for i in range(700)), *GOOD, *BAD])
    limited = dataclasses.replace(SETTINGS, limit=700 + len(GOOD) + 3)
    reports, files, shown = [], [], []
    for workers in (0, 2):
        out = tmp_path / str(workers)
        reports.append(
            prepare.prepare(source, out, TARGET, limited, workers=workers, show=lambda _, row: shown.append(row.id))
        )
        folder = prepared.find_folder(out)
        files.append({path.name: path.read_bytes() for path in folder.iterdir() if path.name != "dataset_info.json"})
    one, two = reports
    assert dataclasses.replace(one, source="") == dataclasses.replace(two, source="")
    assert one.rows_in == 700 + len(GOOD) + 3 and len(one.skipped) == 3
    assert files[0] == files[1] and any("array_record" in name for name in files[0])
    assert shown[: len(shown) // 2] == shown[len(shown) // 2 :] and shown[0] == "c0"


def test_chats_with_one_prompt_are_on_one_side_and_named_splits_are_kept(tmp_path):
    rows = [{"messages": [user(f"Question {i % 40}?"), answer(f"Answer {i}: blue.")]} for i in range(120)]
    rows += [{**chat(i), "split": "validation"} for i in range(1000, 1003)]
    prepare.prepare(write(tmp_path / "a.jsonl", rows), tmp_path / "set", TARGET, SETTINGS)
    found = all_rows(tmp_path / "set")
    assert {split: len(found[split]) for split in found} | {"heldout": 0, "train": 0} == {
        "heldout": 0,
        "train": 0,
        "validation": 3,
    }
    sides = {name: {found[name].origin(i)[1] for i in range(len(found[name]))} for name in ("heldout", "train")}
    prompts = {name: {line % 40 for line in lines} for name, lines in sides.items()}
    assert prompts["heldout"] and not prompts["heldout"] & prompts["train"]
    assert len(sides["heldout"]) == 3 * len(prompts["heldout"]) and len(sides["train"]) + len(sides["heldout"]) == 120
    other = prepare.PrepareSettings(template_arguments=OFF, heldout=0.25, seed=1)
    sources = [records.Conversation(i, "x", None, [user(f"Question {i}?")]) for i in range(400)]
    splits = [[prepare.split_of(source, 0.25, part.seed) for source in sources] for part in (SETTINGS, other)]
    assert splits[0] != splits[1]
    # Binomial(400, 1/4): mean 100, deviation 8.7; the hash is fixed, so this holds always or never.
    assert all(abs(part.count("heldout") - 100) < 44 for part in splits)


def test_strict_writes_nothing(tmp_path):
    source = write(tmp_path / "a.jsonl", [*GOOD, "{"])
    strict = prepare.PrepareSettings(template_arguments=OFF, strict=True)
    with pytest.raises(records.BadRowsError, match=r"(?s)1 bad rows.*row 7: broken JSON"):
        prepare.prepare(source, tmp_path / "set", TARGET, strict)
    assert not prepared.is_prepared(tmp_path / "set")
    with pytest.raises(ValueError, match=r"(?s)no row is left.*broken JSON"):
        prepare.prepare(write(tmp_path / "b.jsonl", ["{"]), tmp_path / "set", TARGET, SETTINGS)
    with pytest.raises(ValueError, match="gsm8k is a set of prompts to evaluate with"):
        prepare.prepare("gsm8k", tmp_path / "set", TARGET, SETTINGS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, None),
        ({"target_fingerprint": "e" * 16}, r"chats\.jsonl was made for another target \('old'"),
        ({"tokenizer_sha256": "e" * 64}, "another tokenizer"),
        ({"template_arguments": {}}, r"regenerated with template_arguments=\{\}"),
    ],
)
def test_regenerated_chats_are_taken_as_they_are_and_only_for_their_target(tmp_path, change, message):
    row = {**chat(0), "prompt_ids": [5, 6], "answer_ids": [7, 8], "finish_reason": "stop"}
    source = write(tmp_path / "chats.jsonl", [row])
    meta = {"target": "old", "target_fingerprint": TARGET.fingerprint, "tokenizer_sha256": tokenizer_hash(TOKENIZER)}
    (tmp_path / "chats.jsonl.meta.json").write_text(json.dumps(meta | {"template_arguments": OFF} | change))
    if message:
        with pytest.raises(ValueError, match=message):
            prepare.prepare(source, tmp_path / "set", TARGET, SETTINGS)
        return
    prepare.prepare(source, tmp_path / "set", TARGET, SETTINGS)
    ((found,),) = [list(split) for split in all_rows(tmp_path / "set").values()]
    assert found.tokens.tolist() == [5, 6, 7, 8] and found.loss_mask.tolist() == [False, False, True, True]


def test_preview_marks_what_is_supervised():
    renderer = TurnRenderer(TOKENIZER, template_arguments=OFF)
    (made,) = renderer.tokenise([renderer.render([user("Hi?"), answer("Naïve 🎈.")])])[0]
    row = TrainingRow("a", made.tokens, made.loss_mask)
    head = f"a: {len(made.tokens)} tokens, {int(made.loss_mask.sum())} supervised\n"
    text = "<|im_start|>user\nHi?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert preview(TOKENIZER, row, colour=False) == f"{head}{text}⟦Naïve 🎈.<|im_end|>⟧\n"
    assert preview(TOKENIZER, row, colour=True) == f"{head}{text}\x1b[32mNaïve 🎈.<|im_end|>\x1b[0m\n"


def test_histogram_bins_are_powers_of_two():
    lines = [" ".join(line.replace("█", "").split()) for line in histogram([1, 2, 3, 4, 5, 8, 9, 300])]
    assert lines[1:6] == ["1 … 1 1", "2 … 2 1", "3 … 4 2", "5 … 8 2", "9 … 16 1"]
    assert lines[-1] == "257 … 512 1" and histogram([]) == []


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    TOKENIZER.save_pretrained(folder)
    config = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 400, "hidden_size": 32}
    config |= {"intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config |= {"head_dim": 8, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "max_position_embeddings": 512}
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    return folder


def command(target_folder, *arguments):
    return [sys.executable, "-m", "dflash_jax.data.prepare", f"--target={target_folder}", *arguments]


def test_the_command_prepares_again_after_it_was_killed(target_folder, tmp_path):
    source = write(tmp_path / "chats.jsonl", [chat(i) for i in range(3000)])
    arguments = [f"--chats={source}", f"--out={tmp_path}/set", '--template_arguments={"enable_thinking": false}']
    running = subprocess.Popen(command(target_folder, *arguments), stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not list((tmp_path / "set").glob("*/incomplete.*/*part*")) and time.monotonic() < deadline:
        assert running.poll() is None, "it was done before it could be killed"
        time.sleep(0.005)
    os.kill(running.pid, signal.SIGKILL)
    running.wait()
    assert not prepared.is_prepared(tmp_path / "set")
    done = subprocess.run(command(target_folder, *arguments, "--preview=1"), capture_output=True, text=True, check=True)
    table = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert {"rows read 3,000", "rows kept 3,000", "training rows 3,000"} <= set(table)
    assert "⟦Answer 0: blue.<|im_end|>⟧" in done.stdout and done.stdout.count("⟦") == 1
    assert done.stderr == ""  # the libraries keep their diaries to themselves
    found = all_rows(tmp_path / "set")
    assert sum(map(len, found.values())) == 3000 and 0 < len(found["heldout"]) < 200
    assert np.all(np.diff([found["train"].origin(i)[1] for i in range(100)]) > 0)


def test_a_folder_that_cannot_be_written_to_is_one_message(monkeypatch, capsys):
    def refused(flag):
        raise PermissionError(13, "Permission denied", "sets/chats")

    monkeypatch.setattr(prepare, "_run", refused)
    with pytest.raises(SystemExit) as ended:
        prepare.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err == "error: [Errno 13] Permission denied: 'sets/chats'\n"

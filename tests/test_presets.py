"""Known sets: rows of the published schema become the right prompts, from local files and from the hub's layout."""

import json

import pyarrow
import pyarrow.parquet
import pytest
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError

from dflash_jax.data import presets, records
from dflash_jax.data.report import ReadReport

TURNS = [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Yes."}]
SHAREGPT = [{"from": "human", "value": "Hi?"}, {"from": "gpt", "value": "Yes."}]

# One row of each set of chats, with the fields of the published schema.
CHATS = {
    "nemotron": {
        "uuid": "u-1",
        "license": "cc-by-4.0",
        "generator": "Qwen3-235B-A22B",
        "version": "v2",
        "category": "chat",
        "reasoning": "off",
        "messages": [{"role": "system", "content": ""}, *TURNS],
        "metadata": "{}",
    },
    "codealpaca": {"instruction": "Hi?", "input": "", "output": "Yes."},
    "ultrachat": {"prompt": "Hi?", "prompt_id": "p-1", "messages": TURNS},
    "sharegpt": {"id": "s_0", "conversations": SHAREGPT},
    "longalign": {"messages": TURNS, "length": 8192},
    "perfectblend": {"conversations": SHAREGPT, "source": "meta-math/MetaMathQA"},
}
IDS = {"nemotron": "u-1", "ultrachat": "p-1", "sharegpt": "s_0"}

BOXED = "\n\nReason step by step, and put the final answer in \\boxed{}."
# Rows of evaluation sets with the prompt that they give.
EVALUATION = {
    "gsm8k": ({"question": "How many {x}?", "answer": "#### 3"}, "How many {x}?" + BOXED),
    "math500": ({"problem": "Find $x^{2}$.", "solution": "…", "answer": "4", "unique_id": "a.json"}, None),
    "humaneval": (
        {"task_id": "HumanEval/0", "prompt": "def f():\n", "canonical_solution": "", "test": "", "entry_point": "f"},
        "Complete this Python function. Answer with the whole function.\n\n```python\ndef f():\n\n```",
    ),
    "mbpp": ({"task_id": 11, "prompt": "Write a function.", "code": "", "test_list": ["assert f()"]}, None),
    "mtbench": ({"prompt": ["First?", "And then?"], "category": "math", "reference": [], "prompt_id": 81}, "First?"),
    "alpaca": ({"instruction": "Add.", "input": "1, 2", "output": "3", "text": "…"}, "Add.\n\n1, 2"),
    "livecodebench": (
        {"question_content": "Sort.", "question_id": "q1", "starter_code": "class S:", "difficulty": "easy"},
        "Sort.\n\nSolve this in Python. Begin with this code:\n\n```python\nclass S:\n```",
    ),
    "aime24": ({"id": 60, "problem": "Find n.", "answer": "33"}, "Find n." + BOXED),
    "aime25": ({"id": "0", "problem": "Find n.", "answer": "33"}, "Find n." + BOXED),
}


def write(folder, preset, rows):
    """Writes rows where the set has them on the hub, in its kind of file."""
    path = folder / preset.patterns[0].replace("*", "00000-of-00001" if "-*" in preset.patterns[0] else "")
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows, indent=1))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_every_preset_is_tested():
    assert presets.PRESETS.keys() == CHATS.keys() | EVALUATION.keys()
    assert {name for name, preset in presets.PRESETS.items() if preset.is_evaluation} == EVALUATION.keys()


@pytest.mark.parametrize("name", CHATS)
def test_chats_of_known_sets_are_read_from_their_files(name, tmp_path):
    path = write(tmp_path, presets.PRESETS[name], [CHATS[name]] * 2)
    for source in (tmp_path, path):
        prompts, report = presets.read_prompts(str(source), preset=name)
        assert report.skipped == [] and report.rows_in == report.rows_out == len(prompts) == 2
        assert prompts[0].messages == TURNS[:1] and prompts[0].id == IDS.get(name, "line-1")
    whole = records.iterate(path, records.training_row_of, ReadReport("x"))
    assert [row.messages for row in whole] == [TURNS, TURNS]


@pytest.mark.parametrize("name", EVALUATION)
def test_prompts_of_evaluation_sets_are_worded_as_stated(name, tmp_path):
    row, prompt = EVALUATION[name]
    path = write(tmp_path, presets.PRESETS[name], [row, dict.fromkeys(row)])
    (conversation,), report = presets.read_prompts(str(path), preset=name)
    assert [skipped.line for skipped in report.skipped] == [2]
    (message,) = conversation.messages
    assert message["role"] == "user" and message["content"] == (prompt or message["content"])
    assert "{" not in message["content"].replace("{x}", "").replace("{2}", "").replace("{}", "")
    assert conversation.id in (str(row.get(presets.PRESETS[name].id_field)), "line-1")


def test_wording_follows_the_fields_that_a_row_has():
    assert presets.PRESETS["alpaca"].turns({"instruction": "Add.", "input": ""}) == ["Add."]
    assert presets.PRESETS["mbpp"].turns({"text": "Write it.", "task_id": 1}) == ["Write it. Write it in Python."]
    (without_code,) = presets.PRESETS["livecodebench"].turns({"question_content": "Sort.", "starter_code": ""})
    assert without_code.endswith("reads standard input and writes standard output.")
    assert presets.PRESETS["mtbench"].turns({"prompt": ["a", "b"]}) == ["a", "b"]


@pytest.mark.parametrize("source", ["ultrachat", "HuggingFaceH4/ultrachat_200k"])
def test_hub_sets_are_downloaded_by_name_or_id(source, tmp_path, monkeypatch):
    asked = {}

    def download(hub_id, **options):
        asked.update(options, hub_id=hub_id)
        write(tmp_path, presets.PRESETS["ultrachat"], [CHATS["ultrachat"]])
        return str(tmp_path)

    monkeypatch.setattr(presets, "snapshot_download", download)
    (row,), _ = presets.read_prompts(source)
    assert row.id == "p-1" and row.messages == TURNS[:1]
    assert asked == {
        "hub_id": "HuggingFaceH4/ultrachat_200k",
        "repo_type": "dataset",
        "allow_patterns": ["data/train_sft-*.parquet"],
    }


def test_any_set_of_the_hub_is_read_by_its_forms(tmp_path, monkeypatch):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "a.jsonl").write_text(json.dumps({"conversations": SHAREGPT}))
    monkeypatch.setattr(presets, "snapshot_download", lambda *_, **__: str(tmp_path))
    assert presets.read_prompts("some/set")[0][0].messages == TURNS[:1]


class _Response:  # what the hub's errors ask of a response
    headers: dict = {}  # noqa: RUF012
    request = None


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (LocalEntryNotFoundError("x"), r"could not be downloaded \(offline\?\); download data/train_sft"),
        (GatedRepoError("x", response=_Response()), "needs its terms accepted"),
        (OSError("x"), "offline"),
    ],
)
def test_what_the_hub_refuses_is_explained(error, message, monkeypatch):
    def download(*_, **__):
        raise error

    monkeypatch.setattr(presets, "snapshot_download", download)
    with pytest.raises(ValueError, match=message):
        presets.find_files("ultrachat", presets.PRESETS["ultrachat"])


def test_sources_that_are_nothing_are_named(tmp_path):
    with pytest.raises(ValueError, match="the name of the set is empty"):
        presets.read_prompts("")
    with pytest.raises(ValueError, match=r"absent\.jsonl is neither a file or folder, nor a hub id, nor one of nemo"):
        presets.find_files("absent.jsonl", presets.CHATS)
    with pytest.raises(ValueError, match="there is no preset 'gsm'; there are nemotron"):
        presets.find_preset("gsm", "x")
    with pytest.raises(ValueError, match=r"holds none of the files main/test-\*"):
        presets.find_files(str(tmp_path), presets.PRESETS["gsm8k"])


def test_limit_and_strictness_cover_all_files_of_a_set(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text('{"prompt": "x"}\n[]\n')
    prompts, report = presets.read_prompts(str(tmp_path), limit=3)
    assert (len(prompts), report.rows_in, len(report.skipped)) == (2, 3, 1)
    with pytest.raises(records.BadRowsError, match="2 bad rows"):
        presets.read_prompts(str(tmp_path), strict=True)


def test_rows_without_ids_in_files_of_one_name_are_told_apart(tmp_path):
    for folder in ("a", "b/c"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "chats.jsonl").write_text('{"prompt": "x"}\n')
    prompts, _ = presets.read_prompts(str(tmp_path))
    assert [prompt.id for prompt in prompts] == ["a/chats.jsonl:line-1", "b/c/chats.jsonl:line-1"]
    (tmp_path / "b/c/chats.jsonl").rename(tmp_path / "b/c/more.jsonl")
    prompts, _ = presets.read_prompts(str(tmp_path))
    assert [prompt.id for prompt in prompts] == ["chats.jsonl:line-1", "more.jsonl:line-1"]

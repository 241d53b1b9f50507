"""The regeneration command as a user runs it, on a tiny random target, against greedy decoding by torch."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from absl import flags
from flax import nnx
from small_models import drafter_config
from stub_server import StubServer, completion, spoken
from tiny_models import torch_target
from tiny_tokenizer import tiny_tokenizer

from dflash_jax.checkpoints.drafter_export import export_drafter
from dflash_jax.checkpoints.huggingface import load_target
from dflash_jax.data import chat, records, regenerate
from dflash_jax.models.drafter import Drafter

pytestmark = pytest.mark.usefixtures("compiled_programs")
BUDGET = 9
TOKENIZER = tiny_tokenizer("qwen3")
CONTENTS = ["Name a colour.", "And another? I am fine, how are you?", "Blue.", "Red", "Hello there"]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    model = torch_target("qwen3", vocab_size=len(TOKENIZER) + 3)
    model.save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return folder, model


@pytest.fixture(scope="module")
def drafter(target, tmp_path_factory):
    """A random drafter for the target, exported."""
    config = drafter_config(load_target(target[0]).config, target_layer_ids=(0,))
    out = tmp_path_factory.mktemp("drafters") / "random"
    return export_drafter(Drafter(config, rngs=nnx.Rngs(1)), config, out)


@pytest.fixture
def basic(target, tmp_path):
    """Flags of a run over CONTENTS and one bad row."""
    lines = [json.dumps({"id": c, "messages": [{"role": "user", "content": c}]}) for c in CONTENTS]
    (tmp_path / "prompts.jsonl").write_text("\n".join([*lines[:2], '{"messages": []}', *lines[2:]]))
    return [f"--target={target[0]}", f"--prompts={tmp_path}/prompts.jsonl", f"--max_new_tokens={BUDGET}"]


def _run(*arguments: str, say=lambda line: None) -> str:
    """The command in this process."""
    values = flags.FlagValues()
    regenerate.define_flags(values)
    values(["regenerate", *arguments])
    return regenerate.run(values, say=say)


def _command(*arguments: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1]), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "dflash_jax.data.regenerate", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def _lines(table: str) -> set[str]:
    return {" ".join(line.split()) for line in table.splitlines()}


def test_command_writes_the_greedy_answers_of_the_target(target, basic, tmp_path):
    _, model = target
    out = tmp_path / "chats.jsonl.gz"
    arguments = [*basic, f"--out={out}", "--batch_size=2", '--template_arguments={"enable_thinking": false}']

    with pytest.raises(ValueError, match='row 3: "messages" is empty'):
        _run(*arguments, "--strict")
    assert not out.exists()

    done = _command(*arguments)
    assert done.returncode == 0, done.stderr
    chats, _ = records.read_chats(out, strict=True)
    assert [row.id for row in chats] == CONTENTS
    for row in chats:
        prompt = chat.render(
            TOKENIZER,
            row.messages[:-1],
            add_generation_prompt=True,
            template_arguments={"enable_thinking": False},
        )
        assert row.prompt_ids == prompt
        with torch.no_grad():
            expected = model.generate(
                torch.tensor([prompt]), max_new_tokens=BUDGET, do_sample=False, eos_token_id=TOKENIZER.eos_token_id
            )
        assert row.answer_ids == expected[0, len(prompt) :].tolist()
        assert row.finish_reason == ("stop" if row.answer_ids[-1] == TOKENIZER.eos_token_id else "length")
    assert {"rows read 6", "rows kept 5", 'skipped: "messages" is empty 1 row 3'} <= _lines(done.stdout)
    meta = json.loads(Path(f"{out}.meta.json").read_text())
    assert meta["template_arguments"] == {"enable_thinking": False} and meta["temperature"] == 0.0

    assert "already complete" in _run(*arguments)
    with pytest.raises(ValueError, match="max_new_tokens was 9 and is now 10"):
        _run(*arguments, "--max_new_tokens=10")


@pytest.mark.parametrize("sampling", [[], ["--temperature=0.8", "--top_p=0.9", "--top_k=40", "--seed=5"]])
def test_a_drafter_changes_no_row(drafter, basic, tmp_path, sampling):
    plain, drafted = tmp_path / "plain.jsonl", tmp_path / "drafted.jsonl"
    _run(*basic, f"--out={plain}", "--batch_size=5", *sampling)
    _run(*basic, f"--out={drafted}", "--batch_size=5", f"--drafter={drafter}", "--width=3", *sampling)
    assert drafted.read_bytes() == plain.read_bytes()
    meta = json.loads(Path(f"{drafted}.meta.json").read_text())
    assert (meta["drafter"], meta["batch_size"]) == (str(drafter), 5)


@pytest.mark.parametrize("ids", [True, False])
def test_servers_answer_in_the_place_of_our_engine(basic, tmp_path, ids):
    out = tmp_path / "chats.jsonl"
    seen = []

    def script(body, before):
        seen.append(body)
        return completion(TOKENIZER, spoken(TOKENIZER, body["prompt"]), ids=ids)

    with StubServer(script, models=[{"id": "served", "max_model_len": 1000}]) as server:
        arguments = [*basic, f"--out={out}", f"--server={server.url}/v1", "--max_new_tokens=40"]
        arguments += ["--temperature=0.5", "--top_k=7", '--server_arguments={"priority": 1}']
        said: list[str] = []
        table = _run(*arguments, say=said.append)
    chats, _ = records.read_chats(out, strict=True)
    assert [row.id for row in chats] == CONTENTS
    for row in chats:
        assert row.prompt_ids == chat.render(TOKENIZER, row.messages[:-1], add_generation_prompt=True)
        assert (row.answer_ids, row.finish_reason) == spoken(TOKENIZER, row.prompt_ids)[:2]
    shared = {"model": "served", "temperature": 0.5, "top_k": 7, "max_tokens": 40, "priority": 1}
    assert all(body.items() >= shared.items() for body in seen) and len({body["seed"] for body in seen}) == 5
    assert ("token ids as the server sampled them: 5" in table) == ids
    assert ("token ids of the server's text, which may differ from those it sampled: 5" in table) != ids
    assert ["note: token ids of the server's text" in line for line in said].count(True) == (not ids)
    meta = json.loads(Path(f"{out}.meta.json").read_text())
    assert meta["counts"]["ids_from"] == {"server" if ids else "text": 5} and meta["server_model"] == "served"


def _right(body, before):
    return completion(TOKENIZER, spoken(TOKENIZER, body["prompt"]))


def test_a_prompt_too_long_for_the_server_is_not_sent(basic, tmp_path):
    users = [[{"role": "user", "content": content}] for content in CONTENTS]
    *_, fits, longest = sorted(len(chat.render(TOKENIZER, user, add_generation_prompt=True)) for user in users)
    with StubServer(_right, models=[{"id": "served", "max_model_len": 40 + fits}]) as server:
        table = _run(*basic, f"--out={tmp_path}/c.jsonl", f"--server={server.url}", "--max_new_tokens=40")
    assert longest > fits and len(server.requests) == 4
    assert f"row 2 ({CONTENTS[1]}): a prompt longer than {fits} tokens" in table


def test_rows_of_several_files_have_ids_of_their_own(target, tmp_path):
    folder = tmp_path / "chats"
    folder.mkdir()
    for name in ("a", "b"):
        rows = [
            {"messages": [{"role": "user", "content": f"Hi {name}?"}]},
            {"id": "same", "text": "?"},
            {"messages": []},
        ]
        rows.insert(1, {"id": "same", "messages": rows[0]["messages"]})
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with StubServer(_right) as server:
        arguments = [f"--target={target[0]}", f"--server={server.url}", "--max_new_tokens=40"]
        table = _run(*arguments, f"--prompts={folder}", f"--out={tmp_path}/out.jsonl")
    chats, _ = records.read_chats(tmp_path / "out.jsonl", strict=True)
    assert [row.id for row in chats] == ["a.jsonl:line-1", "same", "b.jsonl:line-1"]
    assert {"rows read 8", "rows kept 3", "skipped: its id occurs twice 3 rows 3, 2, 3"} <= _lines(table)
    assert "row 4 (b.jsonl:line-4): " in table


def test_known_sets_are_read_as_they_are_and_those_to_evaluate_with_refused(target, tmp_path):
    rows = [{"instruction": "Add.", "input": "1, 2", "output": "3"}, {"instruction": "", "input": "", "output": "3"}]
    (tmp_path / "code_alpaca_20k.json").write_text(json.dumps(rows))
    with StubServer(_right) as server:
        arguments = [f"--target={target[0]}", f"--server={server.url}", "--max_new_tokens=40"]
        table = _run(*arguments, f"--prompts={tmp_path}", "--preset=codealpaca", f"--out={tmp_path}/out.jsonl")
        assert {"rows read 2", "rows kept 1"} <= _lines(table)
        for source in (["--prompts=humaneval"], [f"--prompts={tmp_path}", "--preset=humaneval"]):
            with pytest.raises(ValueError, match="humaneval is a set of prompts to evaluate with"):
                _run(*arguments, *source, f"--out={tmp_path}/other.jsonl")
    (row,), _ = records.read_chats(tmp_path / "out.jsonl", strict=True)
    assert row.messages[0] == {"role": "user", "content": "Add.\n\n1, 2"}


def test_a_wrong_flag_is_one_message(target, basic, tmp_path):
    absent = [f"--target={target[0]}", "--prompts=absent.jsonl", f"--out={tmp_path}/c.jsonl"]
    below_a_file = [*basic, f"--out={tmp_path}/prompts.jsonl/c.jsonl"]
    messages = ("absent.jsonl is neither a file or folder", f"File exists: '{tmp_path}/prompts.jsonl'")
    unknown = [*basic, "--batchsize=4", f"--out={tmp_path}/c.jsonl"]
    cases = (absent, below_a_file, unknown)
    for arguments, message in zip(cases, (*messages, "Unknown command line flag 'batchsize'"), strict=True):
        failed = _command(*arguments)
        assert failed.returncode == 2 and message in failed.stderr and "Traceback" not in failed.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--template_arguments={enable"], "--template_arguments='{enable' is not JSON"),
        (["--template_arguments=[1]"], "not a JSON object"),
        (["--out=chats.csv"], "--out=chats.csv is not a .jsonl"),
        (["--batch_size=0"], "batch_size"),
        (["--max_new_tokens=90000"], "--max_new_tokens=90000: must be below "),
        (["--top_p=1.5"], "--top_p=1.5 must be above 0"),
        (["--width=2"], "--width=2 needs --drafter"),
        (["--width=wide", "--drafter=d"], "--width=wide: give a number"),
        (["--concurrency=4"], "--concurrency goes with --server"),
        (["--server=localhost:8000"], "--server=localhost:8000 is no address"),
        (["--server=http://localhost:1", "--drafter=d"], "--drafter goes without --server"),
        (["--server=http://localhost:1", "--dtype=bfloat16"], "--dtype goes without --server"),
        (["--server=http://localhost:1", "--server_arguments=1"], "--server_arguments='1' is not a JSON object"),
        (["--server=http://localhost:1", "--server_key_variable=NO_SUCH_VARIABLE"], "no such environment variable"),
        (["--server=http://localhost:1"], "no server answers: http://localhost:1: the connection failed"),
    ],
)
def test_wrong_flags(basic, tmp_path, arguments, message):
    with pytest.raises((ValueError, flags.Error)) as failed:
        _run(*basic, f"--out={tmp_path}/c.jsonl", *arguments)
    assert message in str(failed.value)

"""The regeneration command as a user runs it, on a tiny random target, against greedy decoding by torch."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_models import torch_target
from tiny_tokenizer import tiny_tokenizer

from dflash_jax.data import chat, records

BUDGET = 9


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    tokenizer = tiny_tokenizer("qwen3")
    model = torch_target("qwen3", vocab_size=len(tokenizer) + 3)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder, model


def _run(*arguments: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1]), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "dflash_jax.data.regenerate", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_command_writes_the_greedy_answers_of_the_target(target, tmp_path):
    folder, model = target
    tokenizer = tiny_tokenizer("qwen3")
    contents = ["Name a colour.", "And another? I am fine, how are you?", "Blue.", "Red", "Hello there"]
    lines = [json.dumps({"id": c, "messages": [{"role": "user", "content": c}]}) for c in contents]
    (tmp_path / "prompts.jsonl").write_text("\n".join([*lines[:2], '{"messages": []}', *lines[2:]]))
    out = tmp_path / "chats.jsonl.gz"
    arguments = [f"--target={folder}", f"--prompts={tmp_path}/prompts.jsonl", f"--out={out}", "--batch_size=2"]
    arguments += [f"--max_new_tokens={BUDGET}", '--template_arguments={"enable_thinking": false}']

    refused = _run(*arguments, "--strict")
    assert refused.returncode == 1 and 'row 3: "messages" is empty' in refused.stderr and not out.exists()

    done = _run(*arguments)
    assert done.returncode == 0, done.stderr
    chats, _ = records.read_chats(out, strict=True)
    assert [row.id for row in chats] == contents
    for row in chats:
        prompt = chat.render(
            tokenizer,
            row.messages[:-1],
            add_generation_prompt=True,
            template_arguments={"enable_thinking": False},
        )
        assert row.prompt_ids == prompt
        with torch.no_grad():
            expected = model.generate(
                torch.tensor([prompt]), max_new_tokens=BUDGET, do_sample=False, eos_token_id=tokenizer.eos_token_id
            )
        assert row.answer_ids == expected[0, len(prompt) :].tolist()
        assert row.finish_reason == ("stop" if row.answer_ids[-1] == tokenizer.eos_token_id else "length")
    table = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert {"rows read 6", "rows kept 5", 'skipped: "messages" is empty 1 row 3'} <= set(table)
    meta = json.loads(Path(f"{out}.meta.json").read_text())
    assert meta["template_arguments"] == {"enable_thinking": False} and meta["temperature"] == 0.0

    again = _run(*arguments)
    assert again.returncode == 0 and "already complete" in again.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--template_arguments={enable"], "--template_arguments='{enable' is not JSON"),
        (["--template_arguments=[1]"], "not a JSON object"),
        (["--out=chats.csv"], "--out=chats.csv is not a .jsonl"),
        (["--prompts=absent.jsonl"], "there is no file absent.jsonl"),
        (["--batch_size=0"], "batch_size"),
    ],
)
def test_wrong_flags_are_one_message(target, tmp_path, arguments, message):
    (tmp_path / "p.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "Hello"}]}))
    basic = [f"--target={target[0]}", f"--prompts={tmp_path}/p.jsonl", f"--out={tmp_path}/c.jsonl"]
    failed = _run(*basic, *arguments)
    assert failed.returncode == 1 and message in failed.stderr + failed.stdout
    assert "Traceback" not in failed.stderr

"""Prompts about colours, and a run that has them answered into a file."""

import json
from pathlib import Path

from dflash_jax.data import answering, records
from dflash_jax.data.prompts import encode_prompts

SETTINGS = {"target_fingerprint": "abc", "max_new_tokens": 8, "template_arguments": {"enable_thinking": False}}
COLOURS = ["red", "green", "blue", "a rather longer name of a colour", "grey"]


def write_prompts(path: Path, count: int) -> Path:
    """Writes prompts p0, p1 …: "Say red 0.", "Say green 1." …"""
    content = [f"Say {COLOURS[i % 5]} {i}." for i in range(count)]
    rows = [
        {"id": f"p{i}", "split": "train", "messages": [{"role": "user", "content": c}]} for i, c in enumerate(content)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def answer_all(folder: Path, tokenizer, engine, count=23, settings=SETTINGS, out="chats.jsonl.gz", say=None) -> str:
    """Has `count` prompts answered by an Engine; returns the table."""
    conversations, report = records.read_prompts(write_prompts(folder / "prompts.jsonl", count))
    prompts = encode_prompts(tokenizer, conversations, report, max_prompt_length=200)
    say = say or (lambda line: None)
    return answering.answer_into(folder / out, prompts, report, engine, tokenizer, settings, say=say)

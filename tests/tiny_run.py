"""Tiny training runs: a target folder, a file of regenerated chats, and the settings of a run on them."""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import tiny_models
import torch
import transformers

from dflash_jax.config import ExperimentConfig, default_config, to_experiment

VOCABULARY, MASK, STOP = 61, 60, 59
FIRST_TAP, LAST_TAP = 0, 2


def write_target(folder: Path, *, family: str = "qwen3", **fields) -> Path:
    """A random target of four tiny layers, without a tokenizer; fields as for tiny_models.torch_target."""
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "head_dim": 8,
    }
    model = tiny_models.torch_target(family, **sizes | fields)
    model.generation_config.eos_token_id = STOP
    model.save_pretrained(folder)
    return folder


def chat_row(name: str, prompt: list[int], answer: list[int], **fields) -> dict:
    """A row as the regeneration command writes it."""
    texts = [{"role": "user", "content": f"question {name}"}, {"role": "assistant", "content": f"answer {name}"}]
    row = {"id": name, "messages": texts, "prompt_ids": prompt, "answer_ids": answer, "finish_reason": "length"}
    return row | fields


def own_rows(target: Path, count: int, *, seed: int = 0, length: int = 16) -> list[dict]:
    """Rows with the target's own greedy answers, decoded by torch."""
    torch.set_num_threads(1)  # nothing here is worth a second one
    model = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    prompts = torch.tensor(np.random.default_rng(seed).integers(0, STOP, (count, 6)))
    with torch.no_grad():
        texts = model.generate(prompts, max_new_tokens=length, do_sample=False, eos_token_id=None)
    return [chat_row(f"{seed}-{row}", ids[:6], ids[6:]) for row, ids in enumerate(texts.tolist())]


def write_rows(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def settings(target: Path, train_file: Path, directory: Path, **fields) -> ExperimentConfig:
    """A run of 20 steps in two shapes; fields are written part__field=value."""
    chosen = {
        "model__target": str(target),
        "model__target_dtype": "float32",
        "model__num_layers": 1,
        "model__block_size": 4,
        "model__target_layer_ids": (FIRST_TAP, LAST_TAP),
        "model__mask_token_id": MASK,
        "data__train_file": str(train_file),
        "data__max_length": 32,
        "data__length_buckets": (32,),
        "training__steps": 20,
        "training__rows_per_step": 4,
        "training__anchors_per_row": 6,
        "training__loss_chunk": 32,
        "training__compute_dtype": "float32",
        "optimizer__learning_rate": 5e-3,
        "checkpoint__directory": str(directory),
        "checkpoint__every_steps": 0,
        "checkpoint__export_dtype": "float32",
        "evaluation__every_steps": 0,
        "evaluation__rows": 8,
        "evaluation__anchors_per_row": 4,
        "evaluation__decode_prompts": 4,
        "evaluation__decode_max_new_tokens": 12,
        "evaluation__decode_batch_size": 4,
        "logging__every_steps": 5,
    }
    config = default_config().to_dict()
    for name, value in (chosen | fields).items():
        part, field = name.split("__")
        config[part][field] = value
    return to_experiment(config)


def write_config(path: Path, experiment: ExperimentConfig) -> Path:
    """A config file that gives the same settings."""
    lines = [
        "from dflash_jax.config import default_config",
        "",
        "",
        "def get_config():",
        "    config = default_config()",
    ]
    for part, fields in dataclasses.asdict(experiment).items():
        lines += [f"    config.{part}.{field} = {value!r}" for field, value in fields.items()]
    path.write_text("\n".join([*lines, "    return config", ""]))
    return path


def read_metrics(directory: Path) -> list[dict]:
    """The lines of a run's metrics.jsonl."""
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def placed(tree):
    """Placed explicitly, as a trainer's state is: what was compiled for that serves again."""
    return jax.tree.map(lambda leaf: jax.device_put(leaf, leaf.sharding), tree)


def bits(tree) -> list[bytes]:
    """Every array of a tree, byte for byte."""
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]

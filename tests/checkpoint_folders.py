"""Changes to checkpoint folders, and the comparison of what was loaded from them."""

import json
from pathlib import Path

import jax
import numpy as np
from safetensors.numpy import load_file, save_file


def rewrite(folder: Path, change) -> None:
    """Replaces the single weight file by change(tensors)."""
    save_file(change(load_file(folder / "model.safetensors")), folder / "model.safetensors")


def set_config(folder: Path, **fields) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def shard(folder: Path, shards: int = 3) -> None:
    """Splits the weight file and writes the index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {}
    for number in range(shards):
        names = sorted(tensors)[number::shards]
        file_name = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        save_file({name: tensors[name] for name in names}, folder / file_name)
        weight_map |= dict.fromkeys(names, file_name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def same_parameters(one, other) -> bool:
    leaves = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in leaves)

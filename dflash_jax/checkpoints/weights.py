"""Parameters of a module ↔ tensors of a checkpoint, through the tables of names."""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from dflash_jax.checkpoints.names import IGNORED_SUFFIXES, Entry
from dflash_jax.checkpoints.safetensors_io import CheckpointError, TensorFolder
from dflash_jax.sharding import parameter_spec, whole

WEIGHT_DTYPES = ("float32", "bfloat16", "float16")


def check_dtype(dtype: str | None) -> None:
    """Checks the name of a weight dtype; None stands for "as stored".

    Raises:
        CheckpointError: any other name.
    """
    if dtype is not None and dtype not in WEIGHT_DTYPES:
        raise CheckpointError(f"dtype {dtype!r} is not supported for weights; use one of {', '.join(WEIGHT_DTYPES)}")


def fill(
    module: nnx.Module,
    entries: Sequence[Entry],
    tensors: TensorFolder,
    *,
    dtype: str | None,
    expected: Collection[str] = (),
    mesh: Mesh | None = None,
) -> None:
    """Sets every parameter of a module from a checkpoint, one tensor in memory at a time.

    Args:
        module: abstract (from nnx.eval_shape) or concrete; modified in place.
        entries: the module's tensors under the names that the checkpoint uses.
        tensors: the open checkpoint.
        dtype: dtype of the parameters, or None for the dtype of each tensor in the file.
        expected: further names that may be there without being read.
        mesh: what the parameters are divided over; every process reads the parts of its own devices.

    Raises:
        CheckpointError: tensors are missing, unexpected or of the wrong shape; all are named in one message.
    """
    problems = _missing(entries, tensors) + _unexpected(entries, tensors, expected)
    present = [entry for entry in entries if entry.name in tensors.names]
    problems += _misshapen(module, present, tensors)
    if problems:
        raise CheckpointError(f"{tensors.folder} doesn't fit its config.json: " + "; ".join(problems))
    for entry in entries:
        array = tensors.read(entry.name) if mesh is None else _read_divided(mesh, entry, tensors, dtype)
        parameter(module, entry.path).set_value(jnp.asarray(array, dtype=dtype))


def _read_divided(mesh: Mesh, entry: Entry, tensors: TensorFolder, dtype: str | None) -> jax.Array:
    """A tensor divided over the mesh, of which each part is read from the file by itself."""
    shape = tensors.shape(entry.name)
    sharding = NamedSharding(mesh, parameter_spec(mesh, entry.path, shape))

    def part(index: tuple[slice, ...] | None) -> np.ndarray:
        array = tensors.read(entry.name, index or ())
        return array if dtype is None else array.astype(jnp.dtype(dtype))

    return jax.make_array_from_callback(shape, sharding, part)


def collect(module: nnx.Module, entries: Iterable[Entry], *, dtype: str | None = None) -> dict[str, np.ndarray]:
    """The tensors of a module under their names in a file. Of several processes, all have to call.

    Args:
        module: a module with concrete parameters.
        entries: its tensors.
        dtype: dtype to convert to, or None for the dtype of each parameter.
    """
    tensors = {}
    for entry in entries:
        array = whole(parameter(module, entry.path)[...])
        tensors[entry.name] = array if dtype is None else array.astype(jnp.dtype(dtype))
    return tensors


def parameter(module: nnx.Module, path: str) -> nnx.Param:
    """The parameter at a dotted path such as "layers.0.attention.q_proj.weight"."""
    node: Any = module
    for part in path.split("."):
        node = node[int(part)] if part.isdigit() else getattr(node, part)
    return node


def summarize(names: Iterable[str]) -> str:
    """Names with layer numbers folded together: "layers.*.mlp.up_proj.weight (×36)"."""
    counts = Counter(re.sub(r"\.\d+\.", ".*.", name) for name in names)
    return (
        ", ".join(name if count == 1 else f"{name} (×{count})" for name, count in sorted(counts.items())) or "nothing"
    )


def _missing(entries: Sequence[Entry], tensors: TensorFolder) -> list[str]:
    missing = [entry.name for entry in entries if entry.name not in tensors.names]
    if not missing:
        return []
    problem = f"missing: {_some(missing)}; what is there: {summarize(tensors.names)}"
    if any(name.endswith("lm_head.weight") for name in missing):
        problem += "; if the LM head is the embedding, set tie_word_embeddings to true in config.json"
    return [problem]


def _unexpected(entries: Sequence[Entry], tensors: TensorFolder, expected: Collection[str]) -> list[str]:
    unexpected = tensors.names - {entry.name for entry in entries} - set(expected)
    unexpected = [name for name in unexpected if not name.endswith(IGNORED_SUFFIXES)]
    return [f"unexpected: {summarize(unexpected)}"] if unexpected else []


def _misshapen(module: nnx.Module, entries: Iterable[Entry], tensors: TensorFolder) -> list[str]:
    problems = []
    for entry in entries:
        wanted = tuple(parameter(module, entry.path).shape)
        if tensors.shape(entry.name) != wanted:
            problems.append(f"{entry.name} is {list(tensors.shape(entry.name))}, the config makes it {list(wanted)}")
    return [f"wrong shapes: {_some(problems, '; ')}"] if problems else []


def _some(items: Sequence[str], separator: str = ", ", limit: int = 12) -> str:
    rest = f"{separator}and {len(items) - limit} more" if len(items) > limit else ""
    return separator.join(items[:limit]) + rest

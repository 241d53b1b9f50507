"""What can be known of a target from its files: tokenizer, embedding's size, hashes, whether its weights are there."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dflash_jax.checkpoints.huggingface import load_tokenizer, stop_token_ids_of
from dflash_jax.checkpoints.names import prefixed_target_entries, table_entries
from dflash_jax.checkpoints.safetensors_io import CheckpointError, TensorFolder, fingerprint, read_json
from dflash_jax.checkpoints.sources import TEXT_FILES, WEIGHT_FILES, resolve_source
from dflash_jax.models.family import parse_target_config

if TYPE_CHECKING:  # importing it takes a second, and prints advice where a command has not silenced it yet
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True)
class TargetDescription:
    """A target seen from its files; fields as of LoadedTarget. embedding_rows: ids below it have an embedding.

    context_length: most tokens of prompt and answer together.
    """

    tokenizer: PreTrainedTokenizerFast
    embedding_rows: int
    fingerprint: str
    source: str
    stop_token_ids: tuple[int, ...]
    context_length: int


def describe_target(source: str | Path) -> TargetDescription:
    """Describes a target.

    Args:
      source: as for load_target. Of a hub id the weights are fetched too: the fingerprint covers them.

    Raises:
      ConfigError: the model is of a kind that is not supported.
      CheckpointError: the source can't be found, or has no tokenizer.
    """
    folder = resolve_source(source, files=(*WEIGHT_FILES, *TEXT_FILES))
    raw_config = read_json(folder / "config.json")
    config = parse_target_config(raw_config)
    tokenizer = load_tokenizer(folder)
    if tokenizer is None:
        raise CheckpointError(f"{source} has no tokenizer.json; chats can't be rendered without")
    return TargetDescription(
        tokenizer,
        config.vocab_size,
        fingerprint(folder),
        str(source),
        stop_token_ids_of(folder, raw_config, tokenizer),
        config.max_position_embeddings,
    )


def has_all_weights(source: str | Path) -> bool:
    """Whether the files of all of a target's weights are there; source and errors as for `describe_target`."""
    folder = resolve_source(source, files=(*WEIGHT_FILES, *TEXT_FILES))
    with TensorFolder(folder) as tensors:
        entries, _ = prefixed_target_entries(parse_target_config(read_json(folder / "config.json")), tensors.names)
        return all(tensors.has(entry.name) for entry in entries)


def tables_hash(source: str | Path) -> str:
    """A hash of a target's embedding and head, which stays when its other weights go and the fingerprint with them.

    Source and errors as for `describe_target`; also a CheckpointError where one of the two is missing.
    """
    folder = resolve_source(source, files=(*WEIGHT_FILES, *TEXT_FILES))
    digest = hashlib.sha256()
    with TensorFolder(folder) as tensors:
        for entry in table_entries(parse_target_config(read_json(folder / "config.json")), tensors.names):
            table_VD = tensors.read(entry.name)
            digest.update(f"{entry.path}\0{table_VD.dtype}\0{table_VD.shape}\0".encode())
            digest.update(table_VD.view(np.uint8).data)
    return digest.hexdigest()

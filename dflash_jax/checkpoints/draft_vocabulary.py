"""The file of a drafter's folder that says which tokens it proposes; models/draft_vocabulary.py says why.

A file of its own, since neither the z-lab layout nor its readers know of it: they propose over the whole vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dflash_jax.checkpoints.safetensors_io import CheckpointError, read_json
from dflash_jax.models.draft_vocabulary import check_token_ids

DRAFT_VOCABULARY = "draft_vocabulary.json"


def write_draft_vocabulary(folder: str | Path, token_ids_U: Sequence[int] | np.ndarray) -> Path:
    """Writes the file into a folder that is there; ids ascending."""
    path = Path(folder) / DRAFT_VOCABULARY
    path.write_text(json.dumps({"token_ids": sorted(map(int, token_ids_U))}) + "\n", encoding="utf-8")
    return path


def read_draft_vocabulary(folder: str | Path, vocab_size: int) -> np.ndarray | None:
    """The draft vocabulary of the drafter in a folder, ascending, int32 [U]; None where it proposes any token.

    Raises:
        CheckpointError: the file is damaged, or has ids that are no tokens of the target, or the same one twice.
    """
    path = Path(folder) / DRAFT_VOCABULARY
    if not path.is_file():
        return None
    token_ids = read_json(path).get("token_ids")
    if not isinstance(token_ids, list) or not token_ids or any(type(token) is not int for token in token_ids):
        raise CheckpointError(f"{path}: token_ids must be a list of token ids, got {_short(token_ids)}")
    try:
        check_token_ids(np.asarray(token_ids), vocab_size)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error
    return np.sort(np.asarray(token_ids, np.int32))


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."

"""How a drafter's folder says which tokens it proposes; models/draft_vocabulary.py says why.

In a file of its own, of which neither the z-lab layout nor its readers know: they propose over the whole vocabulary. Or
in tensors of the speculators layout, which vLLM reads too: the head's rows, and two tables.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dflash_jax.checkpoints.safetensors_io import CheckpointError, TensorFolder, read_json
from dflash_jax.models.draft_vocabulary import check_token_ids

DRAFT_VOCABULARY = "draft_vocabulary.json"

# draft token i is the target's token i + d2t[i], whose logit is of row i of the head; t2d marks the target's tokens
D2T, T2D, HEAD = VOCABULARY_TENSORS = "d2t", "t2d", "lm_head.weight"


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
    _check_ids(str(path), np.asarray(token_ids), vocab_size)
    return np.sort(np.asarray(token_ids, np.int32))


def vocabulary_tensors(token_ids_U: np.ndarray, head_UD: np.ndarray, vocab_size: int) -> dict[str, np.ndarray]:
    """The tensors of the speculators layout. Its readers pick the head's rows by t2d, so in the order of the ids."""
    order_U = np.argsort(token_ids_U)
    ids_U = np.asarray(token_ids_U, np.int64)[order_U]
    used_V = np.zeros(vocab_size, np.bool_)
    used_V[ids_U] = True
    return {D2T: ids_U - np.arange(len(ids_U)), T2D: used_V, HEAD: head_UD[order_U]}


def read_vocabulary_tensors(
    tensors: TensorFolder, size: int, vocab_size: int, hidden_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """The draft vocabulary of a file in the speculators layout, int32 [U], and its rows of a head, [U, D].

    Raises:
        CheckpointError: tensors are missing, of the wrong shape, or contradict each other.
    """
    where = f"{tensors.folder} proposes {size} tokens (draft_vocab_size)"
    if missing := [name for name in (D2T, HEAD) if name not in tensors.names]:
        raise CheckpointError(f"{where} and has no {' and no '.join(missing)}")
    offsets_U, head_UD = tensors.read_indices(D2T), tensors.read(HEAD)
    for name, array, shape in ((D2T, offsets_U, (size,)), (HEAD, head_UD, (size, hidden_size))):
        if array.shape != shape:
            raise CheckpointError(f"{where}; {name} is {list(array.shape)} and must be {list(shape)}")
    ids_U = offsets_U + np.arange(size)
    _check_ids(f"{tensors.folder}, {D2T}", ids_U, vocab_size)
    if T2D in tensors.names and not np.array_equal(np.flatnonzero(tensors.read_indices(T2D)), np.sort(ids_U)):
        raise CheckpointError(f"{tensors.folder}: {T2D} marks other tokens than {D2T} leads to")
    return ids_U.astype(np.int32), head_UD


def _check_ids(where: str, token_ids_U: np.ndarray, vocab_size: int) -> None:
    try:
        check_token_ids(token_ids_U, vocab_size)
    except ValueError as error:
        raise CheckpointError(f"{where}: {error}") from error


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."

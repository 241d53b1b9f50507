"""Exporting drafters to folders that this package, vLLM, SGLang, the speculators library and PyTorch read."""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.checkpoints.draft_vocabulary import DRAFT_VOCABULARY, vocabulary_tensors, write_draft_vocabulary
from dflash_jax.checkpoints.names import drafter_entries
from dflash_jax.checkpoints.safetensors_io import SINGLE_FILE, CheckpointError, read_json, write_safetensors
from dflash_jax.checkpoints.weights import check_dtype, collect
from dflash_jax.models.draft_vocabulary import RestrictedDrafter, check_token_ids, unrestricted
from dflash_jax.models.drafter import Drafter
from dflash_jax.models.family import DrafterConfig, drafter_config_to_dict, parse_drafter_config, to_speculators
from dflash_jax.sharding import whole

Layout = Literal["z-lab", "speculators"]


def export_drafter(
    drafter: Drafter | RestrictedDrafter,
    config: DrafterConfig,
    out_dir: str | Path,
    *,
    dtype: str | None = None,
    overwrite: bool = False,
    layout: Layout = "z-lab",
    verifier: str | None = None,
    draft_vocabulary: Sequence[int] | np.ndarray | None = None,
) -> Path:
    """Writes config.json and model.safetensors, and for a drafter with a draft vocabulary draft_vocabulary.json.

    In the speculators layout the vocabulary of a RestrictedDrafter stands among the tensors instead, where vLLM and the
    library find it.

    They are written aside, the first two read back by an independent reader, and only then moved into place. Of several
    processes all have to call, and the first writes.

    Args:
        drafter: the parameters.
        config: their description.
        out_dir: the folder; made if absent, other files in it are left alone.
        dtype: dtype of the weights in the file; None keeps that of the parameters.
        overwrite: whether a drafter already there may be replaced.
        layout: of config.json: "z-lab", which vLLM, SGLang and the reference load, or "speculators", which vLLM and
            the library of that name load. The tensors are the same.
        verifier: for "speculators", what the file calls its target: a hub id, or a folder, which vLLM doesn't take.
        draft_vocabulary: ids of the tokens that draft_vocabulary.json is to list, for a drafter that is not restricted.

    Returns:
        The folder.

    Raises:
        CheckpointError: a checkpoint is there and overwrite is false, the files read back wrong, or the drafter has a
            head of its own, for which the z-lab layout has no place; or draft_vocabulary has ids that are no tokens, or
            the same one twice.
        ConfigError: the layout can't describe this drafter, see `to_speculators`.
    """
    check_dtype(dtype)
    if layout == "speculators" and not verifier:
        raise CheckpointError("the speculators layout names the target; set verifier")
    out_dir = Path(out_dir)
    present = [name for name in ("config.json", SINGLE_FILE, DRAFT_VOCABULARY) if (out_dir / name).exists()]
    if present and not overwrite:
        raise CheckpointError(
            f"{out_dir} already has {' and '.join(present)}; choose another folder, or allow overwriting (overwrite)"
        )
    if draft_vocabulary is not None:
        try:
            check_token_ids(np.asarray(draft_vocabulary), config.vocab_size)
        except ValueError as error:
            raise CheckpointError(f"draft_vocabulary: {error}") from error
    tensors = collect(unrestricted(drafter), drafter_entries(config), dtype=dtype)
    stored, size = jnp.result_type(*(tensor.dtype for tensor in tensors.values())), None
    if isinstance(drafter, RestrictedDrafter):
        token_ids_U, head_UD = whole(drafter.token_ids[...]), whole(drafter.head[...]).astype(stored)
        if layout == "speculators":
            size, draft_vocabulary = len(token_ids_U), None
            tensors |= vocabulary_tensors(token_ids_U, head_UD, config.vocab_size)
        elif drafter.has_own_head:
            raise CheckpointError("the drafter's head is its own and not its target's; the layout must be speculators")
        else:
            draft_vocabulary = token_ids_U
    if jax.process_index() > 0:
        return out_dir
    content = drafter_config_to_dict(config, dtype=stored.name)
    if layout == "speculators":
        content = to_speculators(content, verifier=str(verifier), draft_vocab_size=size)
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    staging = out_dir.parent / f".{out_dir.name}-{secrets.token_hex(4)}"
    staging.mkdir()
    try:
        write_safetensors(staging / SINGLE_FILE, tensors)
        _write_config(staging / "config.json", content, config)
        if draft_vocabulary is not None:
            write_draft_vocabulary(staging, draft_vocabulary)
        # safetensors makes files that only their owner may read
        shutil.copymode(staging / "config.json", staging / SINGLE_FILE)
        _move_into_place(staging, out_dir)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return out_dir


def _write_config(path: Path, content: dict[str, Any], config: DrafterConfig) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    reread = parse_drafter_config(read_json(path))
    if drafter_config_to_dict(reread) != drafter_config_to_dict(config):
        raise CheckpointError(f"{path} reads back as {reread}, which is not what was written: {config}")


def _move_into_place(staging: Path, out_dir: Path) -> None:
    if not out_dir.exists() or not any(out_dir.iterdir()):
        staging.replace(out_dir)
        return
    # that of another drafter would not be wrong, but might cost acceptance
    (out_dir / DRAFT_VOCABULARY).unlink(missing_ok=True)
    # weights first: a folder is only taken for a checkpoint once it has a config.json
    for name in (SINGLE_FILE, DRAFT_VOCABULARY, "config.json"):
        if (staging / name).exists():
            (staging / name).replace(out_dir / name)

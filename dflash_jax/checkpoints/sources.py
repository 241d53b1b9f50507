"""Where a checkpoint comes from: a folder, a hub id, or the bundled quickstart target → a local folder."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)

from dflash_jax.checkpoints.safetensors_io import INDEX_FILE, SINGLE_FILE, CheckpointError

QUICKSTART_TARGET = "smollm2-135m-instruct"

WEIGHT_FILES = ("config.json", SINGLE_FILE, INDEX_FILE, "model-*.safetensors")
TEXT_FILES = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def resolve_source(source: str | Path, *, files: Sequence[str], kind: Literal["target", "drafter"] = "target") -> Path:
    """The local folder of a checkpoint, downloaded or converted first where need be.

    Args:
        source: a folder, a hub id "org/name", or, of a target, "smollm2-135m-instruct".
        files: patterns of the files that a hub download may fetch.
        kind: what is looked for.

    Returns:
        An existing folder.

    Raises:
        CheckpointError: the source is none of these, or it can't be downloaded.
    """
    text = str(source)
    if kind == "target" and text == QUICKSTART_TARGET and not Path(source).is_dir():
        from dflash_jax.checkpoints.gguf import smollm2_folder  # its packages come with the quickstart extra

        return smollm2_folder()
    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise CheckpointError(f"{folder} is a file; give the folder that holds config.json and the weights")
    if isinstance(source, Path) or not _HUB_ID.fullmatch(text):
        named = f", nor {QUICKSTART_TARGET!r}" if kind == "target" else "; a drafter is one of these"
        raise CheckpointError(f"{text!r} is neither an existing folder, nor a hub id like 'org/name'{named}")
    return _download(text, files)


def _download(hub_id: str, files: Sequence[str]) -> Path:
    try:
        return Path(snapshot_download(hub_id, allow_patterns=list(files), ignore_patterns=["*/*"]))
    except GatedRepoError as error:
        raise CheckpointError(
            f"{hub_id!r} needs its terms accepted on its hub page and a login (`hf auth login`)"
        ) from error
    except RepositoryNotFoundError as error:
        raise CheckpointError(
            f"{hub_id!r} is neither an existing folder nor a repository that the hub shows you"
        ) from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, HfHubHTTPError, OSError) as error:
        raise CheckpointError(
            f"{hub_id!r} is no existing folder, is not in the local hub cache, and could not be downloaded (offline?); "
            "download it elsewhere and give its folder"
        ) from error

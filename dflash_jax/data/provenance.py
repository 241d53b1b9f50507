"""What a set of training rows was made for: which target, which tokenizer; and refusing it for any other."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

OVERRIDE = "data.allow_other_target"


def tokenizer_hash(tokenizer) -> str:
    """A hash of a fast tokenizer's vocabulary, merges, special tokens and chat template."""
    template = json.dumps(tokenizer.chat_template, sort_keys=True)
    return hashlib.sha256((tokenizer.backend_tokenizer.to_str() + template).encode()).hexdigest()


def file_hash(path: Path) -> str:
    """A hash of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def meta_path(out: str | Path) -> Path:
    """Where the settings and counts of a file of regenerated chats are kept."""
    return Path(f"{out}.meta.json")


def check_made_for(
    made_for: Mapping[str, Any], what: str, *, target_fingerprint: str, tokenizer_sha256: str | None = None
) -> None:
    """Checks that a set was made for the target that it is to be used with.

    Args:
      made_for: its "target_fingerprint", "tokenizer_sha256" and "target" (for the message), each where it is known.
      what: the set, for the message.
      target_fingerprint, tokenizer_sha256: of the target at hand; None is not compared.

    Raises:
      ValueError: one of the two differs.
    """
    ours = {"target_fingerprint": target_fingerprint, "tokenizer_sha256": tokenizer_sha256}
    for name, own in ours.items():
        theirs = made_for.get(name)
        if own is not None and theirs is not None and own != theirs:
            kind = name.partition("_")[0]
            raise ValueError(
                f"{what} was made for another {kind} ({made_for.get('target')!r}, {name} {theirs[:16]}) than this one "
                f"({own[:16]}); prepare it anew for this target, or set {OVERRIDE}=True if you know that it fits"
            )

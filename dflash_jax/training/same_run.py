"""What makes a run one run: the settings, and the content of the files, that it began with, and that all its processes
have."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dflash_jax.config import PARTS, ConfigError, ExperimentConfig

# A resumed run may change these; everything else decides what the run is.
_FREE_PARTS = ("logging", "evaluation", "checkpoint", "mesh")
_FREE_FIELDS = ("training.time_limit_minutes", "training.remat", "training.scan_layers")
# Where features come from may change, too: stored ones are checked for rows, target, taps and dtype when they are
# opened (training/offline.py), whichever run they are for.
_FEATURE_SOURCE = ("data.features", "training.feature_cache")


def check_same_run(
    saved: Mapping[str, Any], experiment: ExperimentConfig, inputs: Mapping[str, str], directory: Path
) -> list[str]:
    """Compares the run that is asked for with the one that was saved in `directory`.

    Args:
        saved: of a checkpoint: "experiment", and "inputs" as below.
        inputs: fields that name files → a hash of their content. Where it was saved, it is what counts, and the name
            may have changed.

    Returns:
        What has changed and may have, a line each, for the log.

    Raises:
        ConfigError: naming every other field in which the two differ.
    """
    differing, moved, sources = [], [], []
    # A hash that a version did not save yet is not compared.
    same = {field: saved["inputs"][field] == value for field, value in inputs.items() if field in saved["inputs"]}
    for field, before, now in _changed(saved["experiment"], experiment):
        change = f"{field}: {before!r} there, {now!r} now"
        if field in _FEATURE_SOURCE:
            sources.append(change)
        elif same.get(field):
            moved.append(f"{change}, of the same content")
        else:
            differing.append(change)
    differing += [f"{field}: its content has changed" for field, equal in same.items() if not equal]
    if differing:
        raise ConfigError(
            f"{directory} holds a run with other settings ({'; '.join(differing)}); "
            "choose another checkpoint.directory, or use the settings of that run"
        )
    if sources:
        moved.append(f"the source of features has changed, and with it perhaps the last bits ({'; '.join(sources)})")
    return moved


def common_fields(experiment: ExperimentConfig) -> dict[str, Any]:
    """part.field → value as JSON has it, of all that processes of one run need to have in common: all but logging."""
    parts = _as_saved({name: getattr(experiment, name) for name in PARTS if name != "logging"})
    return {f"{part}.{name}": value for part, fields in parts.items() for name, value in fields.items()}


def _changed(saved: Mapping[str, Any], experiment: ExperimentConfig) -> list[tuple[str, Any, Any]]:
    """(part.field, value there, value now) of every field that differs and is not free."""
    current = _as_saved({name: getattr(experiment, name) for name in PARTS})
    # What the version that saved it did not know yet, it did as the default says.
    defaults = _as_saved({name: part() for name, part in PARTS.items()})
    return [
        (f"{part}.{name}", before, value)
        for part, fields in current.items()
        for name, value in fields.items()
        if part not in _FREE_PARTS and f"{part}.{name}" not in _FREE_FIELDS
        if (before := (defaults[part] | saved[part])[name]) != value
    ]


def _as_saved(parts: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """As in the file: tuples are lists there."""
    return json.loads(json.dumps({name: dataclasses.asdict(part) for name, part in parts.items()}))

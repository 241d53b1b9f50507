"""What a run leaves beside its results: the settings and versions that made it, and a trace where one was asked for."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import subprocess
from pathlib import Path

import jax

from dflash_jax.config import ExperimentConfig

RECORD = "run.json"
PROFILED_STEPS = 3


def write_record(directory: Path, experiment: ExperimentConfig) -> None:
    """Adds a start of the run to RECORD, a list: the settings, versions, devices and, where the package lies in a git
    work tree, its commit."""
    path = directory / RECORD
    record = {
        "experiment": dataclasses.asdict(experiment),
        "commit": git_commit(Path(__file__).parent),
        "versions": {name: _version(name) for name in ("dflash-jax", "jax", "flax", "optax")},
        "devices": f"{jax.device_count()} × {jax.devices()[0].device_kind}",
        "processes": jax.process_count(),
    }
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    path.write_text(json.dumps([*before, record], indent=2) + "\n", encoding="utf-8")


def _version(package: str) -> str | None:
    """None where the package is used without having been installed, from a clone."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def git_commit(folder: Path) -> str | None:
    """The commit that is checked out, with "+" if files differ from it; None outside a work tree."""
    try:
        commit, changes = (
            subprocess.run(["git", "-C", str(folder), *command], capture_output=True, text=True, check=True, timeout=20)
            for command in (("rev-parse", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return commit.stdout.strip() + ("+" if changes.stdout.strip() else "")


class Profile:
    """A trace of PROFILED_STEPS steps from logging.profile_step on, counted from where this process began."""

    def __init__(self, experiment: ExperimentConfig, directory: Path):
        self._first, self._folder = experiment.logging.profile_step, directory / "profile"
        self._step, self._running = 0, False

    def before_step(self) -> None:
        """To be called before each step."""
        if self._step == self._first:
            jax.profiler.start_trace(str(self._folder))
            self._running = True
        elif self._first is not None and self._step == self._first + PROFILED_STEPS:
            self.close()
        self._step += 1

    def close(self) -> None:
        """Ends the trace, if there is one."""
        if self._running:
            jax.profiler.stop_trace()
        self._running = False

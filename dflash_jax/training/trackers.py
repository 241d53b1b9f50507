"""Metrics for those who watch runs in TensorBoard or Weights & Biases, beside metrics.jsonl. Both are extras."""

from __future__ import annotations

import dataclasses
import importlib.util
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from dflash_jax.config import ConfigError, ExperimentConfig, LoggingConfig

RUN_ID = "wandb_id"  # the file of a run's directory by which a resumed run goes on with its curves


class Tracker(Protocol):
    """Takes the metrics of a kind ("train", "evaluation") as they are measured."""

    def log(self, kind: str, step: int, metrics: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


def trackers_for(experiment: ExperimentConfig, directory: Path, step: int) -> list[Tracker]:
    """What the settings ask for.

    Args:
        directory: of the run.
        step: where it starts or goes on; what was tracked behind it is about to be measured again.

    Raises:
        ConfigError: a package is missing.
    """
    check_trackers(experiment.logging)
    chosen: list[Tracker] = []
    if experiment.logging.tensorboard:
        chosen.append(TensorBoard(directory / "tensorboard", step))
    if experiment.logging.wandb_project:
        chosen.append(WeightsAndBiases(experiment, directory))
    return chosen


def check_trackers(part: LoggingConfig) -> None:
    """Looks for the packages that the settings need.

    Raises:
        ConfigError: one is missing; the message names field and extra.
    """
    for field, value, package, extra in (
        ("tensorboard", part.tensorboard, "tensorboardX", "tensorboard"),
        ("wandb_project", part.wandb_project, "wandb", "wandb"),
    ):
        if value and importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"logging.{field}={value!r}: needs the package {package}: pip install 'dflash-jax[{extra}]'"
            )


class TensorBoard:
    """Event files, which `tensorboard --logdir` shows."""

    def __init__(self, folder: Path, step: int):
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=step + 1)

    def log(self, kind: str, step: int, metrics: Mapping[str, Any]) -> None:
        for name, value in _scalars(kind, metrics):
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run there, under the name of the run's directory; the environment says whose and where (WANDB_MODE …)."""

    def __init__(self, experiment: ExperimentConfig, directory: Path):
        import wandb  # pyright: ignore[reportMissingImports]

        file = directory / RUN_ID
        if not file.exists():
            file.write_text(secrets.token_hex(8), encoding="utf-8")
        self._run = wandb.init(
            project=experiment.logging.wandb_project,
            name=directory.name,
            id=file.read_text(encoding="utf-8"),
            resume="allow",
            dir=str(directory),
            config=dataclasses.asdict(experiment),
        )

    def log(self, kind: str, step: int, metrics: Mapping[str, Any]) -> None:
        self._run.log(dict(_scalars(kind, metrics)), step=step)

    def close(self) -> None:
        self._run.finish()


def _scalars(kind: str, metrics: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """(kind/name, number) of each; what is by slot, as kind/name/1 …"""
    for name, value in metrics.items():
        values = value if isinstance(value, list) else [value]
        for slot, number in enumerate(values, start=1):
            yield f"{kind}/{name}/{slot}" if isinstance(value, list) else f"{kind}/{name}", float(number)

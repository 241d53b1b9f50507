"""The training run: batches → features → step, with checkpoints, resume, evaluation, and export of the best drafter."""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from tqdm import tqdm

from dflash_jax.checkpoints.huggingface import LoadedDrafter, LoadedTarget, export_drafter
from dflash_jax.checkpoints.training_state import TrainingCheckpoints
from dflash_jax.config import ExperimentConfig
from dflash_jax.data.pipeline import Batches
from dflash_jax.models.drafter import Drafter
from dflash_jax.models.family import DrafterConfig
from dflash_jax.training.features import make_features
from dflash_jax.training.metrics import BlockSums, report, zero_sums
from dflash_jax.training.setup import step_settings
from dflash_jax.training.step import Batch, TrainState, VocabularyTables, make_optimizer, train_step

logger = logging.getLogger(__name__)

# evaluate(drafter, step, last) → metrics; "acceptance_length" among them decides which drafter is kept
Evaluate = Callable[[LoadedDrafter, int, bool], dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a run leaves: the folder of the exported drafter, its acceptance length (None: not evaluated), steps."""

    drafter_dir: Path
    acceptance_length: float | None
    steps: int
    skipped: int


class Trainer:
    """Owns the loop and its state; everything numeric is in training/step.py."""

    def __init__(
        self,
        experiment: ExperimentConfig,
        target: LoadedTarget,
        drafter_config: DrafterConfig,
        drafter: Drafter,
        batches: Batches,
        evaluate: Evaluate | None,
    ):
        self.experiment, self.target, self.drafter_config = experiment, target, drafter_config
        self.batches, self.evaluate = batches, evaluate
        self.directory = Path(experiment.checkpoint.directory)
        self.settings = step_settings(experiment, drafter_config)
        self.tables = VocabularyTables(target.model.embedding[...], target.model.head_VD)
        cache = experiment.training.feature_cache
        self.features = make_features(cache, target.model, drafter_config.target_layer_ids)
        part = experiment.optimizer
        self.optimizer = make_optimizer(
            part.learning_rate,
            experiment.training.steps,
            warmup_ratio=part.warmup_ratio,
            weight_decay=part.weight_decay,
            b1=part.b1,
            b2=part.b2,
            clip_norm=part.clip_norm,
        )
        self.state = TrainState(drafter, self.optimizer.init(drafter), jnp.int32(0), jnp.int32(0))
        self.best: float | None = None
        self.trained_seconds = 0.0
        self.checkpoints = TrainingCheckpoints(self.directory / "checkpoints", keep=experiment.checkpoint.keep)

    def run(self) -> Outcome:
        """Trains from the newest checkpoint, or from the start, to the configured step; returns what was kept."""
        self._resume()
        total, every = self.experiment.training.steps, self.experiment.logging.every_steps
        bar = tqdm(total=total, initial=self.step, unit="step", dynamic_ncols=True)
        sums, tokens, since = zero_sums(self.settings.width), 0, self.trained_seconds
        while self.step < total and not self._out_of_time():
            begun = time.perf_counter()
            batch, new_tokens = self._next_batch()
            self.state, new = train_step(
                self.state, self.tables, batch, settings=self.settings, optimizer=self.optimizer
            )
            jax.block_until_ready(new)
            self.trained_seconds += time.perf_counter() - begun
            sums, tokens = jax.tree.map(jnp.add, sums, new), tokens + new_tokens
            bar.update()
            if self.step % every == 0 or self.step == total:
                self._log(bar, sums, tokens / (self.trained_seconds - since))
                sums, tokens, since = zero_sums(self.settings.width), 0, self.trained_seconds
            if self._due(self.experiment.evaluation.every_steps):
                self._evaluate()
            if self._due(self.experiment.checkpoint.every_steps):
                self._save()
        bar.close()
        return self._finish()

    @property
    def step(self) -> int:
        """Updates done, skipped ones counted."""
        return int(self.state.step)

    def _due(self, every_steps: int | None) -> bool:
        return bool(every_steps) and self.step % every_steps == 0 and self.step < self.experiment.training.steps

    def _out_of_time(self) -> bool:
        limit = self.experiment.training.time_limit_minutes
        return limit is not None and self.trained_seconds >= 60 * limit

    def _next_batch(self) -> tuple[Batch, int]:
        """The next `accumulation` micro-batches, stacked, with features; and how many tokens they hold.

        The loader's batch is the whole step; micro-batches are equal slices of its rows.
        """
        batch, parts = next(self.batches), self.experiment.training.accumulation
        taps = self.features(batch["tokens_BT"], batch["row_index_B"])

        def split(array) -> jax.Array:
            return jnp.asarray(array).reshape(parts, -1, *array.shape[1:])

        stacked = Batch(
            split(batch["tokens_BT"]), split(batch["loss_mask_BT"]), split(batch["row_index_B"]), split(taps)
        )
        return stacked, int(batch["length_B"].sum())

    def _log(self, bar: tqdm, sums: BlockSums, tokens_per_second: float) -> None:
        metrics = report(sums) | {"tokens_per_second": tokens_per_second, "skipped_steps": int(self.state.skipped)}
        slots = " ".join(f"{accuracy:.2f}" for accuracy in metrics["position_accuracy"])
        bar.set_postfix_str(
            f"loss {metrics['loss']:.3f}, accepted {metrics['accepted_prefix']:.2f}, by slot {slots}, "
            f"{tokens_per_second:.0f} tok/s"
        )
        self._write("train", metrics)

    def _write(self, kind: str, metrics: dict[str, Any]) -> None:
        line = {"kind": kind, "step": self.step, "seconds": round(self.trained_seconds, 2), **metrics}
        with (self.directory / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def _evaluate(self, *, last: bool = False) -> None:
        """Evaluates, and exports the drafter when no earlier one had a higher acceptance length."""
        if self.evaluate is None:
            return
        metrics = self.evaluate(LoadedDrafter(self.state.drafter, self.drafter_config, "in training"), self.step, last)
        self._write("evaluation", metrics)
        tqdm.write(f"step {self.step}: " + ", ".join(f"{name} {_short(value)}" for name, value in metrics.items()))
        score = metrics.get("acceptance_length")
        if score is not None and (self.best is None or score >= self.best):
            self.best = score
            self._export()

    def _export(self) -> None:
        dtype = self.experiment.checkpoint.export_dtype
        export_drafter(self.state.drafter, self.drafter_config, self.drafter_dir, dtype=dtype, overwrite=True)

    @property
    def drafter_dir(self) -> Path:
        return self.directory / "drafter"

    def _save(self) -> None:
        position = {
            "batches": self.batches.state(),
            "best": self.best,
            "trained_seconds": self.trained_seconds,
            "experiment": dataclasses.asdict(self.experiment),
        }
        self.checkpoints.save(self.step, self.state, position)

    def _resume(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        newest = self.checkpoints.latest_step()
        if newest is None:
            return
        position = self.checkpoints.restore_position(newest)
        _check_same_run(position["experiment"], dataclasses.asdict(self.experiment), self.directory)
        self.state = self.checkpoints.restore(newest, self.state)
        self.batches.set_state(position["batches"])
        self.best, self.trained_seconds = position["best"], position["trained_seconds"]
        logger.info("resumed from step %d in %s", newest, self.directory)

    def _finish(self) -> Outcome:
        self._evaluate(last=True)
        self._save()
        self.checkpoints.close()
        if self.best is None:
            self._export()
        return Outcome(self.drafter_dir, self.best, self.step, int(self.state.skipped))


# A resumed run may change these; everything else decides what the run is.
_FREE_FIELDS = ("logging", "evaluation", "checkpoint")


def _check_same_run(saved: dict, current: dict, directory: Path) -> None:
    """Raises ValueError naming every field in which the run in `directory` differs from the one asked for."""
    current = json.loads(json.dumps(current))  # tuples become lists, as in the file
    differing = [
        f"{part}.{name}: {saved[part].get(name)!r} there, {value!r} now"
        for part, fields in current.items()
        if part not in _FREE_FIELDS
        for name, value in fields.items()
        if saved[part].get(name) != value and (part, name) != ("training", "time_limit_minutes")
    ]
    if differing:
        raise ValueError(
            f"{directory} holds a run with other settings ({'; '.join(differing)}); "
            "choose another checkpoint.directory, or use the settings of that run"
        )


def _short(value: Any) -> str:
    if isinstance(value, list):
        return "[" + " ".join(_short(item) for item in value) + "]"
    return f"{value:.3f}" if isinstance(value, float) else str(value)

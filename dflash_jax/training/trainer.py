"""The training run: batches → features → step, with checkpoints, resume, evaluation, and export of the best drafter."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import operator
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from tqdm import tqdm

from dflash_jax.agreement import agreed, check_equal, check_shared
from dflash_jax.checkpoints.drafter_export import export_drafter
from dflash_jax.checkpoints.export import CHECKPOINTS, METRICS
from dflash_jax.checkpoints.huggingface import MADE_WITH, LoadedDrafter, LoadedTarget
from dflash_jax.checkpoints.training_state import TrainingCheckpoints
from dflash_jax.config import ConfigError, ExperimentConfig, naming
from dflash_jax.data.loader import PreparedBatches
from dflash_jax.data.pipeline import Batches
from dflash_jax.models.drafter import Drafter
from dflash_jax.models.family import DrafterConfig, drafter_config_to_dict
from dflash_jax.processes import Stopped, StopRequest, is_first
from dflash_jax.sharding import mesh_of, on_mesh, place_parameters, to_devices
from dflash_jax.training.features import FeatureSource, OnlineFeatures
from dflash_jax.training.flops import drafter_flops, feature_flops, peak_flops
from dflash_jax.training.metrics import BlockSums, report, zero_sums
from dflash_jax.training.run_record import Profile, write_record
from dflash_jax.training.same_run import check_same_run
from dflash_jax.training.setup import narrower, optimizer_of, step_settings
from dflash_jax.training.step import (
    Batch,
    StepSettings,
    TrainState,
    VocabularyTables,
    initial_state,
    micro_batches,
    train_step,
)
from dflash_jax.training.trackers import Tracker, trackers_for

logger = logging.getLogger(__name__)

# evaluate(drafter, step, last, check) → metrics; "acceptance_length" among them decides which drafter is kept. It calls
# `check` between its pieces of work, and lets pass what that raises when the run is to stop.
Evaluate = Callable[[LoadedDrafter, int, bool, Callable[[], None]], dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a run leaves: the folder of the exported drafter, its acceptance length (None: not evaluated), steps.

    finished: false when it was asked to stop before its end; there is a checkpoint then, and perhaps no drafter yet.
    """

    drafter_dir: Path
    acceptance_length: float | None
    steps: int
    skipped: int
    finished: bool = True


class Interval(NamedTuple):
    """What some steps came to. flops: that they needed."""

    sums: BlockSums
    steps: int
    tokens: int
    flops: float


class Trainer:
    """Owns the loop and its state; everything numeric is in training/step.py."""

    def __init__(
        self,
        experiment: ExperimentConfig,
        target: LoadedTarget,
        drafter_config: DrafterConfig,
        drafter: Drafter,
        batches: Batches | PreparedBatches,
        evaluate: Evaluate | None = None,
        *,
        features: FeatureSource,
        tables: VocabularyTables,
        data_fingerprints: Mapping[str, str] | None = None,
        made_with: Mapping[str, Any] | None = None,
        draft_vocabulary: np.ndarray | None = None,
    ):
        """Prepares a run; `run` starts it, or goes on with the one in the experiment's directory.

        Args:
            experiment: with training.steps set.
            drafter: where training starts. Its buffers are used up.
            batches: endless; one batch is one step.
            evaluate: see Evaluate; None: the drafter of the last step is the one exported.
            features, tables: what the target gives to a step, of the batch and for good.
            data_fingerprints: fields that name rows → what tells these apart; a run goes on with the rows it began
                with, wherever they lie.
            made_with: what is written beside an exported drafter, as MADE_WITH.
            draft_vocabulary: int32, the tokens that the exported drafter is to propose; None: any.

        Raises:
            ConfigError: training.steps is not set, or the directory can't be made or written to.
        """
        if experiment.training.steps is None:
            raise ConfigError("training.steps is not set")
        self.steps: int = experiment.training.steps
        self.experiment, self.target, self.drafter_config = experiment, target, drafter_config
        self.batches, self.evaluate = batches, evaluate
        self.made_with, self.draft_vocabulary = dict(made_with or {}), draft_vocabulary
        self.inputs = {"model.target": target.fingerprint, **(data_fingerprints or {})}
        self.directory = _made(experiment.checkpoint.directory)
        self.settings = step_settings(experiment, drafter_config)
        logger.info("loss decay gamma %s, compute dtype %s", self.settings.gamma, self.settings.compute_dtype)
        self.narrow_settings = narrower(self.settings, experiment.training.narrow_width)
        self.tables, self.features = tables, features
        self.optimizer = optimizer_of(experiment.optimizer, self.steps)
        self.mesh = mesh_of(target.model)
        self.state: TrainState = self._placed(initial_state(drafter, self.optimizer))
        self.best: float | None = None
        self.trained_seconds = 0.0
        self.checkpoints = TrainingCheckpoints(self.directory / CHECKPOINTS, keep=experiment.checkpoint.keep)
        self.stop = StopRequest()
        self.trackers: list[Tracker] = []

    def run(self) -> Outcome:
        """Trains from the newest checkpoint, or from the start, to the configured step; returns what was kept.

        Raises:
            ConfigError: the directory holds another run, or is not the same for all processes, or a package for logging
                is missing.
            CheckpointError: the newest checkpoint is damaged.
            ValueError: of several processes one has other rows or another target.
        """
        check_equal(self.inputs)
        with naming("checkpoint.directory", str(self.directory)):
            check_shared(self.directory)
        with on_mesh(self.mesh), self.stop, contextlib.ExitStack() as closing:
            self._resume()
            if is_first():
                write_record(self.directory, self.experiment)
                self.trackers = trackers_for(self.experiment, self.directory, self.step)
            for tracker in self.trackers:
                closing.callback(tracker.close)
            try:
                self._train()
                return self._finish()
            except Stopped:
                return self._interrupted()

    def _placed(self, state: TrainState) -> TrainState:
        """The state where a restored one would be: one compilation serves both."""
        if self.mesh is not None:
            return place_parameters(self.mesh, state)
        return jax.tree.map(lambda leaf: jax.device_put(leaf, leaf.sharding), state)

    def _train(self) -> None:
        every = self.experiment.logging.every_steps
        bar = tqdm(total=self.steps, initial=self.step, unit="step", dynamic_ncols=True, disable=not is_first())
        interval, begun_at = self._nothing_yet(), self.trained_seconds
        with contextlib.closing(bar), contextlib.closing(Profile(self.experiment, self.directory)) as profile:
            while not self._done():
                self.stop.check()
                profile.before_step()
                interval = jax.tree.map(operator.add, interval, self._advance())
                bar.update()
                if self.step % every == 0 or self._done():
                    self._log(bar, interval, self.trained_seconds - begun_at)
                    interval, begun_at = self._nothing_yet(), self.trained_seconds
                if self._due(self.experiment.evaluation.every_steps):
                    self._evaluate()
                if self._due(self.experiment.checkpoint.every_steps):
                    self._save()

    def _advance(self) -> Interval:
        """One step. Its batch goes when this returns, so that it is not held while the next one's features are made."""
        begun = time.perf_counter()
        batch, tokens = self._next_batch()
        settings = self._step_settings()
        self.state, sums = train_step(self.state, self.tables, batch, settings=settings, optimizer=self.optimizer)
        jax.block_until_ready(sums)
        self.trained_seconds += agreed(time.perf_counter() - begun)
        return Interval(sums, 1, tokens, self._needed_flops(batch, settings))

    @property
    def step(self) -> int:
        """Updates done, skipped ones counted."""
        return int(self.state.step)

    def _step_settings(self) -> StepSettings:
        """Of the next step: the first ones may train on narrower blocks."""
        return self.narrow_settings if self.step < self.experiment.training.narrow_steps else self.settings

    def _nothing_yet(self) -> Interval:
        return Interval(zero_sums(self._step_settings().width), 0, 0, 0.0)

    def _needed_flops(self, batch: Batch, settings: StepSettings) -> float:
        """Of one step; see training/flops.py."""
        parts, rows, length = batch.tokens.shape
        flops = drafter_flops(self.drafter_config, parts * rows, length, settings.anchors, settings.width)
        if isinstance(self.features, OnlineFeatures):
            layers = max(self.drafter_config.target_layer_ids) + 1
            flops += feature_flops(self.target.config, layers, parts * rows, length)
        return flops

    def _due(self, every_steps: int) -> bool:
        """Whether something is due that happens every so many steps; at the end it happens anyway."""
        return every_steps > 0 and self.step % every_steps == 0 and not self._done()

    def _done(self) -> bool:
        limit = self.experiment.training.time_limit_minutes
        return self.step >= self.steps or (limit is not None and self.trained_seconds >= 60 * limit)

    def _next_batch(self) -> tuple[Batch, int]:
        """The next `accumulation` micro-batches, stacked, with features; and how many tokens they hold.

        The loader's batch is the whole step, dealt out to micro-batches.
        """
        batch, parts = next(self.batches), self.experiment.training.accumulation
        features = self.features(batch)
        tokens, loss_mask, rows, starts = to_devices(
            (batch["tokens_BT"], batch["loss_mask_BT"], batch["row_index_B"], batch.get("starts_BT"))
        )
        whole = Batch(tokens, loss_mask, rows, features.taps, features.hidden, starts)
        return micro_batches(whole, parts), int(batch["length_B"].sum())

    def _log(self, bar: tqdm, interval: Interval, seconds: float) -> None:
        tokens_per_second = interval.tokens / seconds
        metrics = report(interval.sums) | {
            "tokens_per_second": tokens_per_second,
            "steps_per_second": interval.steps / seconds,
            "skipped_steps": int(self.state.skipped),
        }
        device = jax.devices()[0].device_kind
        if (peak := peak_flops(device)) is not None:
            metrics["mfu"] = interval.flops / seconds / (1 if self.mesh is None else self.mesh.size) / peak
        slots = " ".join(f"{accuracy:.2f}" for accuracy in metrics["position_accuracy"])
        bar.set_postfix_str(
            f"loss {metrics['loss']:.3f}, accepted {metrics['accepted_prefix']:.2f}, by slot {slots}, "
            f"{tokens_per_second:.0f} tok/s"
        )
        self._write("train", metrics)

    def _write(self, kind: str, metrics: dict[str, Any]) -> None:
        line = {"kind": kind, "step": self.step, "seconds": round(self.trained_seconds, 2), **metrics}
        if is_first():
            with self.metrics_file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        for tracker in self.trackers:
            tracker.log(kind, self.step, metrics)

    def _evaluate(self, *, last: bool = False) -> None:
        """Evaluates, and exports the drafter when no earlier one had a higher acceptance length."""
        if self.evaluate is None:
            return
        drafter = LoadedDrafter(self.state.drafter, self.drafter_config, "in training")
        metrics = self.evaluate(drafter, self.step, last, self.stop.check)
        self._write("evaluation", metrics)
        if is_first():
            tqdm.write(f"step {self.step}: " + ", ".join(f"{name} {_short(value)}" for name, value in metrics.items()))
        score = metrics.get("acceptance_length")
        if score is not None and (self.best is None or score >= self.best):
            self.best = score
            self._export()

    def _export(self) -> None:
        dtype = self.experiment.checkpoint.export_dtype
        options: dict[str, Any] = {"dtype": dtype, "draft_vocabulary": self.draft_vocabulary}
        export_drafter(self.state.drafter, self.drafter_config, self.drafter_dir, overwrite=True, **options)
        if is_first():
            (self.drafter_dir / MADE_WITH).write_text(json.dumps(self.made_with, indent=2) + "\n", encoding="utf-8")

    @property
    def drafter_dir(self) -> Path:
        """Where the drafter worth keeping is exported to."""
        return self.directory / "drafter"

    @property
    def metrics_file(self) -> Path:
        """JSON lines: kind "train" or "evaluation", step, seconds of training so far, and what was measured."""
        return self.directory / METRICS

    def _save(self) -> None:
        position = {
            "batches": self.batches.state(),
            "best": self.best,
            "trained_seconds": self.trained_seconds,
            "experiment": dataclasses.asdict(self.experiment),
            "drafter": drafter_config_to_dict(self.drafter_config, dtype="float32"),
            "made_with": self.made_with,
            "draft_vocabulary": None if self.draft_vocabulary is None else self.draft_vocabulary.tolist(),
            "inputs": self.inputs,
        }
        self.checkpoints.save(self.step, self.state, position)

    def _resume(self) -> None:
        newest = self.checkpoints.latest_step()
        if newest is None:
            _forget_after(self.metrics_file, 0)
            return
        position = self.checkpoints.restore_position(newest)
        for change in check_same_run(position, self.experiment, self.inputs, self.directory):
            logger.info("%s", change)
        _forget_after(self.metrics_file, newest)
        self.state = self.checkpoints.restore(newest, self.state)
        self.batches.set_state(position["batches"])
        self.best, self.trained_seconds = position["best"], position["trained_seconds"]
        logger.info("resumed from step %d in %s", newest, self.directory)

    def _interrupted(self) -> Outcome:
        """Leaves a checkpoint to go on from. An evaluation that was going on is given up: whoever asked to stop may not
        wait that long."""
        self._save()
        self.checkpoints.close()
        logger.warning(
            "asked to stop: saved step %d in %s; the same command goes on from it", self.step, self.directory
        )
        return Outcome(self.drafter_dir, self.best, self.step, int(self.state.skipped), finished=False)

    def _finish(self) -> Outcome:
        self._save()  # before the last evaluation, which takes long and may be cut off
        self._evaluate(last=True)
        self.checkpoints.close()
        if self.best is None:
            self._export()
        return Outcome(self.drafter_dir, self.best, self.step, int(self.state.skipped))


def _made(directory: str) -> Path:
    path = Path(directory)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"checkpoint.directory={directory!r}: can't be made: {error.strerror}") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError(f"checkpoint.directory={directory!r}: can't be written to")
    return path


def _forget_after(path: Path, step: int) -> None:
    """Drops the lines that a killed run wrote after its last checkpoint: those steps will be made again."""
    if not path.exists() or not is_first():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(json.JSONDecodeError, KeyError, TypeError):  # the last line may be cut short
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
    path.write_text("".join(kept), encoding="utf-8")


def _short(value: Any) -> str:
    if isinstance(value, list):
        return "[" + " ".join(_short(item) for item in value) + "]"
    return f"{value:.3f}" if isinstance(value, float) else str(value)

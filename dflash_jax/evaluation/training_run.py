"""A whole training run: loads target and data, trains, and evaluates on held-out chats in between."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from dflash_jax.agreement import check_equal
from dflash_jax.checkpoints.huggingface import LoadedDrafter, LoadedTarget, read_target_config
from dflash_jax.config import ConfigError, ExperimentConfig, MeshConfig, naming
from dflash_jax.data.draft_vocabulary import count_answer_tokens, most_frequent
from dflash_jax.data.loader import PreparedBatches
from dflash_jax.data.packing import PackedPlan
from dflash_jax.data.pipeline import Batches, EpochPlan, check_fit, collate, padded_length
from dflash_jax.data.prepared import PreparedSplit, find_folder, is_prepared, read_provenance, row_bytes
from dflash_jax.data.provenance import check_made_for, meta_path, tokenizer_hash
from dflash_jax.data.records import NOT_RENDERED, Chat, ReadReport, read_chats
from dflash_jax.data.rows import TrainingRow, rows_from_regenerated
from dflash_jax.evaluation.heldout import acceptance_by_decoding, fixed_anchor_report
from dflash_jax.models.family import DrafterConfig
from dflash_jax.processes import check_joined
from dflash_jax.sharding import on_mesh
from dflash_jax.training.features import FeatureSource, OnlineFeatures, feature_bytes, make_features
from dflash_jax.training.initialise import parameter_count
from dflash_jax.training.offline import load_target_for, stored_features, stored_schema
from dflash_jax.training.regression_start import drafter_by_regression, row_moments
from dflash_jax.training.same_run import common_fields
from dflash_jax.training.setup import mask_and_taps, mesh_for, starting_drafter, starts_from_target, step_settings
from dflash_jax.training.step import VocabularyTables
from dflash_jax.training.trackers import check_trackers
from dflash_jax.training.trainer import Outcome, Trainer

logger = logging.getLogger(__name__)


def train(experiment: ExperimentConfig) -> Outcome:
    """Runs the experiment to its end, or on from where it was stopped.

    Raises:
        ValueError: settings, data or checkpoints are wrong; the message names the field or file.
    """
    return prepare(experiment).run()


def prepare(experiment: ExperimentConfig) -> Trainer:
    """Loads target, data and the drafter to start from; `run` of what is returned trains. Errors as `train`."""
    check_trackers(experiment.logging)
    check_joined()
    check_equal(common_fields(experiment) | {"version of jax": jax.__version__})
    if jax.process_count() > 1:
        _check_for_many_processes(experiment)
    mesh = mesh_of_run(experiment, devices_for(experiment.mesh))
    _check_before_loading(experiment)
    target = load_target_for(experiment, mesh)
    with on_mesh(mesh):
        return _prepare(experiment, target)


def _check_before_loading(experiment: ExperimentConfig) -> None:
    """Refuses what is known to be wrong before the target is loaded, which takes long where it is large."""
    if experiment.model.warm_start is None:
        mask_and_taps(experiment.model, read_target_config(experiment.model.target))
    for field in ("train_file", "heldout_file"):
        if path := getattr(experiment.data, field):
            with naming(f"data.{field}", path):
                _check_exists(path)


def mesh_of_run(experiment: ExperimentConfig, devices: Sequence[Any]) -> Mesh | None:
    """How a run is divided over these devices; None: it has one.

    Raises:
        ConfigError: the target's config can't be read, or the mesh does not fit it or the devices.
    """
    with naming("model.target", experiment.model.target):
        config = read_target_config(experiment.model.target)
    mesh = mesh_for(experiment, config, devices)
    return None if mesh.size == 1 else mesh


def devices_for(mesh: MeshConfig) -> list[Any]:
    """All devices of all processes; where all sizes are 1 and there is one process, the first: the others stay idle."""
    devices = jax.devices()
    return devices[:1] if mesh == MeshConfig(1, 1, 1) and jax.process_count() == 1 else devices


def _check_for_many_processes(experiment: ExperimentConfig) -> None:
    """Refuses what needs all features on one host."""
    for field, value in (("training.feature_cache", "memory"), ("model.initialisation", "regression")):
        part, name = field.split(".")
        if getattr(getattr(experiment, part), name) == value:
            raise ConfigError(f"{field}={value!r}: works in a run of one process; there are {jax.process_count()}")


def _prepare(experiment: ExperimentConfig, target: LoadedTarget) -> Trainer:
    data = experiment.data
    config, drafter = starting_drafter(experiment, target)
    used = rows_in_use(experiment, target, "train")
    rows, lengths, fingerprint = used
    arguments = experiment.training.rows_per_step, data.length_buckets, experiment.training.seed
    plan = PackedPlan if data.packing else EpochPlan
    with naming("data.train_file", data.train_file):
        if isinstance(rows, PreparedSplit):
            batches = PreparedBatches(rows, *arguments, plan=plan, max_rows=data.max_rows)
        else:
            batches = Batches(rows, *arguments, plan=plan)
    logger.info("%.1f %% of the tokens of an epoch are padding", 100 * batches.epochs.padding())
    experiment = _with_steps(experiment, batches)
    _announce(experiment, target, config, drafter, lengths)
    training = experiment.training
    shortlist_S, draft_vocabulary_U = _frequent_tokens(experiment, target, (rows[i] for i in range(len(lengths))))
    # Before anything takes long: a wrong file is found now.
    evaluate = HeldOut(experiment, target, config, draft_vocabulary_U) if data.heldout_file else None
    features = _features(experiment, target, config, "train", used, with_hidden=_keeps_hidden(experiment))
    if experiment.model.initialisation == "regression" and starts_from_target(experiment):
        singles = [collate(rows, [i], padded_length(length, data.length_buckets)) for i, length in enumerate(lengths)]
        fitted_on = features
        if not _keeps_hidden(experiment):
            fitted_on = OnlineFeatures(target.model, config.target_layer_ids, with_hidden=True)
        moments = row_moments(singles, fitted_on, target.model.embedding[...])
        logger.info("solving for the start")
        drafter = drafter_by_regression(config, target.model, *moments, training.seed)
    return Trainer(
        *(experiment, target, config, drafter, batches),
        evaluate,
        features=features,
        tables=_tables(target, shortlist_S),
        draft_vocabulary=draft_vocabulary_U,
        data_fingerprints={"data.train_file": fingerprint}
        | ({"data.heldout_file": evaluate.rows_sha256} if evaluate else {}),
        made_with={
            "target": _public(target.source),
            "target_fingerprint": target.fingerprint,
            "train_file": _public(data.train_file),
            "template_arguments": recorded_arguments(data.train_file),
        },
    )


def _public(source: str) -> str:
    """A name to publish: of a path that leads out of the working directory only its end."""
    path = Path(source)
    return path.name if path.is_absolute() or ".." in path.parts else source


def _features(
    experiment: ExperimentConfig,
    target: LoadedTarget,
    config: DrafterConfig,
    split: str,
    used: RowsInUse,
    *,
    with_hidden: bool = False,
) -> FeatureSource:
    """Where the features of these rows come from: the run's target, or data.features where that holds the split."""
    schema, training = stored_schema(experiment), experiment.training
    if schema is None or (split not in schema.splits and target.has_layers):
        return make_features(
            *(training.feature_cache, target.model, config.target_layer_ids, used.rows, used.lengths),
            with_hidden=with_hidden,
            scan=training.scan_layers,
        )
    options: dict[str, Any] = {"rows_sha256": used.sha256, "rows": len(used.lengths), "with_hidden": with_hidden}
    return stored_features(experiment, target, config.target_layer_ids, split, **options)


def _keeps_hidden(experiment: ExperimentConfig) -> bool:
    """Whether features hold final hidden states: the teacher loss needs them in every step, a fit only once, and there
    they are kept with the taps where features are remembered."""
    model, training = experiment.model, experiment.training
    fitted = model.initialisation == "regression" and model.warm_start is None
    return training.loss == "teacher" or (fitted and training.feature_cache == "memory")


def _frequent_tokens(
    experiment: ExperimentConfig, target: LoadedTarget, rows: Iterable[TrainingRow]
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """The answers' most frequent tokens: those that the loss compares, and those that the drafter is to propose. None
    where all count; then nothing is counted."""
    shortlist = experiment.training.loss_tokens if experiment.training.loss == "teacher" else None
    sizes = shortlist, experiment.checkpoint.draft_vocab_size
    if sizes == (None, None):
        return None, None
    logger.info("counting the tokens of the answers")  # of a large prepared set it takes minutes
    with naming("data.train_file", experiment.data.train_file):
        counts_V = count_answer_tokens(rows, target.config.vocab_size)
    of_loss, of_drafter = (None if size is None else most_frequent(counts_V, size) for size in sizes)
    return of_loss, of_drafter


def _tables(target: LoadedTarget, shortlist_S: np.ndarray | None = None) -> VocabularyTables:
    """The vocabulary tables of training, with the shortlist's rows where the loss uses one."""
    head_VD = target.model.head_VD
    return VocabularyTables(target.model.embedding[...], head_VD, None if shortlist_S is None else head_VD[shortlist_S])


def rows_fingerprint(rows: Sequence[TrainingRow]) -> str:
    """Tells rows of training data apart, by tokens, masks and order."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(row_bytes(row))
    return digest.hexdigest()


class HeldOut:
    """The evaluation of a run: fixed anchors at every call, real decoding at its own interval and at the end."""

    def __init__(
        self,
        experiment: ExperimentConfig,
        target: LoadedTarget,
        config: DrafterConfig,
        draft_vocabulary_U: np.ndarray | None = None,
    ):
        self.part, self.target, self.draft_vocabulary_U = experiment.evaluation, target, draft_vocabulary_U
        used = rows_in_use(experiment, target, "heldout")
        self.rows_sha256 = used.sha256
        self.prompts = self._prompts(used.rows)
        evaluated = used._replace(rows=used.rows[: self.part.rows], lengths=used.lengths[: self.part.rows])
        self.batches = _fixed_batches(evaluated.rows, experiment)
        self.settings = step_settings(experiment, config)._replace(anchors=self.part.anchors_per_row, teacher=False)
        self.tables = _tables(target)
        self.features = _features(experiment, target, config, "heldout", evaluated)

    def _prompts(self, rows: Sequence[TrainingRow]) -> list[list[int]]:
        """What is decoded: nothing, where the target's layers were not loaded."""
        prompts = [last_prompt(row) for row in rows[: self.part.decode_prompts]]
        if prompts and not self.target.has_layers:
            logger.warning(
                "weights of model.target=%r are missing: held-out chats are not decoded, evaluations use fixed anchors "
                "only, and the drafter of the last step is exported",
                self.target.source,
            )
            return []
        return prompts

    def __call__(
        self, loaded: LoadedDrafter, step: int, last: bool, check: Callable[[], None] = lambda: None
    ) -> dict[str, Any]:
        """The metrics of a drafter; acceptance_length is among them when it was decoded with. `check`: see Evaluate."""
        metrics = fixed_anchor_report(loaded.model, self.tables, self.batches, self.features, self.settings, check)
        every = self.part.decode_every_steps
        if self.prompts and (last or (every and step % every == 0)):
            decoding = acceptance_by_decoding(
                self.target,
                loaded.restricted(self.target, self.draft_vocabulary_U),
                self.prompts,
                max_new_tokens=self.part.decode_max_new_tokens,
                width=self.part.decode_width or loaded.config.block_size,
                batch_size=self.part.decode_batch_size,
                check=check,
            )
            metrics |= dataclasses.asdict(decoding)
        return metrics


class RowsInUse(NamedTuple):
    """Rows of a split, of which the first len(lengths) are used; lengths in tokens. sha256: tells rows apart."""

    rows: Sequence[TrainingRow]
    lengths: list[int]
    sha256: str


def rows_in_use(experiment: ExperimentConfig, target: LoadedTarget, split: str) -> RowsInUse:
    """The rows that are trained on ("train") or held out ("heldout"). Errors as `training_rows`."""
    field, limit = {"train": ("train_file", experiment.data.max_rows), "heldout": ("heldout_file", None)}[split]
    rows = training_rows(getattr(experiment.data, field), f"data.{field}", experiment, target, split=split)
    if isinstance(rows, PreparedSplit):
        return RowsInUse(rows, rows.lengths[:limit].tolist(), rows.sha256)
    rows = rows[:limit]
    return RowsInUse(rows, [len(row.tokens) for row in rows], rows_fingerprint(rows))


def training_rows(
    path: str, field: str, experiment: ExperimentConfig, target: LoadedTarget, *, split: str
) -> Sequence[TrainingRow]:
    """The rows of a file of regenerated chats, or a split of a prepared set.

    Raises:
        ConfigError: they can't be read, or were made for another target; the message names the field.
    """
    try:
        _check_exists(path)
        if is_prepared(path):
            rows = PreparedSplit(path, split)
            _check_made_for(rows.provenance, path, experiment, target)
            return rows
        if meta_path(path).is_file():
            # Not the tokenizer: its hash changes with the library that reads it, and the ids are the target's own.
            made_for = json.loads(meta_path(path).read_text()) | {"tokenizer_sha256": None}
            _check_made_for(made_for, path, experiment, target)
        chats, report = read_chats(path)
        _check_trainable(chats, report)
    except (ValueError, OSError) as error:
        raise ConfigError(f"{field}={path!r}: {error}") from error
    rows, row_report = rows_from_regenerated(
        chats, max_length=experiment.data.max_length, embedding_rows=target.config.vocab_size, source=path
    )
    for part in (report, row_report):
        if part.skipped or part.truncated:
            logger.info("%s", part.table())
    if not rows:
        raise ConfigError(f"{field}={path!r}: no row of it can be trained on\n{row_report.table()}")
    return rows


def _check_exists(path: str) -> None:
    """Raises ValueError where there is nothing of that name, or a folder that is no prepared set."""
    if not Path(path).exists():
        raise ValueError(f"there is no file or folder {path}")
    if Path(path).is_dir():
        find_folder(path)


def _check_trainable(chats: Sequence[Chat], report: ReadReport) -> None:
    """Raises ValueError where a file gave no regenerated chat; the message says why."""
    if chats:
        return
    if not report.rows_in:
        raise ValueError("the file is empty")
    if NOT_RENDERED in report.reasons:
        raise ValueError(
            "its chats are not rendered yet: run python -m dflash_jax.data.prepare, or dflash_jax.data.regenerate for "
            f"answers of the target's own, and train on what it writes\n{report.table()}"
        )
    raise ValueError(f"no row of it can be trained on\n{report.table()}")


def recorded_arguments(path: str) -> dict[str, Any] | None:
    """The template arguments that training data was rendered with; None where that was not recorded."""
    if is_prepared(path):
        return read_provenance(path).get("template_arguments")
    meta = meta_path(path)
    return json.loads(meta.read_text()).get("template_arguments") if meta.is_file() else None


def last_prompt(row: TrainingRow) -> list[int]:
    """What precedes the last answer of a row, which is what serving sees."""
    unsupervised = np.flatnonzero(~row.loss_mask[: np.flatnonzero(row.loss_mask)[-1]])
    return row.tokens[: unsupervised[-1] + 1].tolist() if len(unsupervised) else []


def _check_made_for(made_for: dict, path: str, experiment: ExperimentConfig, target: LoadedTarget) -> None:
    if not experiment.data.allow_other_target:
        hashed = tokenizer_hash(target.tokenizer) if target.tokenizer is not None else None
        check_made_for(made_for, path, target_fingerprint=target.fingerprint, tokenizer_sha256=hashed)


def _fixed_batches(rows: Sequence[TrainingRow], experiment: ExperimentConfig) -> list:
    """Held-out rows in batches of the training shape, shortest first; a last, smaller batch is left out."""
    size = min(experiment.training.rows_per_step // experiment.training.accumulation, len(rows))
    lengths, buckets = [len(row.tokens) for row in rows], experiment.data.length_buckets
    with naming("data.heldout_file", experiment.data.heldout_file):
        check_fit(lengths, buckets)
    order = sorted(range(len(rows)), key=lambda index: lengths[index])
    batches = []
    for first in range(0, len(order) - size + 1, size):
        indices = order[first : first + size]
        batches.append(collate(rows, indices, padded_length(lengths[indices[-1]], buckets)))
    return batches


def _with_steps(experiment: ExperimentConfig, batches: Batches | PreparedBatches) -> ExperimentConfig:
    if experiment.training.steps is not None:
        return experiment
    steps = math.ceil(experiment.training.epochs * batches.steps_per_epoch)
    return dataclasses.replace(experiment, training=dataclasses.replace(experiment.training, steps=steps))


def _announce(experiment, target: LoadedTarget, config, drafter, lengths: Sequence[int]) -> None:
    training = experiment.training
    logger.info(
        "target %s (%d layers) · drafter %.1f M parameters, %d layers, block %d, taps %s · %d rows · "
        "%d steps of %d rows × %d anchors · %s",
        *(target.source, target.config.num_layers, parameter_count(drafter) / 1e6, config.num_layers),
        *(config.block_size, list(config.target_layer_ids), len(lengths), training.steps, training.rows_per_step),
        *(training.anchors_per_row, jax.devices()[0].device_kind),
    )
    if training.narrow_steps >= training.steps:
        logger.warning(
            "training.narrow_steps=%d leaves none of %d steps for whole blocks: slots from %d on are not trained",
            *(training.narrow_steps, training.steps, training.narrow_width),
        )
    if training.feature_cache == "memory":
        itemsize = target.model.embedding[...].dtype.itemsize
        arrays = len(config.target_layer_ids) + _keeps_hidden(experiment)
        size = feature_bytes(sum(lengths), arrays, config.hidden_size, itemsize)
        logger.info("features are kept in memory: about %.1f GB", size / 1e9)

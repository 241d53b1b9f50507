"""Training on features that data/features.py stored: do they fit the run, and what of the target does it need then."""

from __future__ import annotations

import dataclasses

from jax.sharding import Mesh

from dflash_jax.checkpoints.huggingface import LoadedTarget, load_target, load_target_tables, outline_target
from dflash_jax.checkpoints.target_files import has_all_weights, tables_hash
from dflash_jax.config import ConfigError, ExperimentConfig, naming
from dflash_jax.data.feature_store import FeatureSchema, StoredSplit, read_schema
from dflash_jax.data.provenance import OVERRIDE, check_made_for, tokenizer_hash
from dflash_jax.training.features import StoredFeatures
from dflash_jax.training.setup import starts_from_target

# Which field decides how many rows of a split are used.
_ROWS_OF = {"train": "data.max_rows", "heldout": "evaluation.rows"}


def stored_schema(experiment: ExperimentConfig) -> FeatureSchema | None:
    """What the features of data.features are of; None where the run computes its own.

    Raises:
        ConfigError: there are none in that folder.
    """
    folder = experiment.data.features
    if folder is None:
        return None
    with naming("data.features", folder):
        return read_schema(folder)


def load_target_for(experiment: ExperimentConfig, mesh: Mesh | None) -> LoadedTarget:
    """The target of a run. With stored features only embedding and head, where no more is needed or there is no more.

    Raises:
        ConfigError: it can't be loaded, or its embedding and head are not those of the target that made the features.
    """
    model, schema = experiment.model, stored_schema(experiment)
    with naming("model.target", model.target):
        complete = schema is not None and has_all_weights(model.target)
        if schema is None or (_runs_the_target(experiment) and complete):
            return load_target(model.target, dtype=model.target_dtype, mesh=mesh)
        if starts_from_target(experiment):
            raise ConfigError(
                f"weights of it are missing, which model.initialisation={model.initialisation!r} needs; use 'random', "
                "or model.warm_start"
            )
        target = load_target_tables(model.target, dtype=model.target_dtype, mesh=mesh)
        hashed = tables_hash(model.target)
        known = outline_target(model.target).fingerprint if complete else schema.target_fingerprint
    if hashed != schema.tables_sha256 and not experiment.data.allow_other_target:
        raise ConfigError(
            f"data.features={experiment.data.features!r}: they were made for another target ({schema.target!r}, whose "
            "embedding or head differs); make them anew with python -m dflash_jax.data.features, or set "
            f"{OVERRIDE}=True if you know that they fit"
        )
    return dataclasses.replace(target, fingerprint=known)


def stored_features(
    experiment: ExperimentConfig,
    target: LoadedTarget,
    layers: tuple[int, ...],
    split: str,
    *,
    rows_sha256: str,
    rows: int,
    with_hidden: bool,
) -> StoredFeatures:
    """The source of the features of a split's first rows.

    Args:
        layers: that the drafter reads.
        rows_sha256: of all rows of the split.
        rows: how many of them are used.
        with_hidden: whether final hidden states are wanted too.

    Raises:
        ConfigError: the features are incomplete, or not those of this target, these layers and rows in this dtype.
    """
    folder = str(experiment.data.features)
    with naming("data.features", folder):
        stored = StoredSplit(folder, split)
        schema, part = stored.schema, stored.schema.splits[split]
        if not experiment.data.allow_other_target:
            hashed = tokenizer_hash(target.tokenizer) if target.tokenizer is not None else None
            made_for = dataclasses.asdict(schema)
            check_made_for(made_for, folder, target_fingerprint=target.fingerprint, tokenizer_sha256=hashed)
        dtype, problems = experiment.model.target_dtype, []
        if schema.layers != layers:
            problems.append(f"of layers {list(schema.layers)}, the drafter reads {list(layers)}")
        if schema.dtype != dtype:
            problems.append(f"{schema.dtype}, model.target_dtype is {dtype}")
        if with_hidden and not schema.hidden:
            problems.append("without the final hidden states that training.loss='teacher' needs")
        if part.rows_sha256 != rows_sha256:
            problems.append(f"of other {split} rows ({part.source!r}) than file, data.max_length and max_rows give")
        elif part.rows < rows:
            problems.append(f"of {part.rows} {split} rows, {_ROWS_OF[split]} asks for {rows}")
        if problems:
            raise ConfigError(f"they are {'; '.join(problems)}. Make them anew with python -m dflash_jax.data.features")
    return StoredFeatures(stored, with_hidden=with_hidden)


def _runs_the_target(experiment: ExperimentConfig) -> bool:
    """Whether something else than features needs the target's layers, or would use them if they are there."""
    decodes = bool(experiment.data.heldout_file) and experiment.evaluation.decode_prompts > 0
    return decodes or starts_from_target(experiment)

"""From an experiment's settings to what a run needs: the drafter's description and start, the step's settings."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from dflash_jax.checkpoints.export import CHECKPOINTS
from dflash_jax.checkpoints.huggingface import LoadedTarget, load_drafter, special_token_ids
from dflash_jax.checkpoints.training_state import has_checkpoint
from dflash_jax.config import ConfigError, ExperimentConfig, ModelConfig, OptimizerConfig, naming
from dflash_jax.models.draft_vocabulary import unrestricted
from dflash_jax.models.drafter import Drafter
from dflash_jax.models.family import (
    DrafterConfig,
    TargetConfig,
    check_mask_token_id,
    check_target_layer_ids,
    default_target_layer_ids,
)
from dflash_jax.sharding import make_mesh
from dflash_jax.training.initialise import drafter_from_target, random_drafter
from dflash_jax.training.losses import default_gamma
from dflash_jax.training.regression_start import check_regression_fits
from dflash_jax.training.step import StepSettings, make_optimizer

logger = logging.getLogger(__name__)


def drafter_config(model: ModelConfig, target: LoadedTarget) -> DrafterConfig:
    """Describes the drafter of an experiment: the target's sizes, with what the experiment sets in their place."""
    base = target.config
    mask_token_id, ids = mask_and_taps(model, base, special_token_ids(target))
    return DrafterConfig(
        hidden_size=base.hidden_size,
        intermediate_size=model.intermediate_size or base.intermediate_size,
        num_layers=model.num_layers,
        num_heads=base.num_heads,
        num_kv_heads=base.num_kv_heads,
        head_dim=base.head_dim,
        rms_norm_eps=base.rms_norm_eps,
        vocab_size=base.vocab_size,
        max_position_embeddings=base.max_position_embeddings,
        rope=base.rope,
        block_size=model.block_size,
        mask_token_id=mask_token_id,
        target_layer_ids=ids,
        num_target_layers=base.num_layers,
        layer_types=("full_attention",) * model.num_layers,
        sliding_window=None,
        is_causal=False,
        tie_word_embeddings=base.tie_word_embeddings,
    )


def mask_and_taps(
    model: ModelConfig, target: TargetConfig, special_ids: Mapping[str, int | None] | None = None
) -> tuple[int, tuple[int, ...]]:
    """The mask token of a new drafter and the layers that it taps, once they are known to be the target's.

    Args:
        special_ids: ids that no mask token may have, by name; needs the target's tokenizer.

    Raises:
        ConfigError: there is no such layer or token, or the token has another use.
    """
    if model.mask_token_id is None:
        raise ConfigError("model.mask_token_id is not set; choose an id of the target's vocabulary that no chat uses")
    ids = model.target_layer_ids
    if not ids:
        with naming("model.num_taps", model.num_taps):
            ids = default_target_layer_ids(target.num_layers, model.num_taps)
    try:
        check_target_layer_ids(ids, target.num_layers)
        check_mask_token_id(model.mask_token_id, target.vocab_size, special_ids)
    except ConfigError as error:
        raise ConfigError(f"model.{error}") from error
    return model.mask_token_id, tuple(ids)


def tapped_layers(model: ModelConfig, target: LoadedTarget) -> tuple[int, ...]:
    """The target's layers that the drafter of an experiment reads. Of the target's model only the shapes count."""
    if model.warm_start is not None:
        return _warm_start(model, model.warm_start, target)[0].target_layer_ids
    return drafter_config(model, target).target_layer_ids


def starting_drafter(experiment: ExperimentConfig, target: LoadedTarget) -> tuple[DrafterConfig, Drafter]:
    """The drafter that training starts from: random, from the target's layers, or an existing one (warm start).

    For initialisation "regression" the shape is checked and the drafter is random: the regression needs the data, see
    `regression_start.drafter_by_regression`.
    """
    model, seed = experiment.model, experiment.training.seed
    if model.warm_start is not None:
        return _warm_start(model, model.warm_start, target)
    config = drafter_config(model, target)
    if model.initialisation == "target" and starts_from_target(experiment):
        return config, drafter_from_target(config, target.model, seed)
    if model.initialisation == "regression":
        check_regression_fits(config)
    return config, random_drafter(config, seed)


def starts_from_target(experiment: ExperimentConfig) -> bool:
    """Whether the start is copied from the target or fitted to it: not where a warm start or a checkpoint takes its
    place."""
    model, directory = experiment.model, experiment.checkpoint.directory
    return (
        model.initialisation != "random"
        and model.warm_start is None
        and not has_checkpoint(f"{directory}/{CHECKPOINTS}")
    )


def _warm_start(model: ModelConfig, source: str, target: LoadedTarget) -> tuple[DrafterConfig, Drafter]:
    """The drafter to go on from: its shape counts, its taps and mask token must not be contradicted."""
    try:
        loaded = load_drafter(source, target=target, dtype="float32", draft_vocabulary=False)
    except ValueError as error:
        raise ConfigError(f"model.warm_start={source!r}: {error}") from error
    for field, ours in (("mask_token_id", model.mask_token_id), ("target_layer_ids", model.target_layer_ids or None)):
        theirs = getattr(loaded.config, field)
        if ours is not None and ours != theirs:
            raise ConfigError(f"model.{field}={ours}: model.warm_start={source!r} has {theirs}; use that, or unset it")
    if loaded.config.block_size != model.block_size:
        logger.info("block size %d from the settings, %d in %s", model.block_size, loaded.config.block_size, source)
    config = dataclasses.replace(loaded.config, block_size=model.block_size)
    drafter = unrestricted(loaded.model)
    drafter.config = config  # the widest block that it drafts is read from there
    return config, drafter


def mesh_for(experiment: ExperimentConfig, target: TargetConfig, devices: Sequence[Any]) -> Mesh:
    """The mesh of an experiment over these devices.

    Raises:
        ConfigError: the sizes don't fit the devices, the rows of a micro-batch, or the heads.
    """
    part, training = experiment.mesh, experiment.training
    try:
        mesh = make_mesh(part.data, part.fsdp, part.tensor, sequence=part.sequence, devices=devices)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    rows, over = training.rows_per_step // training.accumulation, mesh.shape["data"] * mesh.shape["fsdp"]
    if rows % over:
        raise ConfigError(
            f"training.rows_per_step={training.rows_per_step} in training.accumulation={training.accumulation} parts "
            f"gives {rows} rows, which mesh.data={mesh.shape['data']} times mesh.fsdp={mesh.shape['fsdp']} devices "
            f"can't share; make it a multiple of {over}, or choose other mesh sizes (all of them 1: one device)"
        )
    if target.num_kv_heads % mesh.shape["tensor"]:
        raise ConfigError(
            f"mesh.tensor={mesh.shape['tensor']} must divide the target's {target.num_kv_heads} key/value heads"
        )
    lengths = experiment.data.length_buckets
    if uneven := [size for size in (*lengths, training.anchors_per_row) if size % mesh.shape["sequence"]]:
        raise ConfigError(
            f"mesh.sequence={mesh.shape['sequence']} must divide data.length_buckets={lengths} and "
            f"training.anchors_per_row={training.anchors_per_row}; it does not divide {uneven[0]}"
        )
    return mesh


def optimizer_of(part: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """The optimizer of an experiment of so many steps."""
    return make_optimizer(
        part.learning_rate,
        steps,
        warmup_ratio=part.warmup_ratio,
        weight_decay=part.weight_decay,
        b1=part.b1,
        b2=part.b2,
        clip_norm=part.clip_norm,
    )


def step_settings(experiment: ExperimentConfig, config: DrafterConfig) -> StepSettings:
    """The compiled step's settings; "auto" fields are resolved here."""
    training = experiment.training
    gamma = training.loss_decay_gamma
    if gamma == "auto":
        gamma = default_gamma(config.block_size)
    dtype = training.compute_dtype
    if dtype == "auto":
        dtype = fastest_dtype()
    return StepSettings(
        anchors=training.anchors_per_row,
        width=config.block_size,
        mask_id=config.mask_token_id,
        gamma=gamma,
        loss_chunk=training.loss_chunk,
        compute_dtype=dtype,
        seed=training.seed,
        random_cut=training.random_cut,
        teacher=training.loss == "teacher",
        remat=training.remat,
    )


def narrower(settings: StepSettings, width: int) -> StepSettings:
    """The same number of slots a row in more, narrower blocks."""
    return settings._replace(width=width, anchors=max(1, settings.anchors * settings.width // width))


def fastest_dtype() -> str:
    """bfloat16 on accelerators and on CPUs with matrix instructions for it, else float32."""
    if jax.default_backend() != "cpu":
        return "bfloat16"
    cpuinfo = Path("/proc/cpuinfo")
    flags = cpuinfo.read_text(encoding="utf-8", errors="replace") if cpuinfo.exists() else ""
    return "bfloat16" if "amx_bf16" in flags or "avx512_bf16" in flags else "float32"

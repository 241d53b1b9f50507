"""What an experiment is made of: frozen dataclasses, their defaults, and validation that names the field.

A config file is a Python file with `get_config()`, which starts from `default_config()` and sets fields. Defaults are the
paper's where it has them (paper section 5.1: 5 layers, block 16, 512 anchors, 3072 tokens, AdamW 6e-4, …).
"""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal

from ml_collections import ConfigDict, config_dict

from dflash_jax.models.config_fields import ConfigError


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Target and drafter.

    target: folder, hub id, or "smollm2-135m-instruct". Drafter sizes not set here are the target's.
    target_layer_ids: tapped layers, 0-based; empty: num_taps layers spread evenly.
    mask_token_id: an id of the target's vocabulary that no chat uses.
    initialisation: "random" (the paper's) or "target" (copies of the target's last layers).
    warm_start: a drafter folder or hub id to start from; its own shape then counts.
    """

    target: str = ""
    num_layers: int = 5
    block_size: int = 16
    num_taps: int = 5
    target_layer_ids: tuple[int, ...] = ()
    mask_token_id: int | None = None
    intermediate_size: int | None = None
    initialisation: Literal["random", "target"] = "random"
    warm_start: str | None = None
    target_dtype: Literal["float32", "bfloat16"] = "bfloat16"


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Regenerated chats (JSON lines). Rows are cut at max_length and padded to one of length_buckets."""

    train_file: str = ""
    heldout_file: str = ""
    max_length: int = 3072
    length_buckets: tuple[int, ...] = (3072,)
    max_rows: int | None = None


@dataclasses.dataclass(frozen=True)
class TrainingConfig:
    """The run. rows_per_step counts all micro-batches; accumulation divides it.

    steps: updates; epochs: used when steps is not set. loss_decay_gamma: "auto" follows the block size (7, 5, 4 for
    16, 10, 8), None is no decay. feature_cache: "memory" computes the target's features once a row and keeps them in
    host memory, "none" computes them in every step. time_limit_minutes: stop early, whatever the step.
    """

    steps: int | None = None
    epochs: float = 6.0
    rows_per_step: int = 64
    accumulation: int = 1
    anchors_per_row: int = 512
    loss_decay_gamma: float | Literal["auto"] | None = "auto"
    loss_chunk: int = 1024
    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    feature_cache: Literal["none", "memory"] = "none"
    seed: int = 0
    time_limit_minutes: float | None = None


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW, linear warm-up then cosine to zero, global-norm clipping."""

    learning_rate: float = 6e-4
    warmup_ratio: float = 0.04
    weight_decay: float = 0.01
    b1: float = 0.9
    b2: float = 0.95
    clip_norm: float = 1.0


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """directory holds checkpoints/, metrics.jsonl and drafter/, the best export so far. every_steps 0: only at the end."""

    directory: str = ""
    every_steps: int = 500
    keep: int = 2
    export_dtype: Literal["float32", "bfloat16"] = "bfloat16"


@dataclasses.dataclass(frozen=True)
class EvaluationConfig:
    """Fixed anchors on held-out rows, and real greedy decoding of held-out prompts. every_steps 0: only at the end.

    decode_width: width of the decoding (None: the block size). decode_every_steps: decoding costs more, so it has its own
    interval; 0: only at the end.
    """

    every_steps: int = 500
    rows: int = 64
    anchors_per_row: int = 32
    decode_every_steps: int = 0
    decode_prompts: int = 32
    decode_max_new_tokens: int = 128
    decode_batch_size: int = 16
    decode_width: int | None = None


@dataclasses.dataclass(frozen=True)
class LoggingConfig:
    """every_steps: how often a line goes to metrics.jsonl and the progress bar."""

    every_steps: int = 10


@dataclasses.dataclass(frozen=True)
class ExperimentConfig:
    """One experiment, checked."""

    model: ModelConfig
    data: DataConfig
    training: TrainingConfig
    optimizer: OptimizerConfig
    checkpoint: CheckpointConfig
    evaluation: EvaluationConfig
    logging: LoggingConfig


PARTS: dict[str, type] = typing.get_type_hints(ExperimentConfig)


def default_config() -> ConfigDict:
    """All fields with their defaults, to be changed by a config file. Unknown fields can't be set by mistake."""
    config = ConfigDict({name: {} for name in PARTS})
    for name, part in PARTS.items():
        for field in dataclasses.fields(part):
            config[name][field.name] = field.default if field.default is not None else _unset(part, field.name)
    return config.lock()


def _unset(part: type, field: str):
    """A typed placeholder for None, without which a flag could not set the field."""
    options = [option for option in typing.get_args(typing.get_type_hints(part)[field]) if option is not type(None)]
    return config_dict.placeholder(options[0])


def to_experiment(config: Mapping[str, Any]) -> ExperimentConfig:
    """Checks every field and freezes the experiment.

    Raises:
        ConfigError: once, with all that is wrong, each as «field=value: what is allowed».
    """
    problems: list[str] = []
    parts = {}
    for name in set(config) - set(PARTS):
        problems.append(f"{name}: no such part; {_nearest(name, PARTS)}")
    for name, part in PARTS.items():
        parts[name] = _part(name, part, dict(config.get(name, {})), problems)
    if not problems:
        problems = [f"{field}={value!r}: {allowed}" for field, value, allowed in _range_problems(parts)]
    if problems:
        raise ConfigError("wrong settings:\n  " + "\n  ".join(problems))
    return ExperimentConfig(**parts)


def unknown_field(dotted: str) -> str:
    """The message for a field that does not exist, with the nearest one that does."""
    every = [f"{name}.{field.name}" for name, part in PARTS.items() for field in dataclasses.fields(part)]
    return f"{dotted}: no such field; {_nearest(dotted, every)}"


def _part(name: str, part: type, values: dict[str, Any], problems: list[str]):
    hints = typing.get_type_hints(part)
    for field in set(values) - set(hints):
        problems.append(unknown_field(f"{name}.{field}"))
    checked = {}
    for field, value in values.items():
        if field not in hints:
            continue
        try:
            checked[field] = _typed(value, hints[field])
        except TypeError:
            problems.append(f"{name}.{field}={value!r}: must be {_type_name(hints[field])}")
    return None if problems else part(**checked)


def _typed(value: Any, hint: Any) -> Any:
    """The value as the hint wants it (int for float, list for tuple); TypeError when it is something else."""
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        for option in options:
            try:
                return _typed(value, option)
            except TypeError:
                continue
        raise TypeError
    if origin is Literal:
        if value in options:
            return value
        raise TypeError
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise TypeError
        return tuple(_typed(item, options[0]) for item in value)
    if isinstance(value, str) and hint in (float, type(None)):
        return _from_flag(value, hint)
    if isinstance(value, bool) and hint is not bool:
        raise TypeError
    if hint is float and isinstance(value, int):
        return float(value)
    if isinstance(value, hint):
        return value
    raise TypeError


def _from_flag(text: str, hint: type) -> float | None:
    """What a flag wrote as text where the default was text too, such as 3.5 or none in the place of "auto"."""
    if hint is type(None):
        if text.lower() == "none":
            return None
        raise TypeError
    try:
        return float(text)
    except ValueError as error:
        raise TypeError from error


def _type_name(hint: Any) -> str:
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_type_name(option) for option in options)
    if origin is Literal:
        return " or ".join(map(repr, options))
    if origin is tuple:
        return f"a list of {_type_name(options[0])}"
    return "None" if hint is type(None) else hint.__name__


def _nearest(name: str, known) -> str:
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.4)
    return f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"


def _range_problems(parts: dict[str, Any]) -> list[tuple[str, Any, str]]:
    """(field, value, what is allowed) of every field whose type is right and whose value is not."""
    model, data, training = parts["model"], parts["data"], parts["training"]
    optimizer, checkpoint, evaluation = parts["optimizer"], parts["checkpoint"], parts["evaluation"]
    buckets = data.length_buckets
    rules = [
        ("model.target", model.target, bool(model.target), "name a target: a folder or a hub id"),
        ("model.num_layers", model.num_layers, model.num_layers >= 1, "at least 1"),
        ("model.block_size", model.block_size, model.block_size >= 2, "at least 2 (an anchor and a proposal)"),
        ("model.num_taps", model.num_taps, model.num_taps >= 1, "at least 1"),
        ("data.train_file", data.train_file, bool(data.train_file), "name a file of regenerated chats"),
        ("data.max_length", data.max_length, data.max_length >= 2, "at least 2 tokens"),
        (
            "data.length_buckets",
            buckets,
            bool(buckets) and list(buckets) == sorted(set(buckets)) and buckets[-1] >= data.max_length,
            f"rising lengths, the last at least data.max_length={data.max_length}",
        ),
        ("data.max_rows", data.max_rows, data.max_rows is None or data.max_rows >= 1, "at least 1, or None for all"),
        ("training.steps", training.steps, training.steps is None or training.steps >= 0, "0 or more, or None"),
        ("training.epochs", training.epochs, training.epochs > 0, "more than 0"),
        ("training.rows_per_step", training.rows_per_step, training.rows_per_step >= 1, "at least 1"),
        (
            "training.accumulation",
            training.accumulation,
            training.accumulation >= 1 and training.rows_per_step % training.accumulation == 0,
            f"a divisor of training.rows_per_step={training.rows_per_step}",
        ),
        ("training.anchors_per_row", training.anchors_per_row, training.anchors_per_row >= 1, "at least 1"),
        (
            "training.loss_decay_gamma",
            training.loss_decay_gamma,
            not isinstance(training.loss_decay_gamma, float) or training.loss_decay_gamma > 0,
            'more than 0, "auto", or None for no decay',
        ),
        ("training.loss_chunk", training.loss_chunk, training.loss_chunk >= 1, "at least 1"),
        ("training.seed", training.seed, 0 <= training.seed < 2**32, "from 0 to 2³²−1"),
        ("optimizer.learning_rate", optimizer.learning_rate, 0 < optimizer.learning_rate < 1, "between 0 and 1"),
        ("optimizer.warmup_ratio", optimizer.warmup_ratio, 0 <= optimizer.warmup_ratio < 1, "from 0 to below 1"),
        ("optimizer.weight_decay", optimizer.weight_decay, optimizer.weight_decay >= 0, "0 or more"),
        ("optimizer.b1", optimizer.b1, 0 <= optimizer.b1 < 1, "from 0 to below 1"),
        ("optimizer.b2", optimizer.b2, 0 <= optimizer.b2 < 1, "from 0 to below 1"),
        ("optimizer.clip_norm", optimizer.clip_norm, optimizer.clip_norm > 0, "more than 0"),
        ("checkpoint.directory", checkpoint.directory, bool(checkpoint.directory), "name the run's directory"),
        ("checkpoint.every_steps", checkpoint.every_steps, checkpoint.every_steps >= 0, "0 or more"),
        ("checkpoint.keep", checkpoint.keep, checkpoint.keep >= 1, "at least 1"),
        ("evaluation.rows", evaluation.rows, evaluation.rows >= 1, "at least 1"),
        ("evaluation.anchors_per_row", evaluation.anchors_per_row, evaluation.anchors_per_row >= 1, "at least 1"),
        ("evaluation.decode_batch_size", evaluation.decode_batch_size, evaluation.decode_batch_size >= 1, "at least 1"),
        (
            "evaluation.decode_width",
            evaluation.decode_width,
            evaluation.decode_width is None or 1 <= evaluation.decode_width <= model.block_size,
            f"from 1 to model.block_size={model.block_size}, or None",
        ),
        ("logging.every_steps", parts["logging"].every_steps, parts["logging"].every_steps >= 1, "at least 1"),
    ]
    return [(field, value, allowed) for field, value, fine, allowed in rules if not fine]

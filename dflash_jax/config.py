"""What an experiment is made of: frozen dataclasses, their defaults, and validation that names the field.

A config file is a Python file with `get_config()`, which starts from `default_config()` and sets fields. Defaults are
the paper's where it has them (paper section 5.1: 5 layers, block 16, 512 anchors, 3072 tokens, AdamW 6e-4, …).
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any, Literal

from ml_collections import ConfigDict

from dflash_jax.config_parts import ConfigError as ConfigError
from dflash_jax.config_parts import Rule, check_rules, checked_parts, defaults
from dflash_jax.config_parts import naming as naming


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Target and drafter.

    target: folder, hub id, or "smollm2-135m-instruct". Drafter sizes not set here are the target's.
    target_layer_ids: tapped layers, 0-based; empty: num_taps layers spread evenly.
    mask_token_id: an id of the target's vocabulary that no chat uses.
    initialisation: "random" (the paper's), "target" (copies of the target's first and last layers) or "regression" (a
    least-squares predictor fitted on the training rows, see training/regression_start.py).
    warm_start: a drafter folder or hub id to start from; its own shape then counts.
    """

    target: str = ""
    num_layers: int = 5
    block_size: int = 16
    num_taps: int = 5
    target_layer_ids: tuple[int, ...] = ()
    mask_token_id: int | None = None
    intermediate_size: int | None = None
    initialisation: Literal["random", "target", "regression"] = "random"
    warm_start: str | None = None
    target_dtype: Literal["float32", "bfloat16"] = "bfloat16"


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """What is trained and evaluated on: files of regenerated chats (JSON lines), or folders of prepared sets.

    Of a prepared set, train_file reads the split "train" and heldout_file "heldout"; without a heldout_file ("")
    nothing is evaluated and the last drafter is exported. Rows are cut at max_length (those of a prepared set were,
    when it was made) and padded to one of length_buckets. packing: rows to train on are packed into sequences of the
    last of length_buckets instead; training.rows_per_step and training.anchors_per_row then count by sequence.
    allow_other_target: train even if the rows were made for another target or tokenizer. features: a folder that
    python -m dflash_jax.data.features wrote for these rows; the target then runs only for decoding in evaluations and
    for a fitted or copied start.
    """

    train_file: str = ""
    heldout_file: str = ""
    max_length: int = 3072
    length_buckets: tuple[int, ...] = (3072,)
    packing: bool = False
    max_rows: int | None = None
    allow_other_target: bool = False
    features: str | None = None


@dataclasses.dataclass(frozen=True)
class TrainingConfig:
    """The run. rows_per_step counts all micro-batches; accumulation divides it.

    steps: updates; epochs: used when steps is not set. loss_decay_gamma: "auto" follows the block size (7, 5, 4 for
    16, 10, 8), None is no decay. random_cut: instead of weighting slot k, let it keep its loss with that
    probability: the same expected sum before normalisation, and fewer slots for the head to score. feature_cache:
    "memory" computes the target's features once a row and keeps them in host memory, "none" computes them in every
    step. remat: keep less of the forward pass for the backward pass, which computes a layer again but for its
    attention. scan_layers: run the target's layers between two taps as one loop, which compiles deep targets faster and
    takes a copy of its parameters (feature_cache "none"). time_limit_minutes: stop early, whatever the step.
    narrow_steps: so many first steps (a multiple of logging.every_steps) train blocks of narrow_width only, more of
    them with as many slots in all; the first slots decide most of a weak drafter's acceptance. loss: "labels", the
    paper's cross-entropy, or "teacher", the divergence from the target's own distribution over the loss_tokens most
    frequent answer tokens.
    """

    steps: int | None = None
    epochs: float = 6.0
    rows_per_step: int = 64
    accumulation: int = 1
    anchors_per_row: int = 512
    loss_decay_gamma: float | Literal["auto"] | None = "auto"
    random_cut: bool = False
    loss: Literal["labels", "teacher"] = "labels"
    loss_tokens: int = 4096
    narrow_steps: int = 0
    narrow_width: int = 2
    loss_chunk: int = 1024
    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    feature_cache: Literal["none", "memory"] = "none"
    remat: bool = False
    scan_layers: bool = False
    seed: int = 0
    time_limit_minutes: float | None = None


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """How the devices are shared out; their product is the number of devices, and one may be -1: what is left.
    With all of them 1 a run of one process takes one device, however many there are.

    data divides the rows. fsdp divides the rows and the parameters, which are gathered where they are used. tensor
    divides heads, MLP features and the vocabulary; it must divide the numbers of key/value heads. sequence, for long
    rows, divides their positions and anchors, and the parameters but for the tables; it must divide the padded lengths
    and the anchors.
    """

    data: int = -1
    fsdp: int = 1
    tensor: int = 1
    sequence: int = 1


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
    """directory holds checkpoints/, metrics.jsonl and drafter/, the best export so far.

    every_steps 0: only at the end. keep: how many checkpoints stay. draft_vocab_size: the drafter proposes only that
    many tokens, the most frequent ones of the training rows' answers (models/draft_vocabulary.py), or all of these if
    they are fewer; None: any. It is free to change, as training does not depend on it, but checkpoints that are there
    keep the one that they were saved with.
    """

    directory: str = ""
    every_steps: int = 500
    keep: int = 2
    export_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    draft_vocab_size: int | None = None


@dataclasses.dataclass(frozen=True)
class EvaluationConfig:
    """Fixed anchors on held-out rows, and real greedy decoding of held-out prompts. every_steps 0: only at the end.

    decode_width: width of the decoding (None: the block size). decode_every_steps: decoding costs more, so it has its
    own interval, a multiple of every_steps; 0: only at the end.
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
    """every_steps: how often a line goes to metrics.jsonl and the progress bar.

    profile_step: at this step of a process a trace of three steps is written to the run's directory, in profile/, for
    TensorBoard or Perfetto; None: never. tensorboard: metrics also go to event files in tensorboard/ there (extra
    `tensorboard`). wandb_project: they also go to this project of Weights & Biases (extra `wandb`).
    """

    every_steps: int = 10
    profile_step: int | None = None
    tensorboard: bool = False
    wandb_project: str | None = None


@dataclasses.dataclass(frozen=True)
class ExperimentConfig:
    """One experiment, checked."""

    model: ModelConfig
    data: DataConfig
    training: TrainingConfig
    mesh: MeshConfig
    optimizer: OptimizerConfig
    checkpoint: CheckpointConfig
    evaluation: EvaluationConfig
    logging: LoggingConfig


PARTS: dict[str, type] = typing.get_type_hints(ExperimentConfig)


def default_config() -> ConfigDict:
    """All fields with their defaults, to be changed by a config file; see `config_parts.defaults`."""
    return defaults(PARTS)


def to_experiment(config: Mapping[str, Any]) -> ExperimentConfig:
    """Checks every field and freezes the experiment.

    Raises:
        ConfigError: once, with all that is wrong, each as «field=value: what is allowed».
    """
    parts = checked_parts(config, PARTS)
    rules = [*_text_rules(parts), *_number_rules(parts), *_joint_rules(parts)]
    check_rules(parts, _AT_LEAST, rules)
    return ExperimentConfig(**parts)


# The least value of a field. None is fine where the type allows it.
_AT_LEAST = {
    "model.num_layers": 1,
    "model.block_size": 2,  # an anchor and a proposal
    "model.num_taps": 1,
    "model.mask_token_id": 0,
    "model.intermediate_size": 1,
    "data.max_length": 2,
    "data.max_rows": 1,
    "training.steps": 0,
    "training.rows_per_step": 1,
    "training.anchors_per_row": 1,
    "training.loss_chunk": 1,
    "training.loss_tokens": 2,
    "training.narrow_steps": 0,
    "training.time_limit_minutes": 0,
    "optimizer.weight_decay": 0,
    "checkpoint.every_steps": 0,
    "checkpoint.keep": 1,
    "checkpoint.draft_vocab_size": 1,
    "evaluation.every_steps": 0,
    "evaluation.rows": 1,
    "evaluation.anchors_per_row": 1,
    "evaluation.decode_every_steps": 0,
    "evaluation.decode_prompts": 0,
    "evaluation.decode_max_new_tokens": 2,  # the first token belongs to no round
    "evaluation.decode_batch_size": 1,
    "logging.every_steps": 1,
    "logging.profile_step": 0,
}


def _text_rules(parts: dict[str, Any]) -> list[Rule]:
    return [
        ("model.target", bool(parts["model"].target), "a folder, a hub id or smollm2-135m-instruct"),
        ("model.warm_start", parts["model"].warm_start != "", "a folder or a hub id, or None"),
        ("data.train_file", bool(parts["data"].train_file), "a file of regenerated chats, or a prepared set"),
        ("data.features", parts["data"].features != "", "a folder of features, or None"),
        ("checkpoint.directory", bool(parts["checkpoint"].directory), "the directory of the run"),
        ("logging.wandb_project", parts["logging"].wandb_project != "", "the name of a project, or None"),
    ]


def _number_rules(parts: dict[str, Any]) -> list[Rule]:
    training, optimizer = parts["training"], parts["optimizer"]
    gamma = training.loss_decay_gamma
    return [
        ("training.epochs", training.epochs > 0, "more than 0"),
        ("training.seed", 0 <= training.seed < 2**32, "from 0 to 2³²−1"),
        (
            "training.loss_decay_gamma",
            not isinstance(gamma, float) or gamma > 0,
            "more than 0, 'auto', or None for no decay",
        ),
        ("optimizer.learning_rate", 0 < optimizer.learning_rate < 1, "between 0 and 1"),
        ("optimizer.warmup_ratio", 0 <= optimizer.warmup_ratio < 1, "from 0 to below 1"),
        ("optimizer.b1", 0 <= optimizer.b1 < 1, "from 0 to below 1"),
        ("optimizer.b2", 0 <= optimizer.b2 < 1, "from 0 to below 1"),
        ("optimizer.clip_norm", optimizer.clip_norm > 0, "more than 0"),
    ]


def _joint_rules(parts: dict[str, Any]) -> list[Rule]:
    """Rules about two fields."""
    model, data, training, evaluation = (parts[name] for name in ("model", "data", "training", "evaluation"))
    buckets, width, every = data.length_buckets, evaluation.decode_width, evaluation.every_steps
    rising = bool(buckets) and buckets[0] >= 1 and list(buckets) == sorted(set(buckets))
    return [
        (
            "data.length_buckets",
            rising and buckets[-1] >= data.max_length,
            f"rising lengths, the last at least data.max_length={data.max_length}",
        ),
        (
            "training.accumulation",
            training.accumulation >= 1 and training.rows_per_step % training.accumulation == 0,
            f"a divisor of training.rows_per_step={training.rows_per_step}",
        ),
        (
            "training.feature_cache",
            data.features is None or training.feature_cache == "none",
            "'none' where data.features says where they are",
        ),
        (
            "training.narrow_width",
            training.narrow_steps == 0 or 2 <= training.narrow_width <= model.block_size,
            f"from 2 to model.block_size={model.block_size}",
        ),
        (
            "training.narrow_steps",
            training.narrow_steps % max(parts["logging"].every_steps, 1) == 0,
            "a multiple of logging.every_steps, so that a logged mean covers one width",
        ),
        (
            "evaluation.decode_width",
            width is None or 1 <= width <= model.block_size,
            f"from 1 to model.block_size={model.block_size}, or None",
        ),
        (
            "evaluation.decode_every_steps",
            evaluation.decode_every_steps % every == 0 if every else evaluation.decode_every_steps == 0,
            f"0 or a multiple of evaluation.every_steps={every}",
        ),
    ]

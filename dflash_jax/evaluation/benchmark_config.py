"""The settings of a benchmark: what a config file of `dflash_jax.evaluation.benchmark` sets, checked by name."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from ml_collections import ConfigDict

from dflash_jax.config_parts import Rule, check_rules, checked_parts, defaults

FLOAT32_MAX = float(np.finfo(np.float32).max)


@dataclasses.dataclass(frozen=True)
class ModelsConfig:
    """target: folder, hub id, or "smollm2-135m-instruct". drafter: folder or hub id. Dtypes are of the parameters.

    draft_vocabulary: whether the drafter proposes only the tokens that its folder lists, if it lists any.
    """

    target: str = ""
    target_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    drafter: str = ""
    drafter_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    draft_vocabulary: bool = True


@dataclasses.dataclass(frozen=True)
class PromptsConfig:
    """What is asked.

    sets: names of known sets (data/presets.py), or files of prompts. limit: rows read of each, from the first; None:
    all. template_arguments: variables of the chat template as JSON, such as {"enable_thinking": false}.
    """

    sets: tuple[str, ...] = ("humaneval",)
    limit: int | None = 64
    template_arguments: str = "{}"


@dataclasses.dataclass(frozen=True)
class DecodingConfig:
    """How both arms decode.

    batch_sizes: prompts decoded together (concurrency); each set needs at least as many prompts as the largest.
    widths: of the speculative arm, numbers or "adaptive"; empty: the drafter's own. repetitions: timed runs, after one
    that compiles.
    """

    max_new_tokens: int = 256
    batch_sizes: tuple[int, ...] = (1, 2, 4, 8)
    temperatures: tuple[float, ...] = (0.0, 1.0)
    widths: tuple[int | Literal["adaptive"], ...] = ()
    proposals: Literal["argmax", "sampled"] = "argmax"
    seed: int = 0
    repetitions: int = 3


@dataclasses.dataclass(frozen=True)
class OutputConfig:
    """directory: gets results.json, table.md and plot.png; what an earlier run left there is replaced."""

    directory: str = ""


@dataclasses.dataclass(frozen=True)
class BenchmarkConfig:
    """One benchmark, checked."""

    models: ModelsConfig
    prompts: PromptsConfig
    decoding: DecodingConfig
    output: OutputConfig


PARTS: dict[str, type] = typing.get_type_hints(BenchmarkConfig)


def default_config() -> ConfigDict:
    """All fields with their defaults, to be changed by a config file; see `config_parts.defaults`."""
    return defaults(PARTS)


def to_benchmark(config: Mapping[str, Any]) -> BenchmarkConfig:
    """Checks every field and freezes the benchmark.

    Raises:
        ConfigError: once, with all that is wrong, each as «field=value: what is allowed».
    """
    parts = checked_parts(config, PARTS)
    at_least = {"prompts.limit": 1, "decoding.max_new_tokens": 2, "decoding.repetitions": 1}
    check_rules(parts, at_least, _rules(parts))
    return BenchmarkConfig(**parts)


def _rules(parts: Mapping[str, Any]) -> list[Rule]:
    models, prompts, decoding = parts["models"], parts["prompts"], parts["decoding"]
    return [
        ("models.target", bool(models.target), "a folder, a hub id or smollm2-135m-instruct"),
        ("models.drafter", bool(models.drafter), "a folder or a hub id: a benchmark always runs both arms"),
        ("prompts.sets", _several(prompts.sets) and all(prompts.sets), "different sets, at least one"),
        (
            "decoding.batch_sizes",
            _several(decoding.batch_sizes) and min(decoding.batch_sizes) >= 1,
            "different sizes, at least one, each at least 1",
        ),
        (
            "decoding.temperatures",
            _several(decoding.temperatures) and all(0 <= t <= FLOAT32_MAX for t in decoding.temperatures),
            "different temperatures, at least one, each at least 0 and finite in float32",
        ),
        (
            "decoding.widths",
            len(set(decoding.widths)) == len(decoding.widths)
            and all(width == "adaptive" or width >= 2 for width in decoding.widths),
            "different widths, each adaptive or from 2 (anchor and proposal) to the drafter's; empty: the drafter's",
        ),
        (
            "decoding.proposals",
            decoding.proposals == "argmax" or "adaptive" not in decoding.widths,
            "argmax where decoding.widths holds adaptive",
        ),
        ("decoding.seed", 0 <= decoding.seed < 2**32, "from 0 to 2³²−1"),
        ("output.directory", bool(parts["output"].directory), "the directory of the results"),
    ]


def _several(values: Sequence) -> bool:
    return 0 < len(set(values)) == len(values)

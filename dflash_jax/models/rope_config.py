"""Rotary position settings: one form for every spelling that config.json files of transformers 4 and 5 use."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dflash_jax.models.config_fields import ConfigError, Fields

ROPE_KINDS = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding over a whole head.

    Attributes:
        theta: base of the inverse frequencies.
        kind: "default", "linear", "llama3" or "yarn".
        factor: how many times the context was stretched (1.0 for "default").
        original_max_position: context length before stretching, in tokens ("llama3" and "yarn").
        low_freq_factor, high_freq_factor: bounds of the "llama3" blend.
        beta_fast, beta_slow: rotations that bound the "yarn" blend.
        attention_factor: factor on cos and sin in "yarn"; None derives it from factor and mscale.
        mscale, mscale_all_dim: used for that derivation when both are set.
        truncate: whether "yarn" rounds its bounds to whole dimensions.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    original_max_position: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self):
        if self.kind not in ROPE_KINDS:
            raise ConfigError(f"rope_type {self.kind!r} is not supported; supported: {', '.join(ROPE_KINDS)}")
        if not self.theta > 0:
            raise ConfigError(f"rope_theta must be positive, got {self.theta}")
        if self.kind in ("llama3", "yarn") and self.original_max_position is None:
            raise ConfigError(f"original_max_position_embeddings is needed for rope_type {self.kind!r}")
        if self.kind == "llama3":
            self._check_llama3()

    def _check_llama3(self) -> None:
        low, high = self.low_freq_factor, self.high_freq_factor
        if low is None or high is None or not low < high:
            raise ConfigError(
                f"rope_type 'llama3' needs low_freq_factor < high_freq_factor, got low_freq_factor={low}, "
                f"high_freq_factor={high}"
            )


def parse_rope(config: Mapping[str, Any]) -> RopeConfig:
    """Reads the rotary settings of a config.json.

    Accepted spellings: rope_theta at the top level, in rope_parameters (transformers 5) or in rope_scaling; scaling in
    rope_parameters or rope_scaling (transformers 4), its kind as rope_type or, in older files, type. Two places that
    contradict each other are an error, since readers differ in which one they believe.

    Args:
        config: the parsed config.json.

    Returns:
        The settings, with original_max_position filled in as transformers does (max_position_embeddings if not set).

    Raises:
        ConfigError: rope_theta is missing, the kind is not supported, or a needed field is absent or out of range.
    """
    section, scaling = _scaling_section(config)
    fields = Fields((section + ".", scaling))
    kind = _kind(scaling)
    _refuse_partial_rotation(scaling, config)
    theta = _theta(config)
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(theta=theta, kind=kind, factor=fields.number("factor"))
    original = _original_max_position(config, scaling)
    if kind == "llama3":
        return RopeConfig(
            theta=theta,
            kind=kind,
            factor=fields.number("factor"),
            original_max_position=original,
            low_freq_factor=fields.number("low_freq_factor"),
            high_freq_factor=fields.number("high_freq_factor"),
        )
    return _parse_yarn(fields, theta, original, config)


def rope_to_dict(rope: RopeConfig) -> dict[str, Any]:
    """The transformers 5 rope_parameters object for these settings, with only the fields its kind uses."""
    result: dict[str, Any] = {"rope_type": rope.kind, "rope_theta": rope.theta}
    if rope.kind == "default":
        return result
    result["factor"] = rope.factor
    if rope.kind == "linear":
        return result
    result["original_max_position_embeddings"] = rope.original_max_position
    if rope.kind == "llama3":
        return {**result, "low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    result |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow}
    for name in ("attention_factor", "mscale", "mscale_all_dim"):
        if getattr(rope, name) is not None:
            result[name] = getattr(rope, name)
    if not rope.truncate:
        result["truncate"] = False
    return result


def _scaling_section(config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """The (name, content) of rope_parameters or rope_scaling; an error if both are set and disagree."""
    present = {}
    for name in ("rope_parameters", "rope_scaling"):
        section = config.get(name) or {}
        if not isinstance(section, Mapping):
            raise ConfigError(f"{name} must be a JSON object or null, got {section!r}")
        if any(isinstance(value, Mapping) for value in section.values()):
            section = _single_layer_type(name, section)
        present[name] = section
    parameters, scaling = present["rope_parameters"], present["rope_scaling"]
    if not parameters or not scaling:
        return ("rope_scaling", scaling) if scaling else ("rope_parameters", parameters)
    if _without_spelling(parameters) != _without_spelling(scaling):
        raise ConfigError(
            f"rope_parameters {dict(parameters)} and rope_scaling {dict(scaling)} contradict each other; "
            "correct one of them or remove rope_scaling"
        )
    return "rope_parameters", parameters


def _single_layer_type(name: str, section: Mapping[str, Any]) -> Mapping[str, Any]:
    if set(section) - {"full_attention"} or not isinstance(section["full_attention"], Mapping):
        raise ConfigError(f"{name} with settings per layer type is only supported for full_attention, got {section!r}")
    return section["full_attention"]


def _without_spelling(section: Mapping[str, Any]) -> dict[str, Any]:
    """The section as compared for contradictions: kind under one name, no theta, no unset fields."""
    rest = {k: v for k, v in section.items() if k not in ("type", "rope_type", "rope_theta") and v is not None}
    return {**rest, "rope_type": section.get("rope_type") or section.get("type") or "default"}


def _kind(scaling: Mapping[str, Any]) -> str:
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    # transformers rewrites "mrope" to "default" when it saves, and keeps the sections
    if kind == "mrope" or scaling.get("mrope_section") is not None:
        raise ConfigError(f"rope_type 'mrope' (vision) is not supported; supported: {', '.join(ROPE_KINDS)}")
    if kind not in ROPE_KINDS:
        raise ConfigError(f"rope_type {kind!r} is not supported; supported: {', '.join(ROPE_KINDS)}")
    return kind


def _theta(config: Mapping[str, Any]) -> float:
    values = {}
    for prefix in ("rope_parameters.", "rope_scaling.", ""):
        section = config.get(prefix.rstrip(".")) or {} if prefix else config
        section = section.get("full_attention", section)
        if section.get("rope_theta") is not None:
            values[prefix + "rope_theta"] = Fields((prefix, section)).number("rope_theta")
    if not values:
        raise ConfigError(
            "rope_theta is missing: set it at the top level or in rope_parameters. There is no safe default; "
            "the value is the one that the checkpoint was trained with"
        )
    if len(set(values.values())) > 1:
        raise ConfigError(f"the places that set rope_theta contradict each other: {values}; make them equal")
    return next(iter(values.values()))


def _refuse_partial_rotation(scaling: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    fields = Fields(("rope_parameters.", scaling), ("", config))
    if fields.find("partial_rotary_factor") and fields.number("partial_rotary_factor") != 1.0:
        name, value = fields.require("partial_rotary_factor")
        raise ConfigError(f"{name} {value} is not supported: only rotation of the whole head (1.0) is")


def _original_max_position(config: Mapping[str, Any], scaling: Mapping[str, Any]) -> int:
    # transformers lets a top-level value win over the one beside the factor
    fields = Fields(("", config), ("rope_parameters.", scaling))
    if fields.find("original_max_position_embeddings"):
        return fields.integer("original_max_position_embeddings")
    return fields.integer("max_position_embeddings")


def _parse_yarn(fields: Fields, theta: float, original: int, config: Mapping[str, Any]) -> RopeConfig:
    factor = fields.optional_number("factor")
    if factor is None:
        factor = Fields(("", config)).integer("max_position_embeddings") / original
    return RopeConfig(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_max_position=original,
        # transformers reads an explicit 0 as "not set"
        beta_fast=fields.get("beta_fast") or 32.0,
        beta_slow=fields.get("beta_slow") or 1.0,
        attention_factor=fields.optional_number("attention_factor"),
        mscale=fields.get("mscale") or None,
        mscale_all_dim=fields.get("mscale_all_dim") or None,
        truncate=fields.boolean("truncate", default=True),
    )

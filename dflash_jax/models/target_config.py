"""Targets by family: config.json of Llama 3.x, SmolLM2, Qwen2.5 and Qwen3 → TargetConfig, everything else refused."""

import itertools
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dflash_jax.models.config_fields import ConfigError, Fields, check_attention_shape
from dflash_jax.models.rope_config import RopeConfig, parse_rope

FAMILIES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
SUPPORTED = "supported targets are dense models with full attention: llama (Llama 3.x, SmolLM2), qwen2 (Qwen2.5), qwen3"

_EXPERT_FIELDS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_LINEAR_ATTENTION_FIELDS = ("linear_num_key_heads", "linear_num_value_heads", "linear_conv_kernel_dim")
_LINEAR_LAYER_TYPES = ("linear_attention", "mamba", "recurrent", "conv")


@dataclass(frozen=True)
class TargetConfig:
    """Sizes and switches of a dense decoder-only target.

    Attributes:
        family: "llama", "qwen2" or "qwen3".
        vocab_size: rows V of the embedding table, its padded tail included.
        hidden_size, intermediate_size, num_layers: D, F and L.
        num_heads, num_kv_heads, head_dim: N, K and H; N·H need not equal D.
        rms_norm_eps: epsilon of every RMSNorm.
        rope: rotary positions.
        max_position_embeddings: the longest context, in tokens.
        tie_word_embeddings: whether the LM head is the embedding table.
        qkv_bias, o_bias, mlp_bias: which projections have a bias.
        qk_norm: whether queries and keys pass an RMSNorm per head.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False

    def __post_init__(self):
        if self.family not in FAMILIES:
            raise ConfigError(f"family {self.family!r} is not supported; {SUPPORTED}")
        check_attention_shape(self.hidden_size, self.num_heads, self.num_kv_heads, self.head_dim)


def parse_target_config(config: Mapping[str, Any]) -> TargetConfig:
    """Reads the config.json of a target.

    Args:
        config: the parsed config.json, as written by transformers 4 or 5.

    Returns:
        The target's sizes and switches.

    Raises:
        ConfigError: the model is of a kind that is not supported, or a field is missing or out of range.
    """
    fields = Fields(("", config))
    _refuse_unsupported(config, fields)
    family = config["model_type"]
    num_heads = fields.integer("num_attention_heads")
    hidden_size = fields.integer("hidden_size")
    attention_bias = fields.boolean("attention_bias", default=False)
    return TargetConfig(
        family=family,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", default=num_heads if family == "llama" else None),
        head_dim=_head_dim(fields, family, hidden_size, num_heads),
        rms_norm_eps=fields.number("rms_norm_eps"),
        rope=parse_rope(config),
        max_position_embeddings=fields.integer("max_position_embeddings"),
        tie_word_embeddings=fields.boolean("tie_word_embeddings", default=False),
        # qwen2 always has a bias on q, k, v and never on o; the others follow attention_bias for all four
        qkv_bias=family == "qwen2" or attention_bias,
        o_bias=family != "qwen2" and attention_bias,
        mlp_bias=family == "llama" and fields.boolean("mlp_bias", default=False),
        qk_norm=family == "qwen3",
    )


def default_target_layer_ids(num_layers: int, taps: int) -> tuple[int, ...]:
    """Tapped layers when nothing else decides: spread evenly from layer 1 to layer L−3.

    Id i is the output of the 0-based target layer i. Halves round to even, as in the reference: 30 layers and 5 taps
    give 1, 8, 14, 20, 27.

    Args:
        num_layers: layers L of the target.
        taps: how many layers M to tap.

    Returns:
        M ascending layer ids.

    Raises:
        ConfigError: the target is too shallow for that many distinct taps.
    """
    if taps < 1 or num_layers < 1:
        raise ConfigError(f"taps and the target's layers must be at least 1, got {taps} taps over {num_layers} layers")
    if taps == 1:
        return (num_layers // 2,)
    ids = tuple(round(1 + j * (num_layers - 4) / (taps - 1)) for j in range(taps))
    if any(later <= earlier for earlier, later in itertools.pairwise(ids)):
        raise ConfigError(
            f"{taps} taps over a target of {num_layers} layers give ids {list(ids)}, which are not distinct; "
            "set target_layer_ids, or use fewer taps"
        )
    return ids


def check_target_layer_ids(target_layer_ids: Sequence[int], num_layers: int) -> None:
    """Checks tap ids against the depth of the target.

    Warns on the last layer: Hugging Face stores its output after the final norm, inference engines before it.

    Args:
        target_layer_ids: 0-based ids; id i is the output of layer i.
        num_layers: layers L of the target.

    Raises:
        ConfigError: no ids, an id outside 0..L−1, or an id given twice.
    """
    ids = list(target_layer_ids)
    if not ids:
        raise ConfigError("target_layer_ids is empty; name at least one layer of the target")
    outside = [i for i in ids if not 0 <= i < num_layers]
    if outside:
        raise ConfigError(f"target_layer_ids={ids}: {outside} lie outside the target's layers 0..{num_layers - 1}")
    if len(set(ids)) < len(ids):
        raise ConfigError(f"target_layer_ids={ids} name a layer twice; every tap must be a different layer")
    if num_layers - 1 in ids:
        warnings.warn(
            f"target_layer_ids {ids} tap the last layer ({num_layers - 1}), before the final norm here; "
            "Hugging Face stores that layer's output after it",
            stacklevel=2,
        )


def _refuse_unsupported(config: Mapping[str, Any], fields: Fields) -> None:
    """Refuses by name, the most telling reason first, so that no other field is blamed for it."""
    if fields.get("quantization_config") is not None:
        raise _refusal(f"quantised weights (quantization_config {config['quantization_config']!r})")
    if fields.get("vision_config") is not None or fields.get("audio_config") is not None:
        raise _refusal(f"a model with vision or audio (model_type {config.get('model_type')!r})")
    experts = next((name for name in _EXPERT_FIELDS if fields.get(name)), None)
    if experts:
        raise _refusal(f"a mixture of experts ({experts} {config[experts]!r})")
    if any(fields.get(name) is not None for name in _LINEAR_ATTENTION_FIELDS):
        raise _refusal(f"linear attention (model_type {config.get('model_type')!r})")
    _refuse_layer_types(config, fields)
    _refuse_positions(config, fields)
    family = fields.require("model_type")[1]
    if family not in FAMILIES:
        raise _refusal(f"model_type {family!r}")
    architectures = fields.optional_strings("architectures")
    if architectures and FAMILIES[family] not in architectures:
        raise _refusal(f"architectures {list(architectures)} with model_type {family!r} (needs {FAMILIES[family]})")
    if fields.get("hidden_act", "silu") != "silu":
        raise _refusal(f"hidden_act {config['hidden_act']!r} (needs silu)")


def _refuse_layer_types(config: Mapping[str, Any], fields: Fields) -> None:
    layer_types = fields.optional_strings("layer_types")
    if layer_types is not None:
        other = sorted(set(layer_types) - {"full_attention"})
        if any(kind in _LINEAR_LAYER_TYPES for kind in other):
            raise _refusal(f"linear attention (layer_types with {other})")
        if other:
            raise _refusal(f"sliding-window attention (layer_types with {other})")
        num_layers = fields.integer("num_hidden_layers")
        if len(layer_types) != num_layers:
            raise ConfigError(f"layer_types has {len(layer_types)} entries, num_hidden_layers is {num_layers}")
        return
    window = fields.get("sliding_window")
    if window is None:
        return
    if config.get("model_type") not in ("qwen2", "qwen3"):
        raise _refusal(f"sliding-window attention (sliding_window {window}, model_type {config.get('model_type')!r})")
    # Qwen writes a window even where it is off, and slides only from layer max_window_layers on
    first = fields.integer("max_window_layers", minimum=0, default=28)
    if fields.boolean("use_sliding_window", default=False) and first < fields.integer("num_hidden_layers"):
        raise _refusal(
            f"sliding-window attention (use_sliding_window true, sliding_window {window}, max_window_layers {first})"
        )


def _refuse_positions(config: Mapping[str, Any], fields: Fields) -> None:
    kind = fields.get("position_embedding_type", "rope")
    if kind not in ("rope", "rotary"):
        raise _refusal(f"position_embedding_type {kind!r} (needs rotary positions)")
    if fields.get("alibi"):
        raise _refusal("ALiBi positions (alibi true; needs rotary positions)")
    # in no_rope_layers, 1 marks a layer that does rotate
    if any(not rotates for rotates in fields.get("no_rope_layers") or ()):
        raise _refusal(f"layers without rotary positions (no_rope_layers {config['no_rope_layers']!r})")


def _refusal(what: str) -> ConfigError:
    return ConfigError(f"{what} is not supported; {SUPPORTED}")


def _head_dim(fields: Fields, family: str, hidden_size: int, num_heads: int) -> int:
    if fields.find("head_dim") or family == "qwen3":
        # absent in a Qwen3 file it would mean 128 to one reader and hidden/heads to another
        return fields.integer("head_dim")
    if hidden_size % num_heads:
        raise ConfigError(
            f"hidden_size ({hidden_size}) is not a multiple of num_attention_heads ({num_heads}), and head_dim is unset"
        )
    return hidden_size // num_heads

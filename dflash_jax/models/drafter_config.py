"""DFlash drafters: config.json ↔ DrafterConfig, and the checks against a target."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dflash_jax.models.config_fields import ConfigError, Fields, check_attention_shape
from dflash_jax.models.rope_config import RopeConfig, parse_rope, rope_to_dict
from dflash_jax.models.speculators_config import TYPE, from_speculators
from dflash_jax.models.target_config import TargetConfig, check_target_layer_ids

ARCHITECTURE = "DFlashDraftModel"
LAYER_TYPES = ("full_attention", "sliding_attention")

# what these fields would change is not in this drafter; reading past them would give wrong proposals silently
_REFUSED_FIELDS = {
    "sample_from_anchor": "its slot 0 proposes a token, while here slot 0 is the anchor and proposes nothing",
    "d2t": "it proposes over a reduced vocabulary",
    "draft_vocab_size": "it proposes over a reduced vocabulary",
    "attention_sink_bias": "its attention has learned sinks",
    "use_swa": "its sliding windows are not described by layer_types and sliding_window",
    "attention_bias": "its attention projections have biases",
    "quantization_config": "its weights are quantised",
}


@dataclass(frozen=True)
class DrafterConfig:
    """Sizes and semantics of a DFlash drafter.

    Attributes:
        hidden_size, intermediate_size, num_layers, num_heads, num_kv_heads, head_dim: D (equal to the target's), F, L,
            N, K and H of the drafter.
        rms_norm_eps: epsilon of every RMSNorm.
        vocab_size: rows V of the target's embedding table.
        max_position_embeddings: the longest context, in tokens.
        rope: rotary positions of the drafter, independent of the target's.
        block_size: slots W of a block, anchor included; W slots propose W−1 tokens.
        mask_token_id: the token in slots 1..W−1.
        target_layer_ids: tapped target layers, in the order in which fc reads them; id i is the output of layer i.
        num_target_layers: layers of the target.
        layer_types: "full_attention" or "sliding_attention" per layer.
        sliding_window: a slot of a sliding layer sees keys at distances below this; None without such layers.
        is_causal: whether attention inside the block is causal, for all layers; None leaves it to the layer type.
        tie_word_embeddings: as in the target; the drafter itself has neither embedding nor head.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    vocab_size: int
    max_position_embeddings: int
    rope: RopeConfig
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    layer_types: tuple[str, ...]
    sliding_window: int | None = None
    is_causal: bool | None = None
    tie_word_embeddings: bool = False

    def __post_init__(self):
        check_attention_shape(self.hidden_size, self.num_heads, self.num_kv_heads, self.head_dim)
        if self.block_size < 2:
            raise ConfigError(f"block_size must be at least 2 (the anchor and one proposal), got {self.block_size}")
        check_mask_token_id(self.mask_token_id, self.vocab_size)
        check_target_layer_ids(self.target_layer_ids, self.num_target_layers)
        self._check_layer_types()

    def layer_is_causal(self, layer: int) -> bool:
        """Whether a slot of this layer sees only the slots up to itself in its own block.

        An explicit is_causal decides for all layers; without one, sliding layers are causal and full layers are not.
        """
        if self.is_causal is not None:
            return self.is_causal
        return self.layer_types[layer] == "sliding_attention"

    def layer_window(self, layer: int) -> int | None:
        """The sliding window of this layer in context positions, or None where the whole context is seen."""
        return self.sliding_window if self.layer_types[layer] == "sliding_attention" else None

    def _check_layer_types(self) -> None:
        if len(self.layer_types) != self.num_layers:
            raise ConfigError(
                f"layer_types has {len(self.layer_types)} entries, num_hidden_layers is {self.num_layers}"
            )
        unknown = sorted(set(self.layer_types) - set(LAYER_TYPES))
        if unknown:
            raise ConfigError(f"layer_types holds {unknown}; supported in a drafter: {', '.join(LAYER_TYPES)}")
        if "sliding_attention" in self.layer_types and (self.sliding_window is None or self.sliding_window < 1):
            raise ConfigError(
                f"layer_types has sliding_attention, so sliding_window must be at least 1, got {self.sliding_window}"
            )


def parse_drafter_config(config: Mapping[str, Any], *, num_target_layers: int | None = None) -> DrafterConfig:
    """Reads the config.json of a drafter in the z-lab or the speculators layout.

    In the z-lab layout the drafter's own fields (block_size, mask_token_id, target_layer_ids, num_target_layers,
    is_causal) may stand in dflash_config, at the top level, or some here and some there; dflash_config wins.

    Args:
        config: the parsed config.json.
        num_target_layers: layers of the target, for the speculators layout, which need not say.

    Returns:
        The drafter's sizes and semantics.

    Raises:
        ConfigError: not a DFlash drafter, something in it can't be represented, or a field is missing or out of range.
    """
    if TYPE in config:
        config = from_speculators(config, num_target_layers=num_target_layers)
    fields = Fields(("dflash_config.", config.get("dflash_config") or {}), ("", config))
    _refuse_unsupported(fields)
    num_layers = fields.integer("num_hidden_layers")
    num_heads = fields.integer("num_attention_heads")
    layer_types = fields.optional_strings("layer_types") or _layer_types_from_window(fields, num_layers)
    return DrafterConfig(
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads"),
        head_dim=fields.integer("head_dim"),
        rms_norm_eps=fields.number("rms_norm_eps"),
        vocab_size=fields.integer("vocab_size"),
        max_position_embeddings=fields.integer("max_position_embeddings"),
        rope=parse_rope(config),
        block_size=fields.integer("block_size", minimum=2),
        mask_token_id=fields.integer("mask_token_id", minimum=0),
        target_layer_ids=_target_layer_ids(fields),
        num_target_layers=fields.integer("num_target_layers"),
        layer_types=layer_types,
        sliding_window=fields.optional_integer("sliding_window") if "sliding_attention" in layer_types else None,
        is_causal=_is_causal(fields),
        tie_word_embeddings=fields.boolean("tie_word_embeddings", default=False),
    )


def drafter_config_to_dict(config: DrafterConfig, *, dtype: str = "float32") -> dict[str, Any]:
    """The config.json of a drafter, in the layout that vLLM, SGLang and the reference load.

    block_size, rope_theta and the rope scaling stand in two places each, since readers differ in where they look.
    is_causal is written whenever one value describes all layers; a mix of causal sliding and bidirectional full
    layers has no such value and is what its absence means.

    Args:
        config: the drafter.
        dtype: the dtype of the weights beside it, such as "bfloat16".

    Returns:
        A JSON-serialisable dict that parse_drafter_config reads back to the same semantics.
    """
    sliding = [i for i, kind in enumerate(config.layer_types) if kind == "sliding_attention"]
    causal = {config.layer_is_causal(i) for i in range(config.num_layers)}
    rope_parameters = rope_to_dict(config.rope)
    rope_scaling = {name: value for name, value in rope_parameters.items() if name != "rope_theta"}
    result = {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "block_size": config.block_size,
        "dflash_config": {
            "block_size": config.block_size,
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": list(config.target_layer_ids),
        },
        "dtype": dtype,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": config.intermediate_size,
        "layer_types": list(config.layer_types),
        "max_position_embeddings": config.max_position_embeddings,
        "max_window_layers": sliding[0] if sliding else config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": config.num_kv_heads,
        "num_target_layers": config.num_target_layers,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": rope_parameters,
        "rope_scaling": None if config.rope.kind == "default" else rope_scaling,
        "rope_theta": config.rope.theta,
        "sliding_window": config.sliding_window if sliding else None,
        "tie_word_embeddings": config.tie_word_embeddings,
        "use_sliding_window": bool(sliding),
        "vocab_size": config.vocab_size,
    }
    if len(causal) == 1:
        result["is_causal"] = causal.pop()
    return result


def check_mask_token_id(
    mask_token_id: int | None, embedding_rows: int, special_ids: Mapping[str, int | None] | None = None
) -> None:
    """Checks that the mask token is a token of its own inside the embedding table.

    Args:
        mask_token_id: the id; ids in the padded tail of the table, past the tokenizer's last token, are fine.
        embedding_rows: rows V of the target's embedding table.
        special_ids: ids it must differ from by name, such as {"pad_token_id": 0, "eos_token_id": 2}; None is skipped.

    Raises:
        ConfigError: the id is unset, outside the table, or one of the special ids.
    """
    if mask_token_id is None:
        raise ConfigError("mask_token_id is not set; choose a token that never occurs in the data")
    if isinstance(mask_token_id, bool) or not isinstance(mask_token_id, int) or not 0 <= mask_token_id < embedding_rows:
        raise ConfigError(
            f"mask_token_id={mask_token_id!r} lies outside the target's embedding table: must be in "
            f"0..{embedding_rows - 1}"
        )
    clashes = [name for name, special in (special_ids or {}).items() if special == mask_token_id]
    if clashes:
        raise ConfigError(
            f"mask_token_id={mask_token_id} equals {' and '.join(clashes)} of the target; "
            "choose a token with no other use"
        )


def check_drafter_matches_target(drafter: DrafterConfig, target: TargetConfig) -> None:
    """Checks, before anything is compiled, that a drafter was made for a target of this shape.

    Raises:
        ConfigError: the number of target layers, the hidden size or the vocabulary differ; all differences are named.
    """
    problems = []
    if drafter.num_target_layers != target.num_layers:
        problems.append(
            f"layers: the drafter was trained for a target of {drafter.num_target_layers} layers (num_target_layers), "
            f"this target has {target.num_layers}"
        )
    if drafter.hidden_size != target.hidden_size:
        problems.append(
            f"hidden size: the drafter's hidden_size is {drafter.hidden_size}, the target's is {target.hidden_size}"
        )
    if drafter.vocab_size != target.vocab_size:
        problems.append(
            f"vocabulary: the drafter's vocab_size is {drafter.vocab_size}, the target's is {target.vocab_size}"
        )
    if problems:
        raise ConfigError(
            "the drafter doesn't fit this target; use the target it was trained for. " + "; ".join(problems)
        )


def _refuse_unsupported(fields: Fields) -> None:
    architectures = fields.optional_strings("architectures") or ()
    if ARCHITECTURE not in architectures:
        raise ConfigError(f"architectures {list(architectures)} is not a supported drafter; supported: {ARCHITECTURE}")
    for name, reason in _REFUSED_FIELDS.items():
        full_name, value = fields.find(name) or (name, None)
        if value and not (name == "draft_vocab_size" and value == fields.get("vocab_size")):
            raise ConfigError(f"a drafter with {full_name} {value!r} is not supported: {reason}")
    if fields.get("model_type", "qwen3") != "qwen3":
        raise ConfigError(f"model_type {fields.get('model_type')!r} is not supported in a drafter; supported: qwen3")
    if fields.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"hidden_act {fields.get('hidden_act')!r} is not supported in a drafter; supported: silu")


def _target_layer_ids(fields: Fields) -> tuple[int, ...]:
    for name in ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids"):
        if fields.find("target_layer_ids") is None and fields.find(name):
            raise ConfigError(
                f"{name} may count the layer that is entered, one higher than target_layer_ids, which count outputs; "
                "convert them explicitly and set dflash_config.target_layer_ids"
            )
    return fields.integers("target_layer_ids")


def _is_causal(fields: Fields) -> bool | None:
    # some trainers export the same switch as dflash_config.causal
    values = {name: fields.boolean(name, default=False) for name in ("is_causal", "causal") if fields.find(name)}
    if len(set(values.values())) > 1:
        raise ConfigError(f"is_causal and causal contradict each other: {values}; remove one")
    return next(iter(values.values()), None)


def _layer_types_from_window(fields: Fields, num_layers: int) -> tuple[str, ...]:
    """Layer types as Qwen3 derives them where the config lists none."""
    slides = fields.boolean("use_sliding_window", default=False) and fields.find("sliding_window") is not None
    first = fields.integer("max_window_layers", minimum=0, default=28) if slides else num_layers
    return tuple("sliding_attention" if i >= first else "full_attention" for i in range(num_layers))

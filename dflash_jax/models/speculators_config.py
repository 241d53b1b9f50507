"""A drafter's config.json in the layout of the speculators library, which vLLM reads too ↔ the z-lab layout.

The tensors are those of the z-lab layout. What differs: the decoder's sizes stand in transformer_layer_config, the
target is the "verifier", and taps are counted by the layer that is entered, one more than by the layer that is left.
"""

from collections.abc import Mapping
from typing import Any

from dflash_jax.models.config_fields import ConfigError, Fields

TYPE = "speculators_model_type"
ALGORITHM = "dflash"

# fields of the z-lab layout that are no part of the decoder's description
_NOT_OF_THE_DECODER = ("architectures", "block_size", "dflash_config", "is_causal", "num_target_layers")


def reduced_vocabulary(config: Mapping[str, Any]) -> int | None:
    """How many tokens the drafter proposes, by its config.json; None: any, or it is in another layout.

    Raises:
        ConfigError: more than there are, or none.
    """
    if TYPE not in config:
        return None
    fields = Fields(("", config), ("transformer_layer_config.", config.get("transformer_layer_config") or {}))
    size, vocab_size = fields.optional_integer("draft_vocab_size"), fields.integer("vocab_size")
    if size is not None and not 1 <= size <= vocab_size:
        raise ConfigError(f"draft_vocab_size {size} must be from 1 to vocab_size, {vocab_size}")
    return None if size == vocab_size else size


def to_speculators(config: Mapping[str, Any], *, verifier: str, draft_vocab_size: int | None = None) -> dict[str, Any]:
    """The same drafter in the speculators layout.

    num_target_layers is no field of that layout; other readers ignore it.

    Args:
        config: a config.json in the z-lab layout, as drafter_config_to_dict gives it.
        verifier: hub id or folder of the target.
        draft_vocab_size: how many tokens it proposes, if the file holds their table; None: any.

    Raises:
        ConfigError: a causal layer in a drafter whose layers don't all slide. The layout has one switch for causality,
            which speculators applies to sliding layers and vLLM to all.
    """
    causal, sliding = config.get("is_causal"), set(config["layer_types"]) == {"sliding_attention"}
    if causal is None or (causal and not sliding):
        raise ConfigError(
            "is_causal: in the speculators layout a drafter is either causal and all its layers slide, or it is not "
            f"causal; this one has is_causal={causal}, layer_types={config['layer_types']}"
        )
    own = config["dflash_config"]
    proposals = {"proposal_type": "greedy", "speculative_tokens": config["block_size"] - 1}
    return {
        TYPE: ALGORITHM,
        "architectures": config["architectures"],
        "aux_hidden_state_layer_ids": [layer + 1 for layer in own["target_layer_ids"]],
        "block_size": config["block_size"],
        "draft_vocab_size": draft_vocab_size or config["vocab_size"],
        "dtype": config["dtype"],
        "mask_token_id": own["mask_token_id"],
        "num_target_layers": config["num_target_layers"],
        "sliding_window_non_causal": not causal,
        "speculators_config": {
            "algorithm": ALGORITHM,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposals],
            "verifier": {"architectures": [], "name_or_path": verifier},
        },
        "transformer_layer_config": {name: value for name, value in config.items() if name not in _NOT_OF_THE_DECODER},
    }


def from_speculators(config: Mapping[str, Any], *, num_target_layers: int | None = None) -> dict[str, Any]:
    """The same drafter in the z-lab layout, for parse_drafter_config to check.

    Args:
        config: a config.json in the speculators layout.
        num_target_layers: layers of the target, where config.json doesn't say.

    Raises:
        ConfigError: it is of another algorithm than DFlash, taps are not counted from 1, or its two switches for
            causality contradict each other.
    """
    decoder = config.get("transformer_layer_config") or {}
    fields = Fields(("", config), ("transformer_layer_config.", decoder))
    for name, known in ((TYPE, ALGORITHM), ("projector_type", ALGORITHM), ("shift_label", False)):
        if fields.get(name, known) != known:
            raise ConfigError(f"{name} {config[name]!r} is not supported in a drafter; supported: {known!r}")
    if fields.get("target_hidden_size", fields.get("hidden_size")) != fields.get("hidden_size"):
        raise ConfigError(f"target_hidden_size {config['target_hidden_size']} must be the drafter's hidden_size")
    entered = fields.integers("aux_hidden_state_layer_ids")
    if min(entered) < 1:
        raise ConfigError(
            f"aux_hidden_state_layer_ids {list(entered)}: must be at least 1; 1 is the first layer's output"
        )
    reduced_vocabulary(config)  # which is no part of a DrafterConfig
    left_out = ("transformer_layer_config", "dflash_config", "draft_vocab_size")
    rest = {name: value for name, value in config.items() if name not in left_out}
    return {
        **decoder,
        **rest,
        "target_layer_ids": [layer - 1 for layer in entered],
        "num_target_layers": config.get("num_target_layers", num_target_layers),
        # at the top level the library sets it to false, whatever the target does
        "tie_word_embeddings": decoder.get("tie_word_embeddings"),
        "is_causal": _causality(fields, Fields(("transformer_layer_config.", decoder))),
    }


def _causality(fields: Fields, decoder: Fields) -> bool | None:
    """False where no layer is causal inside the block; None where sliding layers are, and full ones are not.

    The converter of the library keeps is_causal of a z-lab config.json among the decoder's fields and doesn't look at
    it. vLLM follows it, in all layers.
    """
    non_causal = fields.boolean("sliding_window_non_causal", default=False)
    if decoder.find("is_causal"):
        is_causal = decoder.boolean("is_causal", default=False)
        guess = ("sliding_attention" if fields.get("use_sliding_window") else "full_attention",)
        kinds = fields.optional_strings("layer_types") or guess
        if {kind == "sliding_attention" and not non_causal for kind in kinds} != {is_causal}:
            raise ConfigError(
                f"transformer_layer_config.is_causal {is_causal} contradicts sliding_window_non_causal {non_causal} in "
                f"layers {sorted(set(kinds))}: vLLM follows the former, the speculators library the latter; correct "
                "the one that is wrong, or remove is_causal"
            )
    return False if non_causal else None

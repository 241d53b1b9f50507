"""config.json → model configurations: one import for targets, drafters, rotary settings and tap rules."""

from dflash_jax.models.config_fields import ConfigError
from dflash_jax.models.drafter_config import (
    DrafterConfig,
    check_drafter_matches_target,
    check_mask_token_id,
    drafter_config_to_dict,
    parse_drafter_config,
)
from dflash_jax.models.rope_config import ROPE_KINDS, RopeConfig, parse_rope, rope_to_dict
from dflash_jax.models.speculators_config import reduced_vocabulary, to_speculators
from dflash_jax.models.target_config import (
    FAMILIES,
    TargetConfig,
    check_target_layer_ids,
    default_target_layer_ids,
    parse_target_config,
)

__all__ = [
    "FAMILIES",
    "ROPE_KINDS",
    "ConfigError",
    "DrafterConfig",
    "RopeConfig",
    "TargetConfig",
    "check_drafter_matches_target",
    "check_mask_token_id",
    "check_target_layer_ids",
    "default_target_layer_ids",
    "drafter_config_to_dict",
    "parse_drafter_config",
    "parse_rope",
    "parse_target_config",
    "reduced_vocabulary",
    "rope_to_dict",
    "to_speculators",
]

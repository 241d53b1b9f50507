"""Floating-point operations that a training step needs, for the share of a chip's peak that it reaches (MFU).

Needed are the products of the method: a causal mask counts half, nothing is counted that is computed again, and no
other operation than products. A backward pass is twice its forward pass. A packed sequence counts as one document,
which is more than its attention needs.
"""

from __future__ import annotations

from dflash_jax.hardware import CHIPS
from dflash_jax.models.family import DrafterConfig, TargetConfig


def layer_weights(config: TargetConfig | DrafterConfig) -> tuple[int, int]:
    """Weights in the matrices of one layer: all of them, and of its keys and values alone."""
    D, heads = config.hidden_size, config.head_dim
    keys_values = 2 * D * config.num_kv_heads * heads
    queries_output = 2 * D * config.num_heads * heads
    return keys_values + queries_output + 3 * D * config.intermediate_size, keys_values


def feature_flops(target: TargetConfig, layers: int, rows: int, length: int) -> float:
    """Of the target's pass through its first `layers` layers."""
    weights, _ = layer_weights(target)
    scores = 2 * target.num_heads * target.head_dim * length / 2  # causal
    return layers * rows * length * (2.0 * weights + 2 * scores)


def drafter_flops(drafter: DrafterConfig, rows: int, length: int, anchors: int, width: int) -> float:
    """Of the drafter's forward and backward pass and the frozen head, if every anchor is valid and stands at the
    middle of its row on average."""
    weights, keys_values = layer_weights(drafter)
    fusion = len(drafter.target_layer_ids) * drafter.hidden_size**2
    context = rows * length * 2.0 * (fusion + drafter.num_layers * keys_values)
    slots = rows * anchors * width
    scores = 2 * drafter.num_heads * drafter.head_dim * (length / 2 + width)
    blocks = slots * drafter.num_layers * (2.0 * weights + 2 * scores)
    head = rows * anchors * (width - 1) * 2.0 * drafter.hidden_size * drafter.vocab_size
    return 3 * (context + blocks) + 2 * head  # the head's own gradient is not wanted


def peak_flops(device_kind: str) -> float | None:
    """The bfloat16 FLOP/s of a device by the name that JAX gives it; None where it is not known."""
    known = {"v5 lite": "v5e", "v5e": "v5e", "v5p": "v5p", "v5": "v5p", "v6": "v6e", "h200": "h200"}
    lower = device_kind.lower()
    return next((CHIPS[chip].flops for name, chip in known.items() if name in lower), None)

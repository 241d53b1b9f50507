"""Rotary position embedding: plain, linear, Llama-3 and YaRN frequencies, in Hugging Face's half-rotation layout."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.models.family import RopeConfig


class Rotation(NamedTuple):
    """Cosines and sines of a set of positions, float32 [..., H/2], computed once a pass and shared by all layers."""

    cos: jax.Array
    sin: jax.Array


def rotation(rope: RopeConfig, head_dim: int, positions: jax.Array) -> Rotation:
    """Rotation for integer positions of any shape."""
    frequencies, scale = frequencies_and_scale(rope, head_dim)
    angles = positions[..., None].astype(jnp.float32) * frequencies
    return Rotation(jnp.cos(angles) * scale, jnp.sin(angles) * scale)


def rotate(x: jax.Array, rotation: Rotation) -> jax.Array:
    """Rotates heads x [..., heads, H]; the rotation lacks the heads axis."""
    cos, sin = rotation.cos[..., None, :], rotation.sin[..., None, :]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def frequencies_and_scale(rope: RopeConfig, head_dim: int) -> tuple[np.ndarray, float]:
    """Angular frequencies float32 [H/2] and the factor on cosines and sines (1 but for YaRN)."""
    plain = 1.0 / rope.theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if rope.kind == "default":
        return plain.astype(np.float32), 1.0
    if rope.kind == "linear":
        return (plain / rope.factor).astype(np.float32), 1.0
    if rope.kind == "llama3":
        return _llama3(rope, plain).astype(np.float32), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, plain, head_dim).astype(np.float32), _yarn_scale(rope)
    raise ValueError(f"rope kind {rope.kind!r} is not known; use default, linear, llama3 or yarn")


def _llama3(rope: RopeConfig, plain: np.ndarray) -> np.ndarray:
    """Long wavelengths are stretched by the factor, short ones kept, those between interpolated (Llama 3.1)."""
    low, high, original = rope.low_freq_factor, rope.high_freq_factor, rope.original_max_position
    if low is None or high is None or original is None:
        raise ValueError("rope kind llama3 needs low_freq_factor, high_freq_factor and original_max_position")
    turns = original * plain / (2 * math.pi)
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return (1 - kept) * plain / rope.factor + kept * plain


def _yarn(rope: RopeConfig, plain: np.ndarray, head_dim: int) -> np.ndarray:
    """YaRN (arXiv 2309.00071): a ramp over the frequency index between kept and stretched frequencies."""
    original = rope.original_max_position
    if original is None:
        raise ValueError("rope kind yarn needs original_max_position")

    def index_of(turns: float) -> float:
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = index_of(rope.beta_fast), index_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low or 0.001  # a ramp of no width would divide by zero
    stretched = np.clip((np.arange(head_dim // 2) - low) / width, 0.0, 1.0)
    return stretched * plain / rope.factor + (1 - stretched) * plain


def _yarn_scale(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor

    def magnitude(mscale: float) -> float:
        return 0.1 * mscale * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.mscale and rope.mscale_all_dim:
        return magnitude(rope.mscale) / magnitude(rope.mscale_all_dim)
    return magnitude(1.0)

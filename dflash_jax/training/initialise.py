"""A new drafter: random as in the paper, or started from the target's own layers."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import nnx

from dflash_jax.models.drafter import Drafter
from dflash_jax.models.family import ConfigError, DrafterConfig
from dflash_jax.models.target import Target


def random_drafter(config: DrafterConfig, seed: int) -> Drafter:
    """Float32 master weights drawn from the seed: normal 0.02, norms 1 (the paper's start)."""
    return Drafter(config, rngs=nnx.Rngs(seed))


def drafter_from_target(config: DrafterConfig, target: Target, seed: int) -> Drafter:
    """A drafter whose layers are copies of the target's and whose context is mostly the last tap.

    Drafter layer 0 copies target layer 0, which expects embeddings as its input; deep layers work on a residual
    stream far larger (SmolLM2: rms 0.14 against 26) and may drown the anchor's embedding. Layer i > 0 of n copies
    target layer L − n + i: its projections, MLP and norms. The fusion passes the last tap through and adds small
    random weights on the others. Where the target has no QK-norm, the drafter's q_norm and k_norm start at the
    root-mean-square that each head dimension would have for a white input, so that attention scores start at the
    scale that the copied projections were trained for.

    Raises:
        ConfigError: names the first drafter field that differs from the target's, since nothing can be copied then.
    """
    _check_copyable(config, target)
    drafter = random_drafter(config, seed)
    skipped = target.config.num_layers - config.num_layers
    for index, layer in enumerate(drafter.layers):
        _copy_layer(layer, target.layers[index + skipped if index else 0])
    D, M = config.hidden_size, len(config.target_layer_ids)
    identity_DD = jnp.eye(D, dtype=jnp.float32)
    drafter.fc.weight[...] = drafter.fc.weight[...].at[:, (M - 1) * D :].add(identity_DD)
    scales_LD = jnp.stack([layer.input_norm.scale[...] for layer in drafter.layers])
    drafter.hidden_norm.scale[...] = jnp.mean(scales_LD, axis=0)
    drafter.norm.scale[...] = _master(target.norm.scale)
    return drafter


def _check_copyable(config: DrafterConfig, target: Target) -> None:
    for field in ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim"):
        ours, theirs = getattr(config, field), getattr(target.config, field)
        if ours != theirs:
            raise ConfigError(
                f"model.initialisation='target' copies target layers, but the drafter's {field} is {ours} and the "
                f"target's {theirs}; make them equal or use initialisation='random'"
            )
    if config.num_layers > target.config.num_layers:
        raise ConfigError(
            f"model.num_layers={config.num_layers}: the target has only {target.config.num_layers} to copy"
        )


def _copy_layer(layer, source) -> None:
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        getattr(layer.attention, name).weight[...] = _master(getattr(source.attention, name).weight)
    for name in ("gate_proj", "up_proj", "down_proj"):
        getattr(layer.mlp, name).weight[...] = _master(getattr(source.mlp, name).weight)
    layer.input_norm.scale[...] = _master(source.input_norm.scale)
    layer.post_attention_norm.scale[...] = _master(source.post_attention_norm.scale)
    for norm, projection in (("q_norm", "q_proj"), ("k_norm", "k_proj")):
        copied = getattr(source.attention, norm)
        if copied is not None:
            scale_H = _master(copied.scale)
        else:
            scale_H = _white_rms(layer, projection)
        getattr(layer.attention, norm).scale[...] = scale_H


def _white_rms(layer, projection: str) -> jax.Array:
    """RMS of each head dimension, pooled over heads and over the two halves that rotation mixes, float32 [H]."""
    weight_OD = layer.input_norm.scale[...] * getattr(layer.attention, projection).weight[...]
    power_nH = jnp.square(weight_OD).sum(axis=1).reshape(-1, layer.attention.head_dim)
    half = layer.attention.head_dim // 2
    power_h = power_nH.reshape(-1, 2, half).mean(axis=(0, 1))
    return jnp.tile(jnp.sqrt(power_h), 2)


def _master(parameter: nnx.Param) -> jax.Array:
    """A float32 copy: the drafter must not share buffers with the frozen target."""
    return jnp.array(parameter[...], jnp.float32, copy=True)


def parameter_count(drafter: Drafter) -> int:
    """Trainable parameters."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(drafter))

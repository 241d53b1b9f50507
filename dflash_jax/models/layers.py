"""The building blocks that target and drafter share: linear map, RMSNorm, SwiGLU, the projections of attention.

Modules hold parameters and nothing else. They compute in the dtype of their input, so one set of float32 master
weights serves a bfloat16 forward pass.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from dflash_jax.models.project import project
from dflash_jax.models.rotary import Rotation, rotate

INIT_STD = 0.02


class Linear(nnx.Module):
    """y = x · weightᵀ (+ bias); weight is [out, in] as in checkpoints, drawn from a normal with the usual 0.02."""

    def __init__(self, features_in: int, features_out: int, *, bias: bool = False, rngs: nnx.Rngs, dtype=jnp.float32):
        # Drawn [in, out], as seeds have always been: what they give does not depend on how weights lie.
        draw = INIT_STD * jax.random.normal(rngs.params(), (features_in, features_out), jnp.float32).T
        self.weight = nnx.Param(draw.astype(dtype))
        self.bias = nnx.Param(jnp.zeros((features_out,), dtype)) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        y = project(x, self.weight[...].astype(x.dtype))
        return y if self.bias is None else y + self.bias[...].astype(x.dtype)


class RMSNorm(nnx.Module):
    """x / rms(x) · scale over the last axis, in float32 whatever the dtype of x."""

    def __init__(self, features: int, epsilon: float, *, dtype=jnp.float32):
        self.epsilon = epsilon
        self.scale = nnx.Param(jnp.ones((features,), dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.epsilon)
        return (normed * self.scale[...].astype(jnp.float32)).astype(x.dtype)


class MLP(nnx.Module):
    """SwiGLU: down(silu(gate(x)) · up(x))."""

    def __init__(self, hidden: int, intermediate: int, *, bias: bool = False, rngs: nnx.Rngs, dtype=jnp.float32):
        self.gate_proj = Linear(hidden, intermediate, bias=bias, rngs=rngs, dtype=dtype)
        self.up_proj = Linear(hidden, intermediate, bias=bias, rngs=rngs, dtype=dtype)
        self.down_proj = Linear(intermediate, hidden, bias=bias, rngs=rngs, dtype=dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


class AttentionProjections(nnx.Module):
    """Query, key, value and output maps of one attention layer, with optional QK-norm and biases.

    `config` is a TargetConfig or a DrafterConfig: what is read is hidden_size, num_heads, num_kv_heads, head_dim,
    rms_norm_eps.
    """

    def __init__(self, config, *, qk_norm: bool, qkv_bias: bool, o_bias: bool, rngs: nnx.Rngs, dtype=jnp.float32):
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        query_width, kv_width = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.q_proj = Linear(config.hidden_size, query_width, bias=qkv_bias, rngs=rngs, dtype=dtype)
        self.k_proj = Linear(config.hidden_size, kv_width, bias=qkv_bias, rngs=rngs, dtype=dtype)
        self.v_proj = Linear(config.hidden_size, kv_width, bias=qkv_bias, rngs=rngs, dtype=dtype)
        self.o_proj = Linear(query_width, config.hidden_size, bias=o_bias, rngs=rngs, dtype=dtype)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps, dtype=dtype) if qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps, dtype=dtype) if qk_norm else None

    def queries(self, x: jax.Array, rotation: Rotation) -> jax.Array:
        """[..., D] → rotated queries [..., N, H]."""
        q = self.q_proj(x).reshape(*x.shape[:-1], self.num_heads, self.head_dim)
        return rotate(q if self.q_norm is None else self.q_norm(q), rotation)

    def keys_values(self, x: jax.Array, rotation: Rotation) -> tuple[jax.Array, jax.Array]:
        """[..., D] → rotated keys and plain values, both [..., K, H]."""
        heads = (*x.shape[:-1], self.num_kv_heads, self.head_dim)
        k, v = self.k_proj(x).reshape(heads), self.v_proj(x).reshape(heads)
        return rotate(k if self.k_norm is None else self.k_norm(k), rotation), v

    def output(self, mixed: jax.Array) -> jax.Array:
        """[..., N, H] → [..., D]."""
        return self.o_proj(mixed.reshape(*mixed.shape[:-2], self.num_heads * self.head_dim))

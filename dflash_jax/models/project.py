"""x · Wᵀ for weights stored [out, in], in the form that the device multiplies fastest."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

# Up to so many rows a CPU spends more time on rearranging the weights than on multiplying (docs/design.md).
FEW_ROWS = 64


def project(x: jax.Array, weight_OI: jax.Array, *, dtype=None) -> jax.Array:
    """Maps the last axis: x [..., I] → [..., O], in `dtype` (default: the dtype of x)."""
    dtype = x.dtype if dtype is None else dtype

    def plain(x: jax.Array, weight_OI: jax.Array) -> jax.Array:
        # Axes stay apart: where the second is divided among devices, joining it to the first would gather it.
        return jnp.einsum("...i,oi->...o", x, weight_OI, preferred_element_type=dtype)

    def weights_first(x: jax.Array, weight_OI: jax.Array) -> jax.Array:
        rows_RI = x.reshape(-1, x.shape[-1])
        product_OR = jnp.einsum("oi,ri->or", weight_OI, rows_RI, preferred_element_type=dtype)
        # Without the barrier XLA folds the transposition into the product, which is `plain` again.
        return jax.lax.optimization_barrier(product_OR).T.reshape(*x.shape[:-1], len(weight_OI))

    if 1 < math.prod(x.shape[:-1]) <= FEW_ROWS:
        return jax.lax.platform_dependent(x, weight_OI, cpu=weights_first, default=plain)
    return plain(x, weight_OI)

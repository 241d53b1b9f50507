"""x · Wᵀ for weights stored [out, in], in the form that the device multiplies fastest."""

from __future__ import annotations

import jax
import jax.numpy as jnp

# Up to so many rows a CPU spends more time on rearranging the weights than on multiplying (docs/design.md).
FEW_ROWS = 64


def project(x: jax.Array, weight_OI: jax.Array, *, dtype=None) -> jax.Array:
    """Maps the last axis: x [..., I] → [..., O], in `dtype` (default: the dtype of x)."""
    dtype = x.dtype if dtype is None else dtype
    rows_RI = x.reshape(-1, x.shape[-1])

    def plain(rows_RI: jax.Array, weight_OI: jax.Array) -> jax.Array:
        return jnp.einsum("ri,oi->ro", rows_RI, weight_OI, preferred_element_type=dtype)

    def weights_first(rows_RI: jax.Array, weight_OI: jax.Array) -> jax.Array:
        product_OR = jnp.einsum("oi,ri->or", weight_OI, rows_RI, preferred_element_type=dtype)
        # Without the barrier XLA folds the transposition into the product, which is `plain` again.
        return jax.lax.optimization_barrier(product_OR).T

    if 1 < len(rows_RI) <= FEW_ROWS:
        y_RO = jax.lax.platform_dependent(rows_RI, weight_OI, cpu=weights_first, default=plain)
    else:
        y_RO = plain(rows_RI, weight_OI)
    return y_RO.reshape(*x.shape[:-1], len(weight_OI))

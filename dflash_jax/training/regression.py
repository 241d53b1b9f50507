"""Least squares from context features and the anchor's embedding to what the target computes next.

A linear map already tells a drafter much: from the tapped layers at position a−1 and the embedding of the token at a it
predicts the target's final hidden states at a, a+1, a+2. Only second moments are kept, so the memory does not grow
with the data. regression_start.py builds a drafter that computes this map.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

RIDGE = 1e-2  # added to the variance of standardised inputs
HORIZON = 3  # final hidden states predicted: at the anchor and at the two positions after it


class Moments(NamedTuple):
    """Sums over anchors, float32, of inputs f = [taps (M·D) − shift, embedding (D), 1] and outputs y (HORIZON·D).

    shift, spread [M·D]: mean and standard deviation of the taps of the first rows; the taps in f are divided by spread,
    so that float32 is enough. ff [F, F]: Σ fᵀf. fy [F, Y]: Σ fᵀy. count: anchors.
    """

    shift: jax.Array
    spread: jax.Array
    ff: jax.Array
    fy: jax.Array
    count: jax.Array


class Solution(NamedTuple):
    """What a drafter needs to compute the map. D components z, the most predictive first; z[0] is constant.

    fusion [M·D, D]: taps → z, each component (but the constant) of variance 1 over the data.
    anchor_basis [D, D]: orthonormal, columns = directions of the normalised embedding, the most predictive first.
    from_context [D, D]: z / rms(z) → final hidden state. from_anchor [R, D]: the first R coordinates of the
    normalised embedding in anchor_basis → final hidden state.
    """

    fusion: np.ndarray
    anchor_basis: np.ndarray
    from_context: np.ndarray
    from_anchor: np.ndarray


def normalised(x_D: jax.Array) -> jax.Array:
    """x / rms(x) over the last axis."""
    return x_D * jax.lax.rsqrt(jnp.mean(jnp.square(x_D), axis=-1, keepdims=True) + 1e-12)


class Anchors(NamedTuple):
    """Inputs and outputs of the regression, a line an anchor: positions a with a … a+HORIZON supervised.

    taps [A, M·D], raw, of position a − 1. tokens int32 [A], at a. hidden [A, HORIZON·D], final hidden states from a on.
    """

    taps: np.ndarray
    tokens: np.ndarray
    hidden: np.ndarray


def anchors_of(tokens_T: np.ndarray, loss_mask_T: np.ndarray, taps_TMD: np.ndarray, hidden_TD: np.ndarray) -> Anchors:
    """The anchors of one row."""
    last = len(tokens_T) - HORIZON
    run_A = np.stack([loss_mask_T[1 + k : last + k] for k in range(HORIZON + 1)]).all(axis=0)
    at_A = 1 + np.flatnonzero(run_A)
    hidden_AY = np.concatenate([hidden_TD[at_A + k] for k in range(HORIZON)], axis=1)
    taps_TX = taps_TMD.reshape(len(tokens_T), -1)
    return Anchors(taps_TX[at_A - 1], tokens_T[at_A], hidden_AY)


@functools.partial(jax.jit, donate_argnames=("moments",))
def add(moments: Moments, anchors: Anchors, count: jax.Array, embedding_VD: jax.Array) -> Moments:
    """The moments with the first `count` anchors added; what lies behind is padding."""
    real_A1 = (jnp.arange(len(anchors.tokens)) < count)[:, None]
    taps_AX = (anchors.taps.astype(jnp.float32) - moments.shift) / moments.spread
    anchor_AD = normalised(jnp.take(embedding_VD, anchors.tokens, axis=0).astype(jnp.float32))
    inputs_AF = jnp.concatenate([taps_AX, anchor_AD, jnp.ones_like(real_A1, jnp.float32)], axis=1) * real_A1
    return moments._replace(
        ff=moments.ff + inputs_AF.T @ inputs_AF,
        fy=moments.fy + inputs_AF.T @ anchors.hidden.astype(jnp.float32),
        count=moments.count + count,
    )


def first_scale(loss_masks, taps) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation [M·D] of the taps [T, M, D] of a few rows at their supervised positions."""
    taps_NX = np.concatenate(
        [np.asarray(t, np.float32)[mask].reshape(int(mask.sum()), -1) for mask, t in zip(loss_masks, taps, strict=True)]
    )
    spread_X = taps_NX.std(axis=0)
    return taps_NX.mean(axis=0), np.maximum(spread_X, 1e-3 * spread_X.max())


def no_moments(shift: np.ndarray, spread: np.ndarray, hidden: int) -> Moments:
    """Nothing added yet."""
    size = len(shift) + hidden + 1
    sums = jnp.zeros((size, size)), jnp.zeros((size, HORIZON * hidden)), jnp.float32(0.0)
    return Moments(jnp.asarray(shift, jnp.float32), jnp.asarray(spread, jnp.float32), *sums)


def solve(moments: Moments, anchor_directions: int, constant: float) -> Solution:
    """Reduced-rank ridge regression, then least squares on what the drafter will really read.

    Args:
        moments: of at least a few thousand anchors.
        anchor_directions: R, directions of the embedding that can be read.
        constant: value of z[0]; the other components have variance 1.
    """
    shift, spread, ff, fy, count = (np.asarray(leaf, np.float64) for leaf in moments)
    D, X = fy.shape[1] // HORIZON, len(shift)
    second, products = ff / count, fy / count  # the last row and column are means
    mean_F, mean_Y = second[-1, :-1], products[-1]
    covariance = second[:-1, :-1] - np.outer(mean_F, mean_F) + RIDGE * np.eye(X + D)
    slope = np.linalg.solve(covariance, products[:-1] - np.outer(mean_F, mean_Y))
    components = _components(covariance[:X, :X], slope[:X], D - 1)
    anchor_basis = _ordered_basis(second[X:-1, X:-1] + RIDGE * np.eye(D), slope[X:, :D])
    fusion = _with_constant(shift, spread, second, components, constant)
    # Read through the fusion and its norm (rms of z, taken at its mean), and through R directions of the embedding.
    rms = np.sqrt((constant**2 + D - 1) / D)
    read = np.zeros((X + D + 1, D + anchor_directions))
    read[:X, :D], read[-1, :D] = spread[:, None] * fusion / rms, shift @ fusion / rms
    read[X:-1, D:] = anchor_basis[:, :anchor_directions]
    gram = read.T @ second @ read + RIDGE * np.eye(D + anchor_directions)
    weights = np.linalg.solve(gram, read.T @ products[:, :D])
    return Solution(fusion, anchor_basis, weights[:D], weights[D:])


def _components(covariance_XX: np.ndarray, slope_XY: np.ndarray, count: int) -> np.ndarray:
    """The `count` directions of standardised taps that carry most of the prediction, [X, count], variance 1 each."""
    root = np.linalg.cholesky(covariance_XX)
    directions, _, _ = np.linalg.svd(root.T @ slope_XY, full_matrices=False)
    return np.linalg.solve(root.T, directions[:, :count])


def _ordered_basis(moment_DD: np.ndarray, slope_DY: np.ndarray) -> np.ndarray:
    """An orthonormal basis of embedding space whose first columns span the most predictive directions."""
    root = np.linalg.cholesky(moment_DD)
    directions, _, _ = np.linalg.svd(root.T @ slope_DY)
    return np.linalg.qr(np.linalg.solve(root.T, directions))[0]


def _with_constant(
    shift: np.ndarray, spread: np.ndarray, second: np.ndarray, components_XC: np.ndarray, constant: float
) -> np.ndarray:
    """The fusion in raw taps: first a component that is nearly constant, then the given ones less their means.

    A linear map without bias can't subtract a mean, but some directions of a residual stream hardly vary from token to
    token; the constant is fitted on them by ridge regression.
    """
    X = len(shift)
    deviation_X = spread * second[-1, :X]  # of the mean over all rows from that over the first ones
    raw_XX = spread[:, None] * second[:X, :X] * spread + np.outer(shift, shift)
    raw_XX += np.outer(deviation_X, shift) + np.outer(shift, deviation_X)
    mean_X = deviation_X + shift
    one_X = np.linalg.solve(raw_XX + RIDGE * np.diag(spread**2), mean_X)
    raw_components_XC = components_XC / spread[:, None]
    centred_XC = raw_components_XC - np.outer(one_X, mean_X @ raw_components_XC)
    return np.concatenate([constant * one_X[:, None], centred_XC], axis=1)

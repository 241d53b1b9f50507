"""A drafter that starts as a least-squares predictor: it drafts its first slot well before the first update.

Attention has to be told where to look before it can learn what to read. Here three kinds of heads are laid out by hand:
some read the newest context position, wherever the slot stands; some read the anchor; some read the slot itself, to
cancel the mask token's embedding. Their values and outputs are then filled in so that slot 1 computes the regression of
regression.py. MLPs start at zero output. Everything is trained from there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from dflash_jax.data.pipeline import Batch
from dflash_jax.models.drafter import Drafter
from dflash_jax.models.family import ConfigError, DrafterConfig
from dflash_jax.models.layers import Linear
from dflash_jax.models.rotary import frequencies_and_scale
from dflash_jax.models.target import Target
from dflash_jax.training.features import Features
from dflash_jax.training.initialise import random_drafter
from dflash_jax.training.regression import (
    HORIZON,
    Anchors,
    Moments,
    Solution,
    add,
    anchors_of,
    first_scale,
    no_moments,
    normalised,
    solve,
)

CONSTANT = 8.0  # value of the constant context component; the others have variance 1
SHARPNESS = 24.0  # attention score of a head at the key that it looks for
NOISE = 0.1  # random part of queries and keys, relative to the laid out part
OUTPUT_STD = 0.005  # of output weights that are not laid out
FUSION_SCALE = 50.0  # the norm behind it undoes any scale; large weights move slowly under Adam
FIRST_ROWS = 16  # rows that the taps' scale is measured on
ADD_ANCHORS = 1024  # anchors that are summed up together, or a few more
PAD_ANCHORS = 256


class HeadPatterns(NamedTuple):
    """Query and key vectors, float64 [H] of rms 1, that make a head find one kind of key.

    Each kind uses rotary frequencies of its own. newest: fast frequencies, so that the score falls with distance;
    newest_key is the same vector turned so that the peak lies two positions back, where slot 1 finds the last context
    position. anchor, own: slow frequencies, nearly blind to distance.
    """

    newest: np.ndarray
    newest_key: np.ndarray
    anchor: np.ndarray
    own: np.ndarray


def drafter_by_regression(
    config: DrafterConfig, target: Target, moments: Moments, mean_anchor_D: np.ndarray, seed: int
) -> Drafter:
    """The drafter whose first slot is the regression's prediction.

    Args:
        moments: from `row_moments`.
        mean_anchor_D: the mean normalised embedding of the anchors, also from there.

    Raises:
        ConfigError: see `check_regression_fits`; or the mask token's embedding is zero.
    """
    check_regression_fits(config)
    mask_D = np.asarray(target.embedding[config.mask_token_id], np.float64)
    if not mask_D.any():
        raise ConfigError(
            f"model.mask_token_id={config.mask_token_id}: its embedding is zero, and model.initialisation='regression' "
            "finds slots by it; choose another mask token or initialisation"
        )
    drafter = random_drafter(config, seed)
    solution = solve(moments, min(config.num_kv_heads * config.head_dim, config.hidden_size), CONSTANT)
    _set(drafter.fc, FUSION_SCALE * solution.fusion @ solution.anchor_basis.T)
    drafter.norm.scale[...] = _float32(target.norm.scale[...])
    for index in range(config.num_layers):
        _lay_out(drafter, index, solution, mean_anchor_D, mask_D, np.random.default_rng([seed, index]))
    return drafter


def check_regression_fits(config: DrafterConfig) -> None:
    """Raises ConfigError where the attention shape leaves no room for the three kinds of heads."""
    if config.num_heads // config.num_kv_heads < 3 or config.head_dim < 32:
        raise ConfigError(
            "model.initialisation='regression' needs 3 query heads for each key/value head and head_dim ≥ 32; "
            f"the drafter has {config.num_heads} heads, {config.num_kv_heads} key/value heads and "
            f"head_dim={config.head_dim}; use initialisation='random'"
        )


def row_moments(
    batches: Sequence[Batch], features: Callable[[Batch], Features], embedding_VD: jax.Array
) -> tuple[Moments, np.ndarray]:
    """Moments of training rows, and the mean normalised embedding [D] of their supervised tokens.

    Args:
        batches: of one row each (see data.pipeline.collate), padded as in training, so that features are kept.
        features: gives taps and final hidden states.

    Raises:
        ConfigError: no row has enough supervised tokens in a run.
    """

    def taps_hidden(batch):
        got = features(batch)
        if got.hidden is None:
            raise ValueError("the regression needs features with final hidden states")
        return np.asarray(got.taps[0]), np.asarray(got.hidden[0])

    first = batches[:FIRST_ROWS]
    shift, spread = first_scale(
        [batch["loss_mask_BT"][0] for batch in first], [taps_hidden(batch)[0] for batch in first]
    )
    moments, waiting = no_moments(shift, spread, embedding_VD.shape[1]), []
    for batch in tqdm(batches, desc="fitting the start", unit="row", dynamic_ncols=True):
        waiting.append(anchors_of(batch["tokens_BT"][0], batch["loss_mask_BT"][0], *taps_hidden(batch)))
        if sum(len(anchors.tokens) for anchors in waiting) >= ADD_ANCHORS:
            moments, waiting = _add_waiting(moments, waiting, embedding_VD), []
    moments = _add_waiting(moments, waiting, embedding_VD)
    if moments.count == 0:
        raise ConfigError(
            f"data.train_file: no row has {HORIZON + 1} supervised tokens in a run, which "
            "model.initialisation='regression' learns from; use initialisation='random'"
        )
    counts_V = sum(
        np.bincount(batch["tokens_BT"][0][batch["loss_mask_BT"][0]], minlength=len(embedding_VD)) for batch in batches
    )
    mean_D = jnp.asarray(counts_V / np.sum(counts_V), jnp.float32) @ normalised(embedding_VD.astype(jnp.float32))
    return moments, np.asarray(mean_D, np.float64)


def _add_waiting(moments: Moments, waiting: list[Anchors], embedding_VD: jax.Array) -> Moments:
    """Adds anchors, padded to a multiple of PAD_ANCHORS so that few programs are compiled."""
    if not waiting:
        return moments
    count = sum(len(anchors.tokens) for anchors in waiting)
    missing = -count % PAD_ANCHORS

    def joined(*leaves) -> np.ndarray:
        whole = np.concatenate(leaves)
        return np.pad(whole, [(0, missing)] + [(0, 0)] * (whole.ndim - 1))

    return add(moments, jax.tree.map(joined, *waiting), jnp.float32(count), embedding_VD)


def head_patterns(config: DrafterConfig) -> HeadPatterns:
    """Splits the rotary frequencies, fastest first, among the three kinds of heads."""
    frequencies, _ = frequencies_and_scale(config.rope, config.head_dim)
    half = len(frequencies)
    fast = max(4, int(np.sum(frequencies > 0.2)))

    def vector(pairs) -> np.ndarray:
        first_H = np.zeros(config.head_dim)
        first_H[list(pairs)] = 1.0
        return first_H / np.sqrt(np.mean(first_H**2))

    newest_H = vector(range(fast))
    angle_h = 2.0 * frequencies
    turned_H = np.concatenate([newest_H[:half] * np.cos(angle_h), newest_H[:half] * np.sin(angle_h)])
    return HeadPatterns(newest_H, turned_H, vector(range(fast + 4, half)), vector(range(fast, fast + 4)))


def _lay_out(drafter: Drafter, index: int, solution: Solution, mean_anchor_D, mask_D, random) -> None:
    """Fills the weights of one layer. Query head n reads with key/value head n // G; n % G decides its kind."""
    config, layer = drafter.config, drafter.layers[index]
    D, N, K, H = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
    G, patterns, basis_DD = N // K, head_patterns(config), solution.anchor_basis
    own_D = mask_D / np.sqrt(np.mean(mask_D**2))  # what the input norm makes of a mask slot in layer 0
    constant_D = basis_DD[:, 0]
    anchor_D = mean_anchor_D - constant_D * (constant_D @ mean_anchor_D)  # so that the constant is no anchor

    def finds(direction_D, pattern_H) -> np.ndarray:
        """[D, H], maps `direction` to the pattern."""
        return np.outer(direction_D / (direction_D @ direction_D), pattern_H)

    key_DH = np.outer(constant_D, patterns.newest_key) / CONSTANT + finds(anchor_D, patterns.anchor)
    if index == 0:
        key_DH += finds(own_D, patterns.own)
    kinds = {0: patterns.newest, 1: patterns.own if index == 0 else patterns.anchor}
    slot_D = own_D if index == 0 else mean_anchor_D
    query_DNH = NOISE / np.sqrt(D) * random.normal(size=(D, N, H))
    for head in range(N):
        query_DNH[:, head] += finds(slot_D, kinds.get(head % G, patterns.anchor))
    key_DKH = NOISE / np.sqrt(D) * random.normal(size=(D, K, H)) + key_DH[:, None]
    value_DC, output_NHD = _values_and_outputs(config, index, solution, drafter, mask_D, random)
    attention = layer.attention
    _set(attention.q_proj, query_DNH.reshape(D, N * H))
    _set(attention.k_proj, key_DKH.reshape(D, K * H))
    _set(attention.v_proj, value_DC)
    _set(attention.o_proj, output_NHD.reshape(N * H, D))
    norm: Any = attention.q_norm  # a drafter always has one
    norm.scale[...] = jnp.full((H,), SHARPNESS / np.sqrt(H), jnp.float32)
    layer.mlp.down_proj.weight[...] = jnp.zeros_like(layer.mlp.down_proj.weight[...])


def _values_and_outputs(config: DrafterConfig, index: int, solution: Solution, drafter: Drafter, mask_D, random):
    """Values [D, K·H] read the layer's share of the components, outputs [N, H, D] apply the regression to them."""
    D, N, K, H = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
    G, basis_DD = N // K, solution.anchor_basis
    scale_D = np.asarray(drafter.norm.scale[...], np.float64)  # the final norm will multiply by it
    value_DC = random.normal(size=(D, K * H)) / np.sqrt(D)
    output_NHD = OUTPUT_STD * random.normal(size=(N, H, D))
    share = np.arange(index * K * H, (index + 1) * K * H)
    share = share[share < D]
    value_DC[:, : len(share)] = basis_DD[:, share]
    from_context_CD, from_anchor_CD, cancel_CD = (np.zeros((K * H, D)) for _ in range(3))
    from_context_CD[: len(share)] = solution.from_context[share] / scale_D
    if index == 0:
        from_anchor_CD[: len(share)] = solution.from_anchor / scale_D
        own_C = value_DC.T @ (mask_D / np.sqrt(np.mean(mask_D**2)))
        cancel_CD = -np.outer(own_C, mask_D) / (own_C @ own_C)
    for kv_head in range(K):
        part = slice(kv_head * H, (kv_head + 1) * H)
        first = kv_head * G
        output_NHD[first] = from_context_CD[part]
        if index == 0:
            output_NHD[first + 1] = cancel_CD[part]
            output_NHD[first + 2] = from_anchor_CD[part]
    return value_DC, output_NHD


def _set(linear: Linear, map_IO) -> None:
    """Gives a linear layer the map x → x · map_IO."""
    linear.weight[...] = _float32(map_IO.T)


def _float32(array) -> jax.Array:
    return jnp.array(array, jnp.float32, copy=True)

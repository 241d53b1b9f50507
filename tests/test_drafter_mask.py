"""The drafter's two faces against each other, and what a slot of a whole drafter may depend on."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import drafter_config, random_drafter, target_config

from dflash_jax.models.drafter import Drafter

TARGET = target_config()
W, T, D = 6, 20, TARGET.hidden_size
ANCHORS = [1, 7, 13, 19]

# Layer types and is_causal: what released configs hold, a mix of layers, and explicit values that overrule the type.
KINDS = {
    "full": {},
    "sliding, causal by default": {"layer_types": ("sliding_attention",) * 2, "sliding_window": 5},
    "one of each": {"layer_types": ("full_attention", "sliding_attention"), "sliding_window": 9},
    "sliding but not causal": {"layer_types": ("sliding_attention",) * 2, "sliding_window": 5, "is_causal": False},
    "full but causal": {"is_causal": True},
}
# Both faces do the same float32 products, grouped otherwise; logits are of order ten. A wrong mask shows at 1e-2.
TOLERANCE = 1e-5


class Inputs(NamedTuple):
    """Embedded block tokens [A, W, D] of every anchor, and the target's taps [T, M, D]."""

    embedded_AWD: jax.Array
    taps_TMD: jax.Array


@functools.cache
def drafter_of(kind: str) -> Drafter:
    return random_drafter(TARGET, block_size=W, **KINDS[kind]).model


@functools.cache
def inputs() -> Inputs:
    rng = np.random.default_rng(0)
    shapes = (len(ANCHORS), W, D), (T, 2, D)
    return Inputs(*(jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes))


@jax.jit
def packed(drafter: Drafter, given: Inputs) -> jax.Array:
    """Hidden states [A, W, D] of all blocks in one pass."""
    starts_BA, anchors_BA = jnp.zeros((1, len(ANCHORS)), jnp.int32), jnp.array([ANCHORS])
    return drafter.packed(given.embedded_AWD[None], drafter.fuse(given.taps_TMD[None]), starts_BA, anchors_BA)[0]


@jax.jit
def packed_gradients(drafter: Drafter, given: Inputs, d_hidden_AWD: jax.Array) -> Inputs:
    """What embeddings and taps receive for a cotangent of the hidden states."""
    return jax.grad(lambda given: jnp.sum(packed(drafter, given) * d_hidden_AWD))(given)


@jax.jit
def cached(drafter: Drafter, given: Inputs, junk: jax.Array) -> jax.Array:
    """The same blocks as decoding sees them: one row for each anchor, a prompt of 8, then rounds that accept 3 of W.

    As after a rejected proposal, `junk` is given at the next anchor and behind it.
    """
    A = len(ANCHORS)
    cache = drafter.init_cache(A, T + 12)
    for first, last, accepted in ((0, 8, 8), *((start, start + W, 3) for start in range(8, T, 3))):
        positions_AP = jnp.broadcast_to(jnp.arange(first, last), (A, last - first))
        anchors_A = jnp.minimum(jnp.array(ANCHORS), first + accepted)
        taps_APMD = given.taps_TMD[jnp.minimum(positions_AP, T - 1)]
        taps_APMD = jnp.where((positions_AP >= anchors_A[:, None])[:, :, None, None], junk, taps_APMD)
        cache = drafter.absorb(cache, taps_APMD, positions_AP, anchors_A)
    return drafter.block_hidden(given.embedded_AWD, cache, jnp.array(ANCHORS))


@pytest.mark.parametrize("kind", KINDS)
def test_packed_training_pass_equals_cached_decoding_pass(kind):
    drafter = drafter_of(kind)
    head_VD = jnp.asarray(np.random.default_rng(1).normal(size=(TARGET.vocab_size, D)), jnp.float32)
    wanted = np.asarray(packed(drafter, inputs()) @ head_VD.T)
    for junk in (0.0, 7.0):
        logits = np.asarray(cached(drafter, inputs(), jnp.float32(junk)) @ head_VD.T)
        np.testing.assert_allclose(logits, wanted, rtol=0, atol=TOLERANCE * np.abs(wanted).max())


def test_a_layer_with_a_window_keeps_no_more_than_its_window():
    keys = drafter_of("one of each").init_cache(3, 4096).keys
    assert [layer.shape[2] for layer in keys] == [4096, 9]
    assert [layer.shape[2] for layer in drafter_of("one of each").init_cache(3, 8).keys] == [8, 8]


def test_the_kinds_differ():
    """Else the comparison above would not notice a mask that is ignored."""
    outputs = [np.asarray(packed(drafter_of(kind), inputs())) for kind in KINDS]
    for index, mine in enumerate(outputs):
        for other in outputs[:index]:
            assert np.abs(mine - other).max() > 1e-2


def changed_slots(kind: str, changed: Inputs) -> np.ndarray:
    """bool [A, W]: which outputs are not bit for bit what they were."""
    drafter = drafter_of(kind)
    return np.asarray(packed(drafter, inputs()) != packed(drafter, changed)).any(-1)


def expected_reach(kind: str, block: int, slot: int) -> np.ndarray:
    """bool [A, W]: the outputs that depend on one slot's input: all of its block, or only it and later slots."""
    config = drafter_config(TARGET, block_size=W, **KINDS[kind])
    causal = all(config.layer_is_causal(layer) for layer in range(config.num_layers))
    reach_AW = np.zeros((len(ANCHORS), W), bool)
    reach_AW[block, slot if causal else 0 :] = True
    return reach_AW


@pytest.mark.parametrize("kind", ["full", "full but causal", "sliding, causal by default", "one of each"])
def test_a_slot_reaches_its_own_block_only_and_backwards_unless_causal(kind):
    """Slot 5 changes slot 1 under full attention; under causal attention it must not."""
    for block, slot in ((1, 5), (1, 0), (2, 3), (0, 5)):
        changed = inputs()._replace(embedded_AWD=inputs().embedded_AWD.at[block, slot].add(1.0))
        np.testing.assert_array_equal(changed_slots(kind, changed), expected_reach(kind, block, slot))


@pytest.mark.parametrize("kind", ["full", "full but causal"])
def test_a_slots_gradient_stays_in_its_block(kind):
    for block, slot in ((1, 1), (2, 5)):
        one_slot_AWD = jnp.zeros((len(ANCHORS), W, D)).at[block, slot].set(1.0 + jnp.arange(D))
        reached_AW = np.asarray(packed_gradients(drafter_of(kind), inputs(), one_slot_AWD).embedded_AWD).any(-1)
        wanted_AW = np.zeros_like(reached_AW)
        wanted_AW[block, : slot + 1 if kind == "full but causal" else W] = True
        np.testing.assert_array_equal(reached_AW, wanted_AW)


def test_context_is_seen_strictly_before_the_anchor():
    """The target has not read the anchor yet when its block is drafted, so its own feature is not there."""
    for position in range(T):
        changed = inputs()._replace(taps_TMD=inputs().taps_TMD.at[position].add(1.0))
        sees = [[position < anchor] * W for anchor in ANCHORS]
        np.testing.assert_array_equal(changed_slots("full", changed), sees)


def test_gradients_reach_the_context_strictly_before_the_anchor():
    for block, anchor in enumerate(ANCHORS):
        one_block_AWD = jnp.zeros((len(ANCHORS), W, D)).at[block].set(1.0 + jnp.arange(D))
        d_taps_TMD = np.asarray(packed_gradients(drafter_of("full"), inputs(), one_block_AWD).taps_TMD)
        assert d_taps_TMD.any((1, 2)).tolist() == [position < anchor for position in range(T)]


def test_a_sliding_layer_sees_the_window_before_the_slots_own_position():
    kind, window = "sliding, causal by default", 5
    earlier_WW = (np.arange(W) < np.arange(W)[:, None]) & (np.arange(W)[:, None] - np.arange(W) < window)
    for position in range(T):
        changed = inputs()._replace(taps_TMD=inputs().taps_TMD.at[position].add(1.0))
        first_AW = np.array(
            [[position < anchor and anchor + slot - position < window for slot in range(W)] for anchor in ANCHORS]
        )
        # the second layer also hears of it from the earlier slots in its window
        both_AW = first_AW | (first_AW[:, None, :] & earlier_WW).any(-1)
        np.testing.assert_array_equal(changed_slots(kind, changed), both_AW)


def test_the_cached_pass_ignores_its_own_rejected_slots_and_other_rows():
    drafter = drafter_of("full")
    clean, junk = (np.asarray(cached(drafter, inputs(), jnp.float32(value))) for value in (0.0, 1e4))
    np.testing.assert_array_equal(clean, junk)
    changed = inputs()._replace(embedded_AWD=inputs().embedded_AWD.at[1].add(1.0))
    after = np.asarray(cached(drafter, changed, jnp.float32(0.0)))
    assert (after != clean).any((1, 2)).tolist() == [False, True, False, False]

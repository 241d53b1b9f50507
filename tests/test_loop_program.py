"""What the compiled loop does with its caches: they are written in place, and never copied from round to round."""

import re

import jax.numpy as jnp
import pytest
from small_models import random_drafter, random_target

from dflash_jax.decoding.flat import flatten
from dflash_jax.decoding.loop import LoopSettings, prefill, run_rounds
from dflash_jax.decoding.request import Options, checked_options
from dflash_jax.models.proposal import NoDrafter

SLOTS = 264  # a length that no other array has


@pytest.mark.parametrize("width", [1, 4])
def test_no_round_copies_a_cache(width):
    """One row, where XLA for CPUs is tempted to."""
    target = random_target(num_layers=2)
    drafter = (
        random_drafter(target.config, block_size=width, num_layers=1, target_layer_ids=(0,)).model
        if width > 1
        else NoDrafter()
    )
    settings, ones_B = LoopSettings(width, ()), jnp.ones((1,), jnp.int32)
    _, greedy = checked_options(Options(), 1, width)
    start = (jnp.ones((1, 32), jnp.int32), 5 * ones_B, 90 * ones_B, greedy)
    state, _ = prefill(target.model, drafter, *start, settings=settings, cache_length=SLOTS)
    arguments = (flatten(target.model, drafter), state, jnp.int32(9), jnp.int32(1))
    text = run_rounds.lower(*arguments, settings=settings).compile().as_text()
    caches = [line for line in text.splitlines() if re.search(rf"= f32\[[\d,]*{SLOTS},8\]\S* \w", line)]
    assert any(" scatter(" in line or " dynamic-update-slice(" in line for line in caches)
    assert not [line for line in caches if " copy(" in line or " transpose(" in line]

"""A training run does not depend on which implementation of block attention it uses."""

import logging

import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from test_train_step import SETTINGS, four_rows, new_state, split, step

from dflash_jax.kernels import _backends


@pytest.fixture
def used(caplog):
    """Which backends have been compiled since."""
    _backends._say_once.cache_clear()
    caplog.set_level(logging.INFO, logger=_backends.__name__)
    yield lambda: {record.getMessage() for record in caplog.records if record.name == _backends.__name__}
    _backends._say_once.cache_clear()


def losses(backend: str, steps: int) -> list[float]:
    state, batch, found = new_state(), split(four_rows(), 2), []
    for _ in range(steps):
        state, sums = step(state, batch, settings=SETTINGS._replace(backend=backend))
        found.append(float(sums.loss / sums.weight))
    return found


@pytest.mark.long
def test_thirty_steps_cost_the_same_with_the_tpu_kernels_as_with_xla(used):
    wanted = losses("xla", 30)
    with pltpu.force_tpu_interpret_mode(True):
        found = losses("tpu", 30)
    assert used() == {"block attention for cpu: xla backend", "block attention for cpu: tpu backend"}
    assert wanted[-1] < wanted[0] - 0.1  # it trains, so differences would grow
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5)  # float32, summed in another order

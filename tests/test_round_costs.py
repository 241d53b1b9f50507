"""What the adaptive width knows of costs: medians, how long they are believed, and the pace of the machine."""

import pytest

from dflash_jax.decoding.adaptive import FRESH_ROUNDS, RoundCosts

TWO_CORES = {1: 1.0, 2: 1.6, 4: 2.2, 8: 2.9}


def measured() -> RoundCosts:
    costs = RoundCosts()
    for width, seconds in TWO_CORES.items():
        costs.add(width, 8, 8 * seconds)
    return costs


def test_costs_are_medians_that_one_outlier_does_not_move():
    costs = RoundCosts()
    assert costs.get(4) is None
    for seconds in (2.0, 2.2, 50.0, 2.1, 1.9):
        costs.add(4, 4, 4 * seconds)
        costs.add(1, 1, 1.0)
    assert costs.get(4) == pytest.approx(2.1)
    costs.add(1, 1, 1.0)
    costs.add(4, 64, 64 * 3.0)  # many rounds weigh more
    assert costs.get(4) == pytest.approx(3.0)


def test_an_old_timing_that_a_new_one_confirms_is_trusted_and_for_longer():
    costs = RoundCosts()
    costs.add(8, 3, 3 * 4.0)
    costs.add(1, FRESH_ROUNDS + 1, FRESH_ROUNDS + 1.0)
    assert costs.trusted(8) and not costs.fresh(8)
    costs.add(8, 1, 4.5)
    assert costs.trusted(8) and costs.get(8) == 4.0
    costs.add(1, FRESH_ROUNDS + 1, FRESH_ROUNDS + 1.0)
    assert costs.fresh(8)  # twice as long
    costs.add(1, FRESH_ROUNDS, FRESH_ROUNDS)
    assert not costs.fresh(8)
    costs.add(8, 1, 2.0)
    assert not costs.trusted(8) and costs.get(8) == 2.0
    costs.add(1, FRESH_ROUNDS + 1, FRESH_ROUNDS + 1.0)
    assert not costs.fresh(8)


@pytest.mark.parametrize("factor", [0.8, 1.3])
def test_a_machine_that_gets_slower_or_faster_changes_what_every_width_costs(factor):
    """Though one only is in use."""
    costs = measured()
    for seconds in [TWO_CORES[4]] * 3 + [factor * TWO_CORES[4]] * 8:
        costs.add(4, 8, 8 * seconds)
    assert costs.get(4) == pytest.approx(factor * TWO_CORES[4])
    assert costs.get(1) == pytest.approx(factor * TWO_CORES[1], rel=0.03)
    assert costs.get(8) == pytest.approx(factor * TWO_CORES[8], rel=0.03)


def test_an_interruption_is_not_the_pace_of_the_machine():
    costs = measured()
    costs.add(4, 1, TWO_CORES[4])
    costs.add(4, 1, 50 * TWO_CORES[4])
    assert costs.get(1) < 1.1 * TWO_CORES[1]
    for _ in range(4):
        costs.add(4, 4, 4 * TWO_CORES[4])
    assert costs.get(1) == pytest.approx(TWO_CORES[1], rel=0.01)

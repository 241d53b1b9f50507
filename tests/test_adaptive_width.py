"""The choice of widths by itself, against simulated rounds: what it may lose, what it must gain, when it turns."""

import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_jax.decoding.adaptive import (
    ALLOWANCE,
    ALLOWANCE_SHARE,
    LONGEST_CHUNK,
    LONGEST_REST,
    RoundCosts,
    WidthController,
    candidate_widths,
)

W = 16
# Seconds of a round by width, plain = 1. Two cores (README: drafting and verifying 8 is about 3 steps), an accelerator
# (the roofline of an 8B target gives 1.22 at any width), and passes whose cost is all in the slots.
TWO_CORES = {1: 1.0, 2: 1.6, 4: 2.2, 8: 2.9, 16: 4.0}
ACCELERATOR = {1: 1.0, 2: 1.2, 4: 1.21, 8: 1.22, 16: 1.25}
BATCH_OF_8 = {1: 1.0, 2: 1.36, 4: 1.95, 8: 3.7, 16: 7.0}  # two cores, 8 rows
NO_GAIN = {1: 1.0, 2: 2.0, 4: 4.0, 8: 8.0, 16: 16.0}
TURN = 700
TABLES = pytest.mark.parametrize("table", [TWO_CORES, ACCELERATOR, NO_GAIN])


def measured(table: dict[int, float]) -> RoundCosts:
    costs = RoundCosts()
    for width, seconds in table.items():
        costs.add(width, 8, 8 * seconds)
    return costs


def one_round(width: int, room: int, accept, rng: random.Random) -> int:
    """Tokens of a round whose slot k is accepted with probability accept(k), if those before it were."""
    gained = 1
    while gained < min(width, room) and rng.random() < accept(gained):
        gained += 1
    return gained


class Simulation:
    """Decoding of one row in simulated time. acceptance(tokens so far) gives what `one_round` takes.

    call: tokens of a call, if they come in several; no round goes on into the next. drift: by how much the
    machine's pace changes in a round, which `seconds` does not count.
    """

    def __init__(
        self,
        table,
        acceptance,
        *,
        tokens: int,
        costs: RoundCosts | None = None,
        seed: int = 0,
        call: int | None = None,
        drift: float = 0.0,
    ):
        self.table, self.acceptance, self.rng = table, acceptance, random.Random(seed)
        self.drift, self.log_pace = drift, 0.0
        self.costs = measured(table) if costs is None else costs
        self.controller = WidthController(W, self.costs)
        self.tokens, self.seconds, self.launches = 0, 0.0, 0
        self.history: list[tuple[int, int]] = []  # tokens before a round, its width
        for first in range(0, tokens, call or tokens):
            self.controller.begin_call()
            end = min(first + (call or tokens), tokens)
            while self.tokens < end:
                self._chunk(end)

    def _chunk(self, end: int) -> None:
        width, most = self.controller.next()
        self.launches += 1
        assert width in candidate_widths(W) and 1 <= most <= LONGEST_CHUNK
        tried, kept, rounds, spent = [0] * width, [0] * width, 0, 0.0
        while rounds < most and self.tokens < end:
            room = end - self.tokens
            gained = one_round(width, room, self.acceptance(self.tokens), self.rng)
            for slot in range(min(width, room, gained + 1)):
                tried[slot] += 1
                kept[slot] += slot < gained
            self.history.append((self.tokens, width))
            self.tokens += gained
            rounds += 1
            if self.drift:  # no draw without it: drafters are compared on the same ones
                self.log_pace = 0.995 * self.log_pace + self.drift * self.rng.gauss(0, 1)
            spent += self.table[width] * math.exp(self.log_pace)
        self.seconds += rounds * self.table[width]
        self.costs.add(width, rounds, spent)
        self.controller.observe(width, rounds, tried, kept)

    def share(self, width: int, first: int, last: int) -> float:
        """Of the rounds that started at tokens first … last, the share of this width."""
        widths = [used for at, used in self.history if first <= at < last]
        return widths.count(width) / len(widths)

    def seconds_from(self, first: int) -> float:
        """Time of the rounds from that token on."""
        return sum(self.table[width] for at, width in self.history if at >= first)


def always(accept: float):
    """A drafter all of whose slots are as good, at any time."""
    return lambda at: lambda slot: accept


def right_in(slots: int):
    """A drafter that is right in the first slots of a block, always, and never beyond."""
    return lambda at: lambda slot: float(slot <= slots)


def fading(at: int):
    """A drafter whose slots get worse one by one, from 0.95 down."""
    return lambda slot: 0.95 * 0.97**slot


def fading_fast(least: float):
    """A drafter that is right in every second first slot, and hardly beyond."""
    return lambda at: lambda slot: 0.5**slot + least


def turning(before: float, after: float):
    """A drafter that turns at token TURN."""
    return lambda at: lambda slot: before if at < TURN else after


def fixed_seconds(table, width: int, accept, *, tokens: int, seed: int, call: int | None = None) -> float:
    """Of decoding with rounds of one width; accept as in `one_round`, call as in `Simulation`."""
    rng, rounds = random.Random(seed), 0
    for first in range(0, tokens, call or tokens):
        left = min(call or tokens, tokens - first)
        while left > 0:
            left -= one_round(width, left, accept, rng)
            rounds += 1
    return rounds * table[width]


def share_of_best(table, accept, *, tokens: int, seeds: int, known=None, **options) -> float:
    """Time of the best fixed width over our own, summed over seeds. known: another table, of what is known of costs."""
    costs = table if known is None else known
    ours = (
        Simulation(table, always(accept), tokens=tokens, costs=measured(costs), seed=seed, **options)
        for seed in range(seeds)
    )
    seconds = sum(run.seconds for run in ours)
    fixed = (
        sum(
            fixed_seconds(table, width, always(accept)(0), tokens=tokens, seed=seed, **options) for seed in range(seeds)
        )
        for width in table
    )
    return min(fixed) / seconds


def bound(tokens: int) -> float:
    """Seconds that the allowance lets a call take that takes `tokens` seconds in plain decoding."""
    return tokens + ALLOWANCE + ALLOWANCE_SHARE * tokens


def test_candidates_are_powers_of_two_and_the_widest():
    assert [candidate_widths(width) for width in (1, 2, 3, 10, 16)] == [
        (1,),
        (1, 2),
        (1, 2, 3),
        (1, 2, 4, 8, 10),
        (1, 2, 4, 8, 16),
    ]


@TABLES
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("tokens", [100, 200, 500, 1000, 2000])
def test_a_drafter_that_is_always_wrong_costs_at_most_a_tenth(table, known, tokens):
    run = Simulation(table, always(0.0), tokens=tokens, costs=None if known else RoundCosts())
    assert run.seconds <= min(1.1 * tokens, bound(tokens))


@TABLES
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("call", [20, 50, 100])
def test_many_calls_lose_no_more_than_one(table, known, call):
    """What one call has lost, the next does not lose again."""
    run = Simulation(table, always(0.0), tokens=2000, costs=None if known else RoundCosts(), call=call)
    assert run.seconds <= bound(2000)


@pytest.mark.parametrize("table", [TWO_CORES, ACCELERATOR])
def test_a_good_drafter_is_used_from_the_start_of_the_next_call_and_soon_after_a_bad_one(table):
    good = Simulation(table, always(0.95), tokens=2000, call=100)
    assert good.share(1, 0, 2000) < 0.05
    turned = [Simulation(table, turning(0.0, 0.95), tokens=2000, call=100, seed=seed) for seed in range(12)]
    assert turned[0].share(1, 800, 2000) < 0.1
    assert sum(run.share(1, 800, 2000) for run in turned) / len(turned) < 0.05


@pytest.mark.parametrize("seed", range(12))
def test_what_a_call_has_gained_is_not_the_next_ones_to_lose(seed):
    """But for as much as it may lose anyway."""
    run = Simulation(TWO_CORES, turning(0.95, 0.0), tokens=TURN + 100, call=TURN, seed=seed)
    assert run.seconds_from(TURN) <= bound(100) + ALLOWANCE


@pytest.mark.parametrize("table", [TWO_CORES, ACCELERATOR, BATCH_OF_8])
@pytest.mark.parametrize("call", [20, 40])
def test_short_calls_run_as_at_the_best_fixed_width(table, call):
    """Though one unlucky wide round is all that such a call by itself may lose."""
    assert share_of_best(table, 0.9, tokens=4000, seeds=24, call=call) >= 0.95


@pytest.mark.parametrize("table", [TWO_CORES, ACCELERATOR, BATCH_OF_8])
@pytest.mark.parametrize("slots", [1, 2, 3, 5, 7, 11, W - 1])
def test_a_drafter_that_is_right_in_some_slots_runs_as_at_the_width_for_them(table, slots):
    """In calls of 64 tokens, which don't find out again and again that a wider round gives no more."""
    accept, calls = right_in(slots), {"tokens": 12 * 64, "call": 64}
    best = min(fixed_seconds(table, width, accept(0), seed=0, **calls) for width in table)
    assert best >= 0.965 * Simulation(table, accept, **calls).seconds


@TABLES
def test_waiting_takes_few_launches(table):
    """Each costs the host some time, whatever rounds it runs."""
    run = Simulation(table, always(0.0), tokens=2000)
    assert run.launches < 2000 / 8


def test_a_call_that_goes_on_at_the_width_of_the_last_one_takes_few_launches():
    """A launch costs an eighth of a plain round on two cores (docs/numbers.md)."""
    calls = 20
    run = Simulation(ACCELERATOR, right_in(W - 1), tokens=calls * 64, call=64)
    assert run.share(W, 64, calls * 64) > 0.9
    assert run.launches < 1.5 * calls  # four rounds each


def test_tries_after_falling_back_become_rare():
    run = Simulation(TWO_CORES, always(0.0), tokens=2000)
    tries = [at for at, width in run.history if width > 1]
    gaps = [later - earlier for earlier, later in itertools.pairwise(tries)]
    assert gaps[0] < 20
    assert LONGEST_REST <= max(gaps) <= LONGEST_REST + 8
    assert sum(at >= 1000 for at in tries) <= 12 < sum(at < 1000 for at in tries)


@pytest.mark.parametrize("table", [TWO_CORES, ACCELERATOR])
@pytest.mark.parametrize("drafter", [always(0.8), always(0.9), always(0.97), fading])
def test_a_good_drafter_runs_as_at_the_best_fixed_width(table, drafter):
    """Sums over seeds; costs are known, as in every call of a process but the first ones."""
    tokens, seeds = 2000, range(12)
    ours = sum(Simulation(table, drafter, tokens=tokens, seed=seed).seconds for seed in seeds)
    best = min(
        sum(fixed_seconds(table, width, drafter(0), tokens=tokens, seed=seed) for seed in seeds) for width in table
    )
    assert best < 0.9 * tokens * len(seeds)
    assert best >= 0.97 * ours


@pytest.mark.parametrize("table", [TWO_CORES, ACCELERATOR])
def test_unknown_costs_are_found_while_decoding(table):
    """A first call measures every width that it may need, and ends at the best one."""
    costs = RoundCosts()
    run = Simulation(table, always(0.95), tokens=600, costs=costs)
    assert {width: costs.get(width) for width in table} == pytest.approx(table)
    assert run.share(16, 300, 600) > 0.8


@pytest.mark.parametrize("table", [TWO_CORES, ACCELERATOR])
@pytest.mark.parametrize("seed", range(5))
def test_a_drafter_that_turns_bad_is_left_and_one_that_turns_good_is_taken_up(table, seed):
    """Within 128 tokens, and within the longest rest and 64 tokens."""
    good = Simulation(table, turning(0.0, 0.95), tokens=2000, seed=seed)
    back = TURN + LONGEST_REST + 64
    assert good.seconds_from(300) - good.seconds_from(TURN) > TURN - 300  # it had been left
    assert good.seconds_from(back) < 0.7 * (2000 - back)
    assert good.share(1, back, 2000) < 0.05
    bad = Simulation(table, turning(0.95, 0.0), tokens=2000, seed=seed)
    left = TURN + 128
    assert bad.seconds_from(200) - bad.seconds_from(TURN) < 0.7 * (TURN - 200)  # it had been used
    assert bad.seconds_from(left) < 1.04 * (2000 - left)


@st.composite
def tables(draw):
    """Costs that rise with the width, and less than the width: two narrow passes can do what one wide one does."""
    table, seconds = {1: 1.0}, 1.0
    for width in candidate_widths(W)[1:]:
        seconds *= draw(st.floats(1.0, 2.0))
        table[width] = seconds
    return table


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    table=tables(),
    known=st.booleans(),
    accept=st.sampled_from([0.0, 0.0, 0.2, 0.5, 0.8]),
    tokens=st.sampled_from([100, 400]),
    seed=st.integers(0, 5),
)
def test_no_table_of_costs_and_no_drafter_loses_more_than_the_allowance(table, known, accept, tokens, seed):
    costs = None if known else RoundCosts()
    assert Simulation(table, always(accept), tokens=tokens, costs=costs, seed=seed).seconds <= bound(tokens) + 1e-6


@TABLES
@pytest.mark.parametrize("factor", [1.5, 2.5, 10.0])
def test_plain_rounds_that_were_timed_at_a_bad_moment_are_timed_again(table, factor):
    """Everything is measured in plain rounds: two slow ones at the start would make every width look good for good."""
    tokens, costs = 2000, RoundCosts()
    costs.add(1, 2, 2 * factor * table[1])
    run = Simulation(table, always(0.0), tokens=tokens, costs=costs)
    assert run.seconds <= bound(tokens) + 40 * table[1]  # some rounds of every width until the mistake shows
    assert run.share(1, tokens // 2, tokens) > 0.9
    assert costs.get(1) == table[1]


@pytest.mark.parametrize("known", [True, False])
def test_wider_rounds_that_are_quicker_than_plain_ones_are_used(known):
    """As where a compiler is poor at products of one row: a contradiction that timing again does not resolve."""
    table = {1: 1.0, 2: 0.85, 4: 0.85, 8: 0.9, 16: 1.0}
    run = Simulation(table, always(0.8), tokens=1000, costs=None if known else RoundCosts())
    assert run.share(1, 50, 1000) < 0.1


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("factor", [1.15, 1.5, 2.5])
def test_a_width_that_was_timed_at_a_bad_moment_is_timed_again(width, factor):
    """Where it may be better than the one in use: with half of the slots right, 4 is the best of these."""
    table = {1: 1.0, 2: 1.2, 4: 1.3, 8: 1.6, 16: 2.2}
    costs = measured(table | {width: factor * table[width]})
    run = Simulation(table, always(0.5), tokens=2000, costs=costs)
    assert costs.get(width) == pytest.approx(table[width])
    assert run.share(4, 600, 2000) > 0.8


@pytest.mark.parametrize("seed", range(12))
def test_a_width_that_was_timed_at_a_bad_moment_is_timed_again_where_nothing_else_pays(seed):
    """Only 2 pays here, by 10 %, and was timed when it cost more than 4."""
    costs = measured(BATCH_OF_8 | {2: 2.2})
    run = Simulation(BATCH_OF_8, fading_fast(0.02), tokens=2000, costs=costs, seed=seed)
    assert costs.get(2) == pytest.approx(BATCH_OF_8[2])
    assert run.seconds_from(500) < 0.97 * 1500


@pytest.mark.parametrize("table", [TWO_CORES, BATCH_OF_8])
@pytest.mark.parametrize("call", [20, 40])
def test_short_calls_time_again_what_was_timed_at_a_bad_moment(table, call):
    """All wider rounds seemed to cost more than one call may lose."""
    slow = {width: seconds if width == 1 else 8 * seconds for width, seconds in table.items()}
    assert share_of_best(table, 0.9, tokens=4000, seeds=8, call=call, known=slow) >= 0.92


def test_a_stall_does_not_rule_drafting_out_for_long():
    """As when the process was stopped for a while: one round that seems to cost thousands."""
    controller = WidthController(W, measured(ACCELERATOR))
    width, _ = controller.next()
    controller.costs.add(width, 20, 20 * 1000.0)
    controller.observe(width, 20, [20] * width, [20] * width)
    for _ in range(600 // LONGEST_CHUNK):
        width, rounds = controller.next()
        controller.costs.add(width, rounds, rounds * ACCELERATOR[width])
        controller.observe(width, rounds, [rounds] * width, [rounds] * width)
    assert width > 1


@pytest.mark.parametrize("seconds", [0.5, 0.9])
def test_one_lucky_timing_of_a_wider_width_does_not_make_plain_decoding_a_loss(seconds):
    costs = RoundCosts()
    costs.add(1, 8, 8 * ACCELERATOR[1])
    costs.add(2, 1, seconds)
    run = Simulation(ACCELERATOR, always(0.9), tokens=1000, costs=costs)
    assert run.share(1, 200, 1000) < 0.2


def test_a_batch_counts_all_its_rows():
    """One round of a large batch tells as much as many rounds of one row: nothing more is tried for a while."""
    controller = WidthController(W, measured(ACCELERATOR))
    assert controller.next() == (16, 1)
    controller.observe(16, 1, [64, 64] + [0] * 14, [64] + [0] * 15)
    assert controller.next()[0] == 1


@pytest.mark.parametrize(("table", "drafter"), [(TWO_CORES, always(0.8)), (BATCH_OF_8, fading_fast(0.05))])
def test_a_machine_whose_pace_drifts_does_not_make_a_bad_width_look_good(table, drafter):
    """Paces wander by a fifth; seconds are counted as if they did not, so that they can be compared."""
    tokens, seeds = 2000, range(16)
    ours = sum(Simulation(table, drafter, tokens=tokens, seed=seed, drift=0.02).seconds for seed in seeds)
    best = min(
        sum(fixed_seconds(table, width, drafter(0), tokens=tokens, seed=seed) for seed in seeds) for width in table
    )
    assert best < 0.9 * tokens * len(seeds)
    assert best >= 0.97 * ours

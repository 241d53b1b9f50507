"""How many slots to verify, chosen from what rounds cost and what they accept. Pure: knows no model and no clock.

The width with the most expected tokens a second is taken: 1 + Σ S_k tokens over the cost of a round, where S_k is the
probability that slots 1 … k are all accepted. Width 1 is plain decoding, so where drafting does not pay nothing is
drafted, and after a while that doubles each time in vain it is tried again.

What a call can lose against plain decoding is bounded: rounds that are expected to cost more than they give are only
run on an allowance of 4 plain rounds and 2 % of the tokens so far. The next call with the same drafter goes on where
this one ended: with what was lost and not made up for, up to a limit, or with some of what was gained, which it may
lose besides, with half of what was learned of the slots, or a little, and with the rest that was begun, if it is short.

What was timed long ago says little of a busy machine: plain rounds are timed anew, and so is a width that may be better
than the one in use. Not in the bound: costs measured wrong, the first rounds of a width that cost more than twice those
of the next narrower one, what the drafter absorbs in rounds of width 1, which plain decoding without a drafter does not
do, slots that wait because rows that draft do not end together as plain ones of one length do, the round that a stream
launches before it knows what the last one gave, and what calls with one drafter that run at the same time, and share
all this, do to each other.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence
from typing import NamedTuple

ALLOWANCE = 4.0  # plain rounds that may be lost from the start
ALLOWANCE_SHARE = 0.02  # and of every token so far
LARGEST_DEBT = 2 * ALLOWANCE  # beside that share: what is lost beyond is not remembered
HALF_LIFE = 32  # rounds after which what was accepted counts half
FAR_HALF_LIFE = 128  # the same for slots that the present width does not reach
# The next four count verifications of a slot: a round of 8 rows has up to 8.
PRIOR = 2.0  # worth of the belief that slot 1 is right
DEEP_PRIOR = 4.0  # and that a later slot, where those before it were right, is as good as the last of them
PRIOR_HALVES = 16.0  # after which such a belief is worth half
REMEMBERED = 4.0  # down to which a new call halves what a slot did
FIRST_REST, LONGEST_REST = 16, 256  # plain rounds before drafting is tried again
FIRST_CHUNK, LONGEST_CHUNK = 4, 16  # rounds between two looks: at most, in a new call and later
TRUSTED_ROUNDS = 3  # fewer timed rounds of a width are not held against it
SAMPLES = 9  # timings of a width that are remembered
FRESH_ROUNDS = 128  # and for how many rounds, of any width: by then the machine may have become another
LONGEST_FRESH = 1024  # but for plain rounds, it doubles each time that an old timing is confirmed
DOUBT = 0.95  # of the plain cost: what noise may make of a wider round
SURE_TIMINGS = 3  # of plain rounds, all of them dearer than a wider one: it is so
MARGIN = 1.03  # what drafting has to promise over plain decoding
AGREEMENT = 0.25  # of an old timing: what a new one may differ by and still confirm it
PACE_ROUNDS = 4.0  # rounds after which half of what the width in use takes more is put down to the machine
LARGEST_CHANGE = 1.35  # in the pace, that one timing can show


def candidate_widths(max_width: int) -> tuple[int, ...]:
    """1, 2, 4 … and max_width: each is compiled when it is first used."""
    return (*(1 << power for power in range((max_width - 1).bit_length())), max_width)


class _Timing(NamedTuple):
    """Seconds of a round, over some rounds; at: rounds timed by then."""

    seconds: float
    rounds: int
    at: int


class RoundCosts:
    """Seconds of a round at each width, for one compiled shape: medians of the last timings, outlier-proof.

    A width that was not timed for long keeps its last timings, which are then not fresh: the next one replaces those
    that it does not confirm, and where it confirms them, it stays fresh for longer. A machine may get slower or faster
    as a whole: by how much is read off the width in use, and all timings are taken to have changed with it. Not off
    plain rounds, which are what is timed anew where timings contradict each other.

    launch: seconds of a launch that runs no rounds, for the caller to keep; None until it is measured.
    """

    def __init__(self):
        self.launch: float | None = None
        self._rounds = 0  # timed so far, of all widths
        self._pace = 1.0  # what a round takes now, over what it took at the start
        self._last_width = 0
        self._samples: dict[int, list[_Timing]] = collections.defaultdict(list)
        self._stays_fresh: dict[int, int] = collections.defaultdict(lambda: FRESH_ROUNDS)

    def add(self, width: int, rounds: int, seconds: float) -> None:
        """A timing of some rounds, compilation excluded."""
        usual, was_fresh = self.get(width), self.fresh(width)
        if usual is not None and width == self._last_width > 1:
            change = min(max(seconds / rounds / usual, 1 / LARGEST_CHANGE), LARGEST_CHANGE)
            self._pace *= change ** (rounds / (rounds + PACE_ROUNDS))
        self._last_width = width
        self._rounds += rounds
        new = _Timing(seconds / rounds / self._pace, rounds, self._rounds)
        kept = [old for old in self._samples[width] if self._is_fresh(width, old) or _agree(old, new)]
        if width > 1 and not was_fresh:
            self._stays_fresh[width] = min(2 * self._stays_fresh[width], LONGEST_FRESH) if kept else FRESH_ROUNDS
        self._samples[width] = [*kept, new][-SAMPLES:]

    def get(self, width: int) -> float | None:
        """Seconds of a round, the median weighted by rounds; None where nothing is known."""
        timings = self._samples[width]
        samples = sorted(sample for sample in timings if self._is_fresh(width, sample)) or sorted(timings)
        half = sum(sample.rounds for sample in samples) / 2
        for sample in samples:
            half -= sample.rounds
            if half <= 0:
                return sample.seconds * self._pace
        return None

    def fresh(self, width: int) -> bool:
        """Whether it was timed lately."""
        return any(self._is_fresh(width, sample) for sample in self._samples[width])

    def least(self, width: int) -> float:
        """Seconds of a round in the shortest timing that is remembered; the width has one."""
        return min(self._samples[width]).seconds * self._pace

    def timings(self, width: int) -> int:
        """How many are remembered."""
        return len(self._samples[width])

    def trusted(self, width: int) -> bool:
        """Whether enough rounds were timed that one interruption does not decide."""
        return sum(sample.rounds for sample in self._samples[width]) >= TRUSTED_ROUNDS

    def _is_fresh(self, width: int, sample: _Timing) -> bool:
        return self._rounds - sample.at <= self._stays_fresh[width]


def _agree(old: _Timing, new: _Timing) -> bool:
    return abs(new.seconds - old.seconds) <= AGREEMENT * old.seconds


class WidthController:
    """Says the next width and how many rounds to run at it; is told what they accepted.

    A round's cost is looked up in `costs`, which the caller fills. Amounts of time are in plain rounds. It outlives
    calls; each opens with `begin_call`.
    """

    def __init__(self, max_width: int, costs: RoundCosts):
        self.widths, self.costs = candidate_widths(max_width), costs
        self._tried, self._kept = [0.0] * max_width, [0.0] * max_width
        self._tokens = self._debt = self._debt_before = 0.0
        self._rest, self._next_rest = 0, FIRST_REST
        self._width, self._chunk = 0, 1

    def begin_call(self) -> None:
        """A new call, about something else perhaps: of what the last ones gained it can lose a little, what they lost
        it has."""
        lost = max(0.0, self._debt - ALLOWANCE_SHARE * self._tokens) + max(min(0.0, self._debt), -ALLOWANCE)
        self._debt_before += lost - self._debt
        self._tokens, self._debt = 0.0, lost
        shares = [min(1.0, max(0.5, REMEMBERED / tried)) if tried else 1.0 for tried in self._tried]
        self._tried = [share * tried for share, tried in zip(shares, self._tried, strict=True)]
        self._kept = [share * kept for share, kept in zip(shares, self._kept, strict=True)]
        self._rest = min(self._rest, FIRST_REST)
        self._chunk = min(self._chunk, FIRST_CHUNK)  # if it begins at the width at which the last call ended

    def next(self) -> tuple[int, int]:
        """The width to use now, and at most how many rounds before the next decision."""
        if not self.costs.fresh(1) or self._plain_is_doubtful():
            return 1, 2
        if self._rest == 0:
            width, wait = self._best_width()
            if width > 1:
                chunk = min(self._chunk if width == self._width else 1, self._affordable_rounds(width))
                return width, max(1, chunk)
            if wait is not None:
                return 1, max(1, min(wait, LONGEST_CHUNK))
            self._fall_back()
        return 1, min(self._rest, LONGEST_CHUNK)

    def observe(self, width: int, rounds: int, tried: Sequence[int], kept: Sequence[int]) -> None:
        """Takes in rounds that were run.

        Args:
            width: of the rounds.
            rounds: how many.
            tried, kept: of slots 0 … width−1, summed over rows and rounds: how often a slot was verified while those
                before it were accepted, and how often it was accepted then. Slot 0 counts the rows.
        """
        if not rounds or not kept[0]:
            return
        gained = rounds * sum(kept) / kept[0]
        self._tokens += gained
        if width > 1 and self.costs.get(1) is not None:  # a plain round is what is lost in
            self._debt += rounds * self._relative_cost(width) - gained
            # What goes beyond is a round that was timed at a bad moment, and would take for ever to make up for.
            self._debt = min(self._debt, LARGEST_DEBT + ALLOWANCE_SHARE * self._tokens)
        for slot in range(1, self.widths[-1]):
            decay = 0.5 ** (rounds / (HALF_LIFE if slot < width else FAR_HALF_LIFE))
            new_tried, new_kept = (tried[slot], kept[slot]) if slot < width else (0, 0)
            self._tried[slot] = self._tried[slot] * decay + new_tried
            self._kept[slot] = self._kept[slot] * decay + new_kept
        self._chunk = min(2 * self._chunk, LONGEST_CHUNK) if width == self._width else 2
        self._width = width
        if width == 1 and self._rest:
            self._rest = max(0, self._rest - rounds)
            if self._rest == 0:  # what was believed is too old to go by
                self._tried, self._kept = [0.0] * len(self._tried), [0.0] * len(self._kept)
                self._debt_before = self._debt

    def _plain_is_doubtful(self) -> bool:
        """Whether a wider round was clearly quicker than plain ones, which can hardly be: these were timed at a bad
        moment, and everything is measured by them. But three timings that agree on it are believed."""
        (_, plain), *wider = self._fresh_costs()
        least = min((cost for _, cost in wider), default=plain) / DOUBT
        return least < plain and (self.costs.timings(1) < SURE_TIMINGS or self.costs.least(1) <= least)

    def _fall_back(self) -> None:
        """Plain decoding for a while: longer than the last time, unless the rounds since then paid."""
        if self._has_paid():
            self._next_rest = FIRST_REST
        self._rest = self._next_rest
        self._next_rest = min(2 * self._next_rest, LONGEST_REST)

    def _has_paid(self) -> bool:
        """Whether the rounds since the last rest gave more than they cost."""
        return self._debt < self._debt_before

    def _best_width(self) -> tuple[int, int | None]:
        """The best width that can be afforded, and after how many tokens of plain decoding one can be that is expected
        to beat it; None: none is."""
        known, tokens = [self.costs.get(width) is not None for width in self.widths], self._expected_tokens()
        best, best_rate, wait = 1, MARGIN, math.inf
        for index, width in enumerate(self.widths[1:], start=1):
            if not (known[index] or known[index - 1]):
                continue  # widths are tried one by one, so that no cost is a surprise
            rate = tokens[width - 1] / self._relative_cost(width, hopeful=True)
            if rate > MARGIN:
                missing = self._relative_cost(width) - 1 - self._left()
                wait = min(wait, missing / ALLOWANCE_SHARE)
            if rate > best_rate and self._affordable_rounds(width):
                best, best_rate = width, rate
        if best == 1 or self._has_paid():
            best = self._overdue(tokens, best_rate) or best
        return best, None if wait == math.inf else math.ceil(wait)

    def _expected_tokens(self) -> list[float]:
        """Of a round of width 1, 2 … up to the widest."""
        tokens, survival, acceptance, prior = [1.0], 1.0, 1.0, PRIOR
        for tried, kept in zip(self._tried[1:], self._kept[1:], strict=True):
            prior /= 1 + tried / PRIOR_HALVES
            acceptance = (kept + prior * acceptance) / (tried + prior)
            prior = DEEP_PRIOR
            survival *= acceptance
            tokens.append(tokens[-1] + survival)
        return tokens

    def _overdue(self, tokens: Sequence[float], best_rate: float) -> int | None:
        """A width that was not timed for long and may be better than the best, at what the next narrower one costs.

        It is tried for a round if that can be afforded: at what is known, or at as much for a slot as the narrower one.
        """
        fresh = self._fresh_costs()
        cheapest = min(cost for _, cost in fresh)
        for width in self.widths[1:]:
            if self.costs.get(width) is None or self.costs.fresh(width):
                continue
            narrower, least = max((other, cost) for other, cost in fresh if other < width)
            cost = min(self._relative_cost(width), least * width / narrower / cheapest)
            if tokens[width - 1] * cheapest / least > best_rate and cost - 1 <= self._left():
                return width
        return None

    def _affordable_rounds(self, width: int) -> int:
        """How many rounds of a width may give one token each."""
        loss = self._relative_cost(width) - 1
        return LONGEST_CHUNK if loss <= 0 else max(0, int(self._left() / loss))

    def _left(self) -> float:
        """Of the allowance, in plain rounds."""
        return ALLOWANCE + ALLOWANCE_SHARE * self._tokens - self._debt

    def _relative_cost(self, width: int, *, hopeful: bool = False) -> float:
        """Plain rounds that a round costs; where hardly one was timed, the least or the most that it can be.

        It is no cheaper than a narrower one, and no dearer than a wider one or than narrower ones in its stead.
        """
        known = [(other, cost) for other in self.widths if (cost := self.costs.get(other)) is not None]
        cheapest, own = min(cost for _, cost in self._fresh_costs()), self.costs.get(width)
        if own is not None and (width == 1 or self.costs.trusted(width)):
            return own / cheapest
        below, cost = max((other, cost) for other, cost in known if other < width)
        if hopeful:
            return cost / cheapest
        above = [cost for other, cost in known if other >= width]
        return min([cost * width / below, *above]) / cheapest

    def _fresh_costs(self) -> list[tuple[int, float]]:
        """Width and seconds of plain rounds, and of those that were timed lately."""
        widths = (width for width in self.widths if width == 1 or self.costs.fresh(width))
        return [(width, cost) for width in widths if (cost := self.costs.get(width)) is not None]

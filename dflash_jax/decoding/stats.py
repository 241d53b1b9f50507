"""What a call took and what it accepted, in plain numbers. Compilation is counted apart from everything else."""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import jax


@dataclass(frozen=True)
class Stats:
    """One call of `generate` or `stream`, all its prompts together. Seconds are wall time without compilation.

    Attributes:
        first_token_seconds: from the call until the first token of the prompts that were prefilled first was there.
        prefill_seconds: of all prefills, the reading of the prompts included.
        decode_seconds: of all rounds. Of a stream: from its first token to its last, and what the caller did between
            the pieces is part of it.
        compile_seconds: tracing and compiling, or reading compiled programs from the persistent cache; 0 once every
            program is there.
        decode_tokens: tokens that rounds gave: all but the first of each prompt.
        rounds_by_width: block width → rounds of that width. A round advances every row of the batch.
        position_acceptance: of slot k = 1 … W−1, of the rounds that verified it the share that accepted slots 1 … k. A
            slot is verified where the round was wide enough, the budget had room and no stop token came before it.
    """

    first_token_seconds: float
    prefill_seconds: float
    decode_seconds: float
    compile_seconds: float
    decode_tokens: int
    rounds_by_width: dict[int, int]
    position_acceptance: list[float]

    @property
    def tokens_per_second(self) -> float:
        """Tokens a second of decoding, prefill and the first tokens left out; NaN when there was no round."""
        return self.decode_tokens / self.decode_seconds if self.decode_tokens else float("nan")

    @property
    def run_seconds(self) -> float:
        """The call's wall time without compilation."""
        return self.prefill_seconds + self.decode_seconds

    @property
    def batch_rounds(self) -> int:
        """Rounds of all widths."""
        return sum(self.rounds_by_width.values())


def position_acceptance(rounds: Iterable[tuple[int, int]]) -> list[float]:
    """Of slot k = 1, 2 …: rounds that accepted slots 1 … k / rounds that verified slot k.

    rounds: (accepted, verified) of each. Both count slot 0, so a round that refused everything accepted 1. The list
    ends at the last slot that any round verified.
    """
    rounds = list(rounds)
    shares = []
    for slot in range(1, max((verified for _, verified in rounds), default=1)):
        tried = [accepted for accepted, verified in rounds if verified > slot]
        shares.append(sum(accepted > slot for accepted in tried) / len(tried))
    return shares


class Clock:
    """Splits the wall time since it was made into parts, without what the thread that charges spent compiling.

    What a thread compiles before its first charge counts as running.
    """

    def __init__(self):
        self.seconds: dict[str, float] = collections.defaultdict(float)
        self.compile_seconds = 0.0
        self._last, self._compiled = time.perf_counter(), compile_seconds()
        self._thread = threading.get_ident()

    def charge(self, part: str) -> tuple[float, bool]:
        """Adds the time since the last charge to a part; returns it, and whether anything was compiled in it."""
        now, compiled = time.perf_counter(), compile_seconds()
        if threading.get_ident() != self._thread:  # a stream may be read elsewhere than it was made
            self._thread, self._compiled = threading.get_ident(), compiled
        compiling = compiled - self._compiled
        spent = max(0.0, now - self._last - compiling)
        self.seconds[part] += spent
        self.compile_seconds += compiling
        self._last, self._compiled = now, compiled
        return spent, compiling > 0

    def stats(
        self, first_token_seconds: float, rounds_by_width: dict[int, int], rows: Sequence[Sequence[tuple[int, int]]]
    ) -> Stats:
        """The Stats of a call, given the (accepted, verified) counts of the rounds of each row."""
        pooled = [counts for row in rows for counts in row]
        return Stats(
            first_token_seconds=first_token_seconds,
            prefill_seconds=self.seconds["prefill"],
            decode_seconds=self.seconds["decode"],
            compile_seconds=self.compile_seconds,
            decode_tokens=sum(accepted for accepted, _ in pooled),
            rounds_by_width=dict(sorted(rounds_by_width.items())),
            position_acceptance=position_acceptance(pooled),
        )


def compile_seconds() -> float:
    """Seconds that this thread has spent tracing and compiling since this module was imported."""
    return _compilation.seconds


class _Compilation(threading.local):
    """Sums the durations that JAX reports; one inside another, such as an inner trace, counts once."""

    def __init__(self):
        self.seconds = 0.0
        self.spans: list[tuple[float, float]] = []

    def add(self, event: str, duration_secs: float, **_) -> None:
        if not event.startswith("/jax/core/compile/"):
            return
        start = time.perf_counter() - duration_secs
        while self.spans and self.spans[-1][0] >= start:  # reported before what contains it
            self.seconds -= self.spans.pop()[1]
        self.spans.append((start, duration_secs))
        self.seconds += duration_secs


_compilation = _Compilation()
jax.monitoring.register_event_duration_secs_listener(_compilation.add)

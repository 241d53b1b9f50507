"""Runs rounds for one call: all at once at a fixed width, or some at a time at widths that a controller chooses."""

from __future__ import annotations

import collections
import time
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.decoding.adaptive import RoundCosts, WidthController
from dflash_jax.decoding.flat import flatten
from dflash_jax.decoding.loop import LoopState, Progress, run_rounds
from dflash_jax.decoding.recent import Recent
from dflash_jax.decoding.request import Request
from dflash_jax.decoding.stats import Clock
from dflash_jax.sharding import on_mesh

EMPTY_LAUNCHES = 3

# What rounds cost outlives the call. Keys: what a compilation of run_rounds depends on, but for the width. They hold
# the caller's logits processors, so those of old calls have to go.
PROGRAMS = 64
_COSTS: Recent[RoundCosts] = Recent(PROGRAMS)
# And so does what a drafter is worth, for as long as it lives. Keys below a drafter: the same.
_CONTROLLERS: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


class Launched(NamedTuple):
    """Rounds under way.

    at: when they were launched. compilations: of the call by then. ended: when they will have ended, where a thread
    waits for that. Times are those of time.perf_counter.
    """

    width: int
    progress: Progress
    at: float
    compilations: int
    ended: Future[float] | None


class Runner:
    """The rounds of one call, counted in `rounds_by_width` and charged to the clock as "decode"."""

    def __init__(self, request: Request, size: int, clock: Clock):
        self._request, self._size, self._clock = request, size, clock
        self._models = flatten(request.target, request.drafter)
        self._controller = None
        if request.adaptive:
            program = self._program()
            costs, of_drafter = _COSTS.get(program, RoundCosts), _controllers_of(request.drafter)
            self._controller = of_drafter.get(program, lambda: WidthController(request.settings.width, costs))
            self._costs = self._controller.costs
            self._controller.begin_call()
        self._watcher: ThreadPoolExecutor | None = None
        self._ended, self._compilations = 0.0, 0  # when the last rounds did, and launches that compiled
        self.rounds_by_width: dict[int, int] = collections.Counter()

    def run(self, state: LoopState, done_rows: int) -> tuple[LoopState, np.ndarray]:
        """Rounds until done_rows rows are done; the given state is consumed.

        Returns:
            The new state, and which rows are done, bool [B].
        """
        if self._controller is not None:
            state = self._time_a_launch(state)
        while True:
            width, rounds = self._next()
            state, launched = self._launch(state, width, rounds, done_rows)
            progress = self.collect(launched)
            if progress.done.sum() >= done_rows:
                return state, np.asarray(progress.done)

    def launch_round(self, state: LoopState) -> tuple[LoopState, Launched]:
        """Starts one round of all rows, or none if all are done, and does not wait; the given state is consumed.

        Returns:
            The new state, and what to call `collect` with.
        """
        width, _ = self._next()
        state, launched = self._launch(state, width, 1, self._size)
        if self._controller is not None:  # the caller may look for it long after it ended
            self._watcher = self._watcher or ThreadPoolExecutor(1, "dflash rounds")
            launched = launched._replace(ended=self._watcher.submit(_end_of, launched.progress.rounds))
        return state, launched

    def collect(self, launched: Launched) -> Progress:
        """Waits for rounds, in the order of their launches, and takes account of them. The Progress comes back in numpy
        arrays."""
        progress = jax.device_get(launched.progress)
        ended = launched.ended.result() if launched.ended else time.perf_counter()
        self._clock.charge("decode")
        rounds = int(progress.rounds)
        if rounds:
            self.rounds_by_width[launched.width] += rounds
        if rounds and self._controller is not None:
            if launched.compilations == self._compilations:
                self._costs.add(launched.width, rounds, self._seconds(launched.at, ended))
            self._controller.observe(launched.width, rounds, progress.tried.tolist(), progress.kept.tolist())
        self._ended = ended
        return progress

    def _seconds(self, launched: float, ended: float) -> float:
        """What rounds took that were launched and ended at these times; the last ones ended at self._ended."""
        if launched < self._ended:  # and they waited for them
            return ended - self._ended
        seconds, launch = ended - launched, self._costs.launch or 0.0
        return max(seconds - launch, seconds / 10)

    def _next(self) -> tuple[int, int]:
        """Width and most rounds of the next launch."""
        if self._controller is None:
            return self._request.settings.width, self._request.cache_length
        return self._controller.next()

    def _launch(self, state: LoopState, width: int, rounds: int, done_rows: int) -> tuple[LoopState, Launched]:
        settings = self._request.settings._replace(width=width)
        at, compilations = time.perf_counter(), self._compilations
        with on_mesh(self._request.mesh):
            state, progress = run_rounds(
                self._models, state, jnp.int32(rounds), jnp.int32(done_rows), settings=settings
            )
        _, compiled = self._clock.charge("decode")
        self._compilations += compiled
        return state, Launched(width, progress, at, compilations, None)

    def _time_a_launch(self, state: LoopState) -> LoopState:
        """Finds out, once for a program, what a launch costs that runs no round: the shortest of a few, the first of
        which may compile. Where all compile, as under jax.checking_leaks, it is not known."""
        if self._costs.launch is None:
            seconds: list[float] = []
            for _ in range(1 + EMPTY_LAUNCHES):
                state, launched = self._launch(state, 1, 0, self._size)
                self.collect(launched)
                seconds += [self._ended - launched.at] if launched.compilations == self._compilations else []
            self._costs.launch = min(seconds, default=0.0)
        return state

    def _program(self):
        """Equal for calls whose rounds run the same compiled programs."""
        request, shapes = self._request, [(leaf.shape, leaf.dtype, leaf.sharding) for leaf in self._models.leaves]
        return self._models.structure, tuple(shapes), self._size, request.cache_length, request.settings


def _controllers_of(drafter) -> Recent[WidthController]:
    """What is remembered of a drafter: nothing, where it has no hash or takes no weak reference."""
    try:
        return _CONTROLLERS.setdefault(drafter, Recent(PROGRAMS))
    except TypeError:
        return Recent(PROGRAMS)


def _end_of(array: jax.Array) -> float:
    """When it was there."""
    jax.block_until_ready(array)
    return time.perf_counter()

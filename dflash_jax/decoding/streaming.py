"""One prompt's text, piece by piece: what a round gave is handled while the next round runs."""

from __future__ import annotations

from collections.abc import Iterator

import jax

from dflash_jax.decoding.batching import harvest, start
from dflash_jax.decoding.request import Request
from dflash_jax.decoding.runner import Runner
from dflash_jax.decoding.stats import Clock, Stats


class Stream(Iterator[str]):
    """Pieces of text, none of them empty; bytes of an unfinished character wait for the next piece.

    Attributes:
        stats: of the call, None until the text is complete.
    """

    def __init__(self, request: Request, tokenizer, clock: Clock):
        self.stats: Stats | None = None
        self._request, self._clock = request, clock
        self._pieces = self._decoded(tokenizer)

    def __next__(self) -> str:
        return next(self._pieces)

    def _decoded(self, tokenizer) -> Iterator[str]:
        tokens, shown = [], ""
        for new, done in self._rounds():
            tokens += new
            text = tokenizer.decode(tokens, skip_special_tokens=True)
            whole = text if done else text.rstrip("�")
            if len(whole) > len(shown):
                yield whole[len(shown) :]
                shown = whole

    def _rounds(self) -> Iterator[tuple[list[int], bool]]:
        """The new tokens of prefill and of every round, and whether they are the last. One copy to the host each."""
        request, clock = self._request, self._clock
        if request.limits[0] == len(request.prompts[0]):
            self.stats = clock.stats(0.0, {}, [])
            return
        runner, launched = Runner(request, 1, clock), None
        state, progress = start(request, [0], 1)
        progress = jax.device_get(progress)
        first_token_seconds, _ = clock.charge("prefill")
        while True:
            done = bool(progress.done[0])
            if done:
                rounds = [harvest(request, state, {0: 0})[0].rounds]
                self.stats = clock.stats(first_token_seconds, runner.rounds_by_width, rounds)
            yield progress.tokens[0, : progress.counts[0]].tolist(), done
            if done:
                return
            # The first round is launched behind the first token, which should not wait for a compilation.
            if launched is None:
                state, launched = runner.launch_round(state)
            # Behind the last round, this one finds nothing to do.
            state, ahead = runner.launch_round(state)
            progress, launched = runner.collect(launched), ahead

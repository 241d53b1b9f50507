"""One prompt's text, piece by piece: what a round gave is handled while the next round runs."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator

import jax

from dflash_jax.decoding.batching import harvest, start
from dflash_jax.decoding.request import Request
from dflash_jax.decoding.runner import Runner
from dflash_jax.decoding.stats import Clock, Stats


class Stream(Iterator[str]):
    """Pieces of text, none of them empty; bytes of an unfinished character wait for the next piece.

    Its caches live as long as it does, or until `close`.
    """

    def __init__(self, request: Request, tokenizer, clock: Clock):
        # What is yielded knows nothing of the stream: once that is dropped, nothing holds the caches.
        self._stats: list[Stats] = []
        self._pieces = _decoded(tokenizer, _rounds(request, clock, self._stats.append))

    def __next__(self) -> str:
        return next(self._pieces)

    def close(self) -> None:
        """Ends it before its end, and frees what it holds."""
        self._pieces.close()

    @property
    def stats(self) -> Stats | None:
        """Of the call; None until the text is complete."""
        return self._stats[0] if self._stats else None


def _decoded(tokenizer, rounds: Iterator[tuple[list[int], bool]]) -> Generator[str]:
    """Their text, whole characters at a time.

    Only the last tokens are decoded again: those that have been shown since the last but one end of a round that was
    the end of a character, for tokenizers that treat the first token otherwise.
    """
    tokens, old, shown = [], 0, 0  # of those tokens: how many are older than the last such end; characters shown
    for new, done in rounds:
        tokens += new
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        whole = text if done else text.rstrip("�")
        if len(whole) > shown:
            yield whole[shown:]
            shown = len(whole)
        if whole == text and len(tokens) > old:
            tokens = tokens[old:]
            old, shown = len(tokens), len(tokenizer.decode(tokens, skip_special_tokens=True))


def _rounds(request: Request, clock: Clock, ended: Callable[[Stats], object]) -> Iterator[tuple[list[int], bool]]:
    """The new tokens of prefill and of every round, and whether they are the last. One copy to the host each.

    ended: called with the Stats, before the last ones.
    """
    if request.limits[0] == len(request.prompts[0]):
        ended(clock.stats(0.0, {}, []))
        return
    runner, launched = Runner(request, 1, clock), None
    state, progress = start(request, [0], 1)
    progress = jax.device_get(progress)
    first_token_seconds, _ = clock.charge("prefill")
    while True:
        done = bool(progress.done[0])
        if done:
            rounds = [harvest(request, state, {0: 0})[0].rounds]
            ended(clock.stats(first_token_seconds, runner.rounds_by_width, rounds))
        yield progress.tokens[0, : progress.counts[0]].tolist(), done
        if done:
            return
        # The first round is launched behind the first token, which should not wait for a compilation.
        if launched is None:
            state, launched = runner.launch_round(state)
        # Behind the last round, this one finds nothing to do.
        state, ahead = runner.launch_round(state)
        progress, launched = runner.collect(launched), ahead

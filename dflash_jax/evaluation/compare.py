"""One prompt both ways, with the drafter and without: the same text, and how much sooner."""

from __future__ import annotations

import dataclasses

import jax

from dflash_jax.decoding.generate import Generation, generate
from dflash_jax.decoding.request import Width

TIMED_RUNS = 3  # the first that compiles nothing counts


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Both generations of one prompt, timed after a first run that compiled and warmed up.

    width: block width of the speculative arm, or "adaptive". drawn: whether its proposals were sampled and accepted by
    chance, so that the texts are equally likely but need not be the same.
    """

    speculative: Generation
    autoregressive: Generation
    width: int | str
    drawn: bool = False

    @property
    def same(self) -> bool:
        """Whether the two arms gave the same tokens."""
        return self.speculative.tokens == self.autoregressive.tokens

    @property
    def break_even(self) -> float:
        """The acceptance length at which the two arms are equally fast: time of a speculative round over that of a
        plain one, as measured here. NaN where an arm had no round.
        """
        speculative, plain = (_seconds_per_round(arm) for arm in (self.speculative, self.autoregressive))
        return speculative / plain if plain > 0 else float("nan")

    def table(self) -> str:
        """What a user wants to know, in a few lines."""
        plain, speculative = self.autoregressive.stats, self.speculative.stats
        label = f"DFlash, {'adaptive' if self.width == 'adaptive' else f'width {self.width}'}"
        lines = [
            f"                     tokens   seconds     tok/s    rounds   first token   "
            f"({jax.devices()[0].device_kind}, batch 1, prompt {self.autoregressive.prompt_length} tokens; "
            "seconds and tok/s without prefill)",
            _line("autoregressive", self.autoregressive),
            _line(label, self.speculative),
        ]
        if speculative.batch_rounds and plain.batch_rounds:
            drafted = sum((width - 1) * rounds for width, rounds in speculative.rounds_by_width.items())
            accepted = speculative.decode_tokens - speculative.batch_rounds
            lines += [
                f"speedup            {speculative.tokens_per_second / plain.tokens_per_second:8.2f}",
                f"acceptance length  {self.speculative.acceptance_length:8.2f}   tokens a round, the target's own "
                f"counted; break-even at {self.break_even:.2f}",
                f"accepted/drafted   {accepted / max(drafted, 1):8.2f}",
                f"accepted by slot   {' '.join(f'{share:.2f}' for share in speculative.position_acceptance)}",
            ]
            if self.width == "adaptive":
                lines.append(f"rounds by width    {_counts(speculative.rounds_by_width)}")
        answer = "yes" if self.same else "NO"
        if not self.same and self.drawn:
            answer = "no: sampled proposals draw other texts, equally likely"
        lines.append(f"identical tokens   {answer}")
        return "\n".join(lines)


def compare(target, prompt, drafter, *, width: Width, **options) -> Comparison:
    """Decodes one prompt with the drafter and without; `options` as for `generate`, the same for both arms."""

    def timed(**arm) -> Generation:
        generate(target, [prompt], **options | arm)
        # Adaptive widths are compiled when they are tried, so that a later run may compile too.
        for _ in range(TIMED_RUNS):
            run = generate(target, [prompt], **options | arm)[0]
            if not run.stats.compile_seconds:
                break
        return run

    width = drafter.model.max_width if width is None else width
    drawn = options.get("proposals") == "sampled" and options.get("temperature", 0) > 0
    return Comparison(timed(drafter=drafter, width=width), timed(proposals="argmax"), width, drawn)


def _line(label: str, generation: Generation) -> str:
    stats = generation.stats
    rate = stats.tokens_per_second if stats.decode_tokens else 0.0
    return (
        f"{label:<18} {len(generation.tokens):8d} {stats.decode_seconds:9.2f} {rate:9.1f} {stats.batch_rounds:9d} "
        f"{stats.first_token_seconds:11.3f} s"
    )


def _seconds_per_round(generation: Generation) -> float:
    stats = generation.stats
    return stats.decode_seconds / stats.batch_rounds if stats.batch_rounds else float("nan")


def _counts(rounds_by_width: dict[int, int]) -> str:
    return "   ".join(f"{width}: {rounds}" for width, rounds in rounds_by_width.items())

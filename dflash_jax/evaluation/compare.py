"""One prompt both ways, with the drafter and without: the same text, and how much sooner."""

from __future__ import annotations

import dataclasses

import jax

from dflash_jax.decoding.generate import Generation, generate
from dflash_jax.evaluation.heldout import DecodingReport, decoding_report


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Both generations of one prompt, timed after a first run that compiled and warmed up.

    width: block width of the speculative arm.
    """

    speculative: Generation
    autoregressive: Generation
    width: int

    @property
    def same(self) -> bool:
        """Whether the two arms gave the same tokens."""
        return self.speculative.tokens == self.autoregressive.tokens

    @property
    def report(self) -> DecodingReport:
        """Acceptance of the speculative arm."""
        return decoding_report([self.speculative], self.width)

    def table(self) -> str:
        """What a user wants to know, in a few lines."""
        seconds = [generation.timings.decode_seconds for generation in (self.autoregressive, self.speculative)]
        rates = [_rate(generation) for generation in (self.autoregressive, self.speculative)]
        report = self.report
        lines = [
            f"                     tokens   seconds     tok/s    rounds   ({jax.devices()[0].device_kind}, batch 1, "
            f"prompt {self.autoregressive.prompt_length} tokens, decode time without prefill)",
            f"autoregressive     {len(self.autoregressive.tokens):8d} {seconds[0]:9.2f} {rates[0]:9.1f} "
            f"{len(self.autoregressive.acceptance_lengths):9d}",
            f"DFlash, width {self.width:<4d} {len(self.speculative.tokens):8d} {seconds[1]:9.2f} {rates[1]:9.1f} "
            f"{report.rounds:9d}",
        ]
        if report.rounds and rates[0] > 0:
            cost = (seconds[1] / report.rounds) / (seconds[0] / max(len(self.autoregressive.acceptance_lengths), 1))
            slots = " ".join(f"{share:.2f}" for share in report.position_acceptance)
            lines += [
                f"speedup            {rates[1] / rates[0]:8.2f}",
                f"acceptance length  {report.acceptance_length:8.2f}   tokens a round, the target's own counted; "
                f"break-even at {cost:.2f}",
                f"accepted/drafted   {report.accepted_share:8.2f}",
                f"accepted by slot   {slots}",
            ]
        lines.append(f"identical tokens   {'yes' if self.same else 'NO'}")
        return "\n".join(lines)


def compare(target, prompt, drafter, *, width: int | None, **options) -> Comparison:
    """Decodes one prompt with the drafter and without; `options` as for `generate`, the same for both arms."""

    def timed(**arm) -> Generation:
        generate(target, [prompt], **arm, **options)
        return generate(target, [prompt], **arm, **options)[0]

    width = width or drafter.model.max_width
    return Comparison(timed(drafter=drafter, width=width), timed(), width)


def _rate(generation: Generation) -> float:
    """Tokens a second of decoding; the first token belongs to prefill."""
    seconds = generation.timings.decode_seconds
    return (len(generation.tokens) - 1) / seconds if len(generation.tokens) > 1 and seconds > 0 else 0.0

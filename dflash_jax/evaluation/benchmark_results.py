"""What a benchmark measured, as data: arms, cells, and the facts that a figure is worthless without."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

from dflash_jax.evaluation.heldout import DecodingReport


@dataclasses.dataclass(frozen=True)
class Arm:
    """One way of decoding the prompts of a cell.

    tokens: new tokens, all prompts. decoded_tokens: of these the ones that rounds gave, not prefill. batch_rounds:
    passes of the loop, each of which advances every running row. Seconds of wall clock are those of the whole set,
    the median of the repetitions; compilation is in none of them.
    """

    tokens: int
    decoded_tokens: int
    batch_rounds: int
    decode_seconds: float
    prefill_seconds: float
    decode_seconds_of_runs: list[float]

    @property
    def tokens_per_second(self) -> float:
        """Of decoding, all rows together; prefill and the tokens that it gives are left out."""
        return self.decoded_tokens / self.decode_seconds


@dataclasses.dataclass(frozen=True)
class Cell:
    """Both arms on one set at one temperature, batch size and width.

    width: slots of a block, or "adaptive". identical: prompts whose two texts are the same, token for token.
    acceptance: of the speculative arm.
    """

    source: str
    temperature: float
    batch_size: int
    width: int | Literal["adaptive"]
    baseline: Arm
    dflash: Arm
    identical: int
    acceptance: DecodingReport

    @property
    def speedup(self) -> float:
        """Tokens a second with the drafter, in those of plain decoding."""
        return self.dflash.tokens_per_second / self.baseline.tokens_per_second

    @property
    def break_even(self) -> float | None:
        """The acceptance length from which on rounds of this cost beat plain decoding; None where the width varies.

        In batches it holds what slots cost that wait for others at the end, in either arm.
        """
        return None if self.width == "adaptive" else self.acceptance.acceptance_length / self.speedup

    @property
    def place(self) -> tuple[float, float, int]:
        """Sorts cells of one set: by temperature, width ("adaptive" last) and batch size."""
        return self.temperature, math.inf if self.width == "adaptive" else self.width, self.batch_size

    def __str__(self) -> str:
        return (
            f"{self.source}, T {self.temperature:g}, batch {self.batch_size}, width {self.width}: "
            f"{self.baseline.tokens_per_second:.1f} → {self.dflash.tokens_per_second:.1f} tok/s, "
            f"speedup {self.speedup:.2f}, acceptance length {self.acceptance.acceptance_length:.2f}"
        )


@dataclasses.dataclass(frozen=True)
class PromptSet:
    """The prompts of a set that were decoded: how many, tokens of each, and a hash of their ids."""

    source: str
    prompts: int
    shortest: int
    mean_length: float
    longest: int
    sha256: str


@dataclasses.dataclass(frozen=True)
class Results:
    """A whole benchmark.

    settings: of the BenchmarkConfig. template_arguments: of the chat template, of this run and of the data that the
    drafter was trained on (None: its folder doesn't say). draft_vocab_size: how many of the vocab_size tokens the
    drafter proposes (None: any). complete: whether all cells were measured; if not, it was cut off or still runs.
    """

    settings: dict[str, Any]
    device: str
    platform: str
    jax_version: str
    matmul_precision: str
    target_fingerprint: str
    drafter_width: int
    vocab_size: int
    draft_vocab_size: int | None
    template_arguments: dict[str, Any]
    drafter_template_arguments: dict[str, Any] | None
    sets: list[PromptSet]
    cells: list[Cell]
    complete: bool = True

    def to_dict(self) -> dict[str, Any]:
        """All of it, with what is derived, as JSON has it."""
        content = {"complete": self.complete, **dataclasses.asdict(self)}  # first, so that it is seen
        for cell, entry in zip(self.cells, content["cells"], strict=True):
            entry |= {"speedup": cell.speedup, "break_even": cell.break_even}
            for name, arm in (("baseline", cell.baseline), ("dflash", cell.dflash)):
                entry[name]["tokens_per_second"] = arm.tokens_per_second
        return content

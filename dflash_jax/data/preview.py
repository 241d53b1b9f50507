"""Shows training rows as text, the supervised tokens in colour: what the drafter learns to propose, to the eye."""

import os
from typing import TextIO

from dflash_jax.data.rows import TrainingRow

_COLOUR, _PLAIN = ("\x1b[32m", "\x1b[0m"), ("⟦", "⟧")


def preview(tokenizer, row: TrainingRow, *, colour: bool) -> str:
    """The text of a row, special tokens included; what is supervised is green, or without colour in ⟦ ⟧."""
    begin, end = _COLOUR if colour else _PLAIN
    pieces = [f"{row.id}: {len(row.tokens)} tokens, {int(row.loss_mask.sum())} supervised\n"]
    start = 0
    mask = row.loss_mask.tolist()
    for stop in range(1, len(mask) + 1):
        if stop < len(mask) and mask[stop] == mask[start]:
            continue
        text = tokenizer.decode(row.tokens[start:stop].tolist(), clean_up_tokenization_spaces=False)
        pieces.append(f"{begin}{text}{end}" if mask[start] else text)
        start = stop
    return "".join(pieces)


def wants_colour(stream: TextIO) -> bool:
    """Whether a stream shows colours: a terminal, unless NO_COLOR is set."""
    return stream.isatty() and not os.environ.get("NO_COLOR")

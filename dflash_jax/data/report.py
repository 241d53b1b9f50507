"""What became of the rows of a file: how many were kept, and why each of the others was not."""

import collections
import dataclasses

import numpy as np

MAX_LISTED_ROWS = 20
FIRST_ROWS = 5  # row numbers shown beside each reason
_BAR = 30


@dataclasses.dataclass(frozen=True)
class SkippedRow:
    """A row that was left out: its number in the file (`line`, from 1), its id where it has one, and why."""

    line: int
    id: str | None
    reason: str

    def __str__(self) -> str:
        name = f" ({self.id})" if self.id not in (None, f"line-{self.line}") else ""
        return f"row {self.line}{name}: {self.reason}"


@dataclasses.dataclass
class ReadReport:
    """What happened to the rows of a file. rows_in == rows_out + len(skipped), always.

    Token counts are of what was made of the rows kept, `lengths` one for each training row: a chat may give several.
    `notes` are findings that cost no row, counted by text.
    """

    source: str
    rows_in: int = 0
    rows_out: int = 0
    truncated: int = 0
    skipped: list[SkippedRow] = dataclasses.field(default_factory=list)
    supervised: int = 0
    lengths: list[int] = dataclasses.field(default_factory=list)
    notes: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    def add(self, tokens: int, supervised: int, truncated: bool) -> None:
        """Counts one training row."""
        self.lengths.append(tokens)
        self.supervised += supervised
        self.truncated += truncated

    def note(self, text: str, count: int = 1) -> None:
        """Counts a finding that costs no row."""
        if count:
            self.notes[text] += count

    def include(self, part: "ReadReport") -> None:
        """Adds what happened to further rows."""
        self.rows_in += part.rows_in
        self.rows_out += part.rows_out
        self.truncated += part.truncated
        self.supervised += part.supervised
        self.skipped += part.skipped
        self.lengths += part.lengths
        self.notes += part.notes

    @property
    def reasons(self) -> dict[str, list[int]]:
        """Numbers of the skipped rows by reason, the most frequent reason first."""
        rows = collections.defaultdict(list)
        for row in self.skipped:
            rows[row.reason].append(row.line)
        return dict(sorted(rows.items(), key=lambda item: -len(item[1])))

    def table(self) -> str:
        """A table of counts by reason, with tokens and lengths, followed by the skipped rows (the first 20 of them)."""
        lines = [("rows read", self.rows_in, ""), ("rows kept", self.rows_out, "")]
        lines += [(f"skipped: {reason}", len(rows), _numbers(rows)) for reason, rows in self.reasons.items()]
        if self.lengths:
            lines += [("training rows", len(self.lengths), ""), ("tokens", sum(self.lengths), "")]
            lines += [("supervised tokens", self.supervised, f"{self.supervised / max(sum(self.lengths), 1):.0%}")]
        lines += [("truncated rows", self.truncated, "")] if self.truncated or self.lengths else []
        lines += [(f"note: {text}", count, "") for text, count in self.notes.most_common()]
        width = max(len(label) for label, _, _ in lines)
        text = [f"{self.source}", *(f"  {label:<{width}}  {n:>11,}  {what}".rstrip() for label, n, what in lines)]
        text += [f"  {line}" for line in histogram(self.lengths)]
        text += [f"  {row}" for row in self.skipped[:MAX_LISTED_ROWS]]
        if len(self.skipped) > MAX_LISTED_ROWS:
            text.append(f"  … and {len(self.skipped) - MAX_LISTED_ROWS} more")
        return "\n".join(text)


def histogram(lengths: list[int]) -> list[str]:
    """Lines that show how many rows have what length, in steps of a power of two: "129 … 256  1,024  ██████"."""
    if not lengths:
        return []
    # Bin b holds the lengths from 2^(b−1)+1 to 2^b.
    counts = np.bincount(np.ceil(np.log2(np.maximum(lengths, 1))).astype(int))
    first = int(counts.nonzero()[0][0])
    lines = ["tokens a row"]
    for power in range(first, len(counts)):
        low, high = (2 ** (power - 1) + 1 if power else 1), 2**power
        bar = "█" * round(_BAR * counts[power] / counts.max())
        lines.append(f"  {low:>7,} … {high:<7,}  {counts[power]:>9,}  {bar}".rstrip())
    return lines


def _numbers(rows: list[int]) -> str:
    first = ", ".join(map(str, rows[:FIRST_ROWS]))
    return f"row{'s' * (len(rows) > 1)} {first}{', …' if len(rows) > FIRST_ROWS else ''}"

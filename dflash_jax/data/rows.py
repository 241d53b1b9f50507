"""Training rows: token ids with a loss mask, cut to a length, and only those that teach something."""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from dflash_jax.data.formats import supervised_ids
from dflash_jax.data.records import Chat, Conversation, ReadReport, RowError, SkippedRow, TokenisedRow
from dflash_jax.data.turns import ChatRow, TurnRenderer

# An anchor is a supervised token whose successor is supervised too; with fewer there is none.
MIN_SUPERVISED = 2
# Chats tokenised together: enough to make use of several cores, few enough to be no matter of memory.
TOGETHER = 256

Source = Conversation | Chat | TokenisedRow

REWRITTEN = "chats that gave several rows, because the template rewrites what is past"
NOT_AS_SERVED = (
    "rows in which the template puts text between the prompt of serving and the answer (an empty think block?): "
    "give the template arguments that serving uses"
)


@dataclasses.dataclass(frozen=True)
class TrainingRow:
    """tokens_T int32 and loss_mask_T bool of one chat; True where the target wrote the token."""

    id: str
    tokens: np.ndarray
    loss_mask: np.ndarray


def rows_from_regenerated(
    chats: Sequence[Chat], *, max_length: int, embedding_rows: int | None = None, source: str = "regenerated chats"
) -> tuple[list[TrainingRow], ReadReport]:
    """Training rows of chats that the target answered: its prompt ids and its answer ids, nothing rendered anew.

    Arguments as for `make_rows`; `source` is the name that the report carries.

    Returns:
      The rows, and a report of those left out.
    """
    report = ReadReport(source=source, rows_in=len(chats))
    made = make_rows(chats, report, max_length=max_length, embedding_rows=embedding_rows)
    return [row for _, rows in made for row in rows], report


def make_rows(
    sources: Iterable[Source],
    report: ReadReport,
    *,
    max_length: int,
    embedding_rows: int | None = None,
    renderer: TurnRenderer | None = None,
) -> Iterator[tuple[Source, list[TrainingRow]]]:
    """Yields the training rows of each chat, in order; a chat that gives none is reported.

    Args:
      sources: what `records.iterate` gives; regenerated and tokenised rows are taken as they are.
      report: all but rows_in is brought up to date.
      max_length: longer rows lose their end; what is left without two supervised tokens in a row is left out.
      embedding_rows: rows of the target's embedding; a chat with an id beyond it is left out.
      renderer: for conversations whose answers are known as text only.

    Raises:
      ValueError: max_length is too short for any row, or a conversation came without a renderer.
    """
    if max_length < MIN_SUPERVISED:
        raise ValueError(f"max_length={max_length} is too short for a row; it must be at least {MIN_SUPERVISED}")
    sources = iter(sources)
    while together := list(itertools.islice(sources, TOGETHER)):
        for source, made in zip(together, _tokenised(together, renderer), strict=True):
            try:
                if isinstance(made, ValueError):
                    raise made
                rows = _cut(source, made, report, max_length, embedding_rows)
            except ValueError as error:
                report.skipped.append(SkippedRow(source.line, source.id, str(error)))
                continue
            report.rows_out += 1
            report.note(REWRITTEN, len(made) > 1)
            report.note(NOT_AS_SERVED, sum(not row.as_served for row in made))
            yield source, rows


def _tokenised(sources: Sequence[Source], renderer: TurnRenderer | None) -> list[list[ChatRow] | ValueError]:
    """The rows of each source before they are cut, or why there are none."""
    result: list[list[ChatRow] | ValueError] = []
    texts = [source.messages for source in sources if not isinstance(source, (Chat, TokenisedRow))]
    of_texts = iter(renderer.rows_of(texts) if renderer else [])
    for source in sources:
        if isinstance(source, Chat):
            tokens_T, mask_T = supervised_ids(source.prompt_ids, source.answer_ids)
            result.append([ChatRow(tokens_T, mask_T, as_served=True)])
        elif isinstance(source, TokenisedRow):
            result.append([ChatRow(source.tokens, source.loss_mask, as_served=True)])
        elif renderer is None:
            raise ValueError(f"row {source.line} ({source.id}) is text and has to be rendered; give the tokenizer")
        else:
            result.append(next(of_texts))
    return result


def _cut(
    source: Source, made: list[ChatRow], report: ReadReport, max_length: int, embedding_rows: int | None
) -> list[TrainingRow]:
    """The rows of one chat that teach something, at their final length, counted.

    Raises:
      RowError: there are none, or a token id is not of the target's.
    """
    if embedding_rows is not None and any(row.tokens.max() >= embedding_rows for row in made):
        raise RowError(f"a token id beyond the target's embedding of {embedding_rows} rows")
    rows, too_short = [], ""
    for number, row in enumerate(made):
        tokens_T, mask_T = row.tokens.astype(np.int32, copy=False), row.loss_mask
        truncated = len(row.tokens) > max_length
        if truncated:  # copies: a view would keep all of a long row in memory
            tokens_T, mask_T = tokens_T[:max_length].copy(), mask_T[:max_length].copy()
        if not np.count_nonzero(mask_T[:-1] & mask_T[1:]):
            where = f" in its first {max_length} tokens" if truncated else ""
            too_short = f"fewer than {MIN_SUPERVISED} supervised tokens in a row{where}"
            continue
        report.add(len(tokens_T), int(np.count_nonzero(mask_T)), truncated)
        rows.append(TrainingRow(source.id if len(made) == 1 else f"{source.id}.{number}", tokens_T, mask_T))
    if not rows:
        raise RowError(too_short)
    report.note(f"answers left out: {too_short}", len(made) - len(rows))
    return rows

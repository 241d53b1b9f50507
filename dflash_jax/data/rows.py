"""Training rows: token ids with a loss mask, cut to a length, and only those that teach something."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from dflash_jax.data.chat import render_training
from dflash_jax.data.records import Chat, Conversation, ReadReport, RowError, SkippedRow

# An anchor is a supervised token whose successor is supervised too; with fewer there is none.
MIN_SUPERVISED = 2


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

    Args:
      chats: as `read_chats` gives them.
      max_length: longer rows lose their end.
      embedding_rows: rows of the target's embedding; a chat with an id beyond it is left out and reported.
      source: the name that the report carries.

    Returns:
      The rows, and a report of those left out: what truncation leaves without two supervised tokens, bad ids.
    """

    def tokens_and_mask(chat: Chat) -> tuple[np.ndarray, np.ndarray]:
        tokens_T = np.asarray(chat.prompt_ids + chat.answer_ids, np.int64)
        if embedding_rows is not None and tokens_T.max() >= embedding_rows:
            raise RowError(f"a token id beyond the target's embedding of {embedding_rows} rows")
        return tokens_T.astype(np.int32), np.arange(len(tokens_T)) >= len(chat.prompt_ids)

    return _rows(chats, tokens_and_mask, max_length, source)


def rows_from_text(
    tokenizer,
    chats: Sequence[Conversation],
    *,
    max_length: int,
    template_arguments: Mapping[str, Any] | None = None,
    embedding_rows: int | None = None,
    source: str = "chats",
) -> tuple[list[TrainingRow], ReadReport]:
    """Training rows of chats whose answers are known as text only; a chat that can't be rendered is reported.

    Further arguments as for `chat.render_training` and `rows_from_regenerated`.
    """

    def tokens_and_mask(chat: Conversation) -> tuple[np.ndarray, np.ndarray]:
        try:
            return render_training(
                tokenizer, chat.messages, template_arguments=template_arguments, embedding_rows=embedding_rows
            )
        except ValueError as error:
            raise RowError(str(error)) from error

    return _rows(chats, tokens_and_mask, max_length, source)


def _rows(
    chats: Sequence[Conversation],
    tokens_and_mask: Callable[[Any], tuple[np.ndarray, np.ndarray]],
    max_length: int,
    source: str,
) -> tuple[list[TrainingRow], ReadReport]:
    if max_length < MIN_SUPERVISED:
        raise ValueError(f"max_length={max_length} is too short for a row; it must be at least {MIN_SUPERVISED}")
    report = ReadReport(source=source, rows_in=len(chats))
    rows = []
    for chat in chats:
        try:
            tokens_T, mask_T = tokens_and_mask(chat)
            if not (mask_T[:max_length][:-1] & mask_T[:max_length][1:]).any():
                where = f" in its first {max_length} tokens" if len(tokens_T) > max_length else ""
                raise RowError(f"fewer than {MIN_SUPERVISED} supervised tokens in a row{where}")
        except RowError as error:
            report.skipped.append(SkippedRow(chat.line, chat.id, str(error)))
            continue
        report.truncated += len(tokens_T) > max_length
        rows.append(TrainingRow(chat.id, tokens_T[:max_length], mask_T[:max_length]))
    report.rows_out = len(rows)
    return rows, report

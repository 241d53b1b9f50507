"""Reads chats row by row: what is wrong with a row is reported by its number, the others are kept.

Rows come from the files of data/files.py in the forms of data/formats.py, with an optional "id" and "split". A row of
regenerated chats has "messages" and besides "prompt_ids", "answer_ids" and "finish_reason".
"""

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from dflash_jax.data import files, formats
from dflash_jax.data.formats import RowError, check_messages
from dflash_jax.data.report import ReadReport, SkippedRow

__all__ = ["BadRowsError", "Chat", "Conversation", "ReadReport", "RowError", "SkippedRow", "check_messages"]

T = TypeVar("T")

NOT_RENDERED = 'a chat that is not rendered yet: no "prompt_ids" and "answer_ids"'

# (row, its number, its id) → what is read of it; raises RowError.
Parse = Callable[[Mapping[str, Any], int, str], T]


class BadRowsError(ValueError):
    """Bad rows in a file that was read strictly."""


@dataclasses.dataclass(frozen=True)
class Conversation:
    """Messages of one row; `line` is its number in its file: of JSON lines the line, else the place, from 1."""

    line: int
    id: str
    split: str | None
    messages: list[dict[str, str]]


@dataclasses.dataclass(frozen=True)
class Chat(Conversation):
    """A conversation with an answer that the target wrote itself, as text and token for token."""

    prompt_ids: list[int]
    answer_ids: list[int]
    finish_reason: str


@dataclasses.dataclass(frozen=True)
class TokenisedRow:
    """A row that came tokenised: tokens_T int64 and loss_mask_T bool."""

    line: int
    id: str
    split: str | None
    tokens: np.ndarray
    loss_mask: np.ndarray


def read_prompts(
    path: str | Path, *, strict: bool = False, limit: int | None = None
) -> tuple[list[Conversation], ReadReport]:
    """Reads conversations to be answered. An answer at the end is dropped: the target writes its own.

    Args:
      path: file of chats.
      strict: raise when there are bad rows, instead of skipping them.
      limit: read no more than so many rows, bad ones counted.

    Raises:
      BadRowsError: `strict` and there are bad rows; the message names them.
      ValueError: the file is missing, of another kind, or cut short.
    """
    return _read(path, prompt_of, strict, limit)


def read_chats(path: str | Path, *, strict: bool = False) -> tuple[list[Chat], ReadReport]:
    """Reads regenerated chats, as `dflash_jax.data.regenerate` writes them. Arguments and errors as `read_prompts`."""
    return _read(path, chat_of, strict)


def iterate(
    path: str | Path,
    parse: Parse[T],
    report: ReadReport,
    *,
    limit: int | None = None,
    id_field: str = "id",
    prefix: str = "",
    seen: set[str] | None = None,
) -> Iterator[T]:
    """Yields what `parse` makes of each row of a file, holding one at a time; what it refuses goes to the report.

    Args:
      path: file of rows.
      limit: read no more than so many rows, bad ones counted.
      parse, report, id_field, prefix, seen: as for `parse_rows`.

    Raises:
      ValueError: the file is missing, of another kind, or cut short.
    """
    rows = itertools.islice(files.read_rows(path), limit)
    return parse_rows(rows, parse, report, id_field=id_field, prefix=prefix, seen=seen)


def parse_rows(
    rows: Iterable[tuple[int, Any]],
    parse: Parse[T],
    report: ReadReport,
    *,
    id_field: str = "id",
    prefix: str = "",
    seen: set[str] | None = None,
) -> Iterator[T]:
    """Yields what `parse` makes of each row; what it refuses goes to the report.

    Args:
      rows: as `files.read_rows` gives them.
      parse: prompt_of, conversation_of, chat_of, training_row_of, or one of a preset's.
      report: rows_in and skipped are brought up to date; rows_out is the caller's, who may refuse more.
      id_field: the field with the row's id; a row without is called after its number.
      prefix: stands before such a number.
      seen: ids that occurred before, which are refused; those of the rows kept are added.
    """
    for line, raw in rows:
        report.rows_in += 1
        name = None
        try:
            row = _row_of(raw)
            name = _name_of(row, f"{prefix}line-{line}", id_field)
            if seen is not None and name in seen:
                raise RowError("its id occurs twice")
            parsed = parse(row, line, name)
        except RowError as error:
            report.skipped.append(SkippedRow(line, name, str(error)))
            continue
        if seen is not None:
            seen.add(name)
        yield parsed


def prompt_of(row: Mapping[str, Any], line: int, name: str) -> Conversation:
    """A conversation that ends with the user's message."""
    messages = formats.messages_of(row)
    if messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    return Conversation(line, name, row.get("split"), messages)


def conversation_of(row: Mapping[str, Any], line: int, name: str) -> Conversation:
    """A conversation that ends with the assistant's message."""
    messages = formats.messages_of(row)
    if messages[-1]["role"] != "assistant":
        raise RowError("the last message is not the assistant's")
    return Conversation(line, name, row.get("split"), messages)


def chat_of(row: Mapping[str, Any], line: int, name: str) -> Chat:
    """A regenerated chat."""
    if "prompt_ids" not in row and "answer_ids" not in row and formats.messages_of(row):
        raise RowError(NOT_RENDERED)
    conversation = conversation_of(row, line, name)
    prompt_ids, answer_ids = (formats.token_ids(row, field) for field in ("prompt_ids", "answer_ids"))
    if row.get("finish_reason") not in ("stop", "length"):
        raise RowError('"finish_reason" is neither "stop" nor "length"')
    return Chat(line, name, conversation.split, conversation.messages, prompt_ids, answer_ids, row["finish_reason"])


def training_row_of(row: Mapping[str, Any], line: int, name: str) -> Conversation | Chat | TokenisedRow:
    """Whatever can be trained on: a regenerated chat, a tokenised row, or a conversation with its answer as text."""
    if "answer_ids" in row:
        return chat_of(row, line, name)
    if row.get(formats.TOKEN_FIELD) is not None:
        tokens, mask = formats.tokens_and_mask(row)
        return TokenisedRow(line, name, row.get("split"), np.asarray(tokens, np.int64), np.asarray(mask, bool))
    return conversation_of(row, line, name)


def _read(path: str | Path, parse: Parse[T], strict: bool, limit: int | None = None) -> tuple[list[T], ReadReport]:
    report = ReadReport(source=str(path))
    kept = list(iterate(path, parse, report, limit=limit, seen=set()))
    report.rows_out = len(kept)
    check_strict(report, strict)
    return kept, report


def check_strict(report: ReadReport, strict: bool) -> None:
    """Raises BadRowsError when `strict` and there are skipped rows."""
    if strict and report.skipped:
        raise BadRowsError(f"{len(report.skipped)} bad rows and strict reading was asked for\n{report.table()}")


def _row_of(raw: Any) -> dict:
    row = raw
    if isinstance(raw, bytes):
        try:
            row = json.loads(raw)
        except UnicodeDecodeError as error:
            raise RowError("not UTF-8 text") from error
        except (ValueError, RecursionError) as error:
            raise RowError("broken JSON") from error
    if not isinstance(row, dict):
        raise RowError(f'a {type(row).__name__} and not an object with "messages"')
    return row


def _name_of(row: dict, default: str, id_field: str) -> str:
    name = row.get(id_field)
    name = default if name is None else name
    if not isinstance(name, str | int):
        raise RowError(f'"{id_field}" is neither text nor a number')
    if not isinstance(row.get("split") or "", str):
        raise RowError('"split" is not text')
    formats.check_text(str(name), f'"{id_field}"')
    return str(name)

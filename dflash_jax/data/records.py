"""Reads chats from JSON lines, row by row: what is wrong with a row is reported by its number, the others are kept.

A row of prompts is {"messages": [{"role", "content"}, …]} with an optional "id" and "split"; a row of regenerated chats
has besides "prompt_ids", "answer_ids" and "finish_reason". Files may be gzipped (.jsonl.gz). Blank lines are no rows.
"""

import collections
import dataclasses
import gzip
import itertools
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

MAX_LISTED_ROWS = 20

T = TypeVar("T")


class RowError(ValueError):
    """What is wrong with one row."""


class BadRowsError(ValueError):
    """Bad rows in a file that was read strictly."""


@dataclasses.dataclass(frozen=True)
class SkippedRow:
    """A row that was left out: its line in the file (from 1), its id where it has one, and why."""

    line: int
    id: str | None
    reason: str

    def __str__(self) -> str:
        name = f" ({self.id})" if self.id not in (None, f"line-{self.line}") else ""
        return f"line {self.line}{name}: {self.reason}"


@dataclasses.dataclass
class ReadReport:
    """What happened to the rows of a file. rows_in == rows_out + len(skipped), always."""

    source: str
    rows_in: int = 0
    rows_out: int = 0
    truncated: int = 0
    skipped: list[SkippedRow] = dataclasses.field(default_factory=list)

    def table(self) -> str:
        """A table of counts by reason, followed by the skipped rows (the first 20 of them)."""
        counts = collections.Counter(row.reason for row in self.skipped)
        lines = [("rows read", self.rows_in), ("rows kept", self.rows_out)]
        lines += [("  of these truncated", self.truncated)] if self.truncated else []
        lines += [(f"skipped: {reason}", count) for reason, count in counts.most_common()]
        width = max(len(label) for label, _ in lines)
        text = [f"{self.source}", *(f"  {label:<{width}}  {count:>8,}" for label, count in lines)]
        text += [f"  {row}" for row in self.skipped[:MAX_LISTED_ROWS]]
        if len(self.skipped) > MAX_LISTED_ROWS:
            text.append(f"  … and {len(self.skipped) - MAX_LISTED_ROWS} more")
        return "\n".join(text)


@dataclasses.dataclass(frozen=True)
class Conversation:
    """Messages of one row; `line` is where it stands in its file."""

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


def read_prompts(
    path: str | Path, *, strict: bool = False, limit: int | None = None
) -> tuple[list[Conversation], ReadReport]:
    """Reads conversations to be answered. An answer at the end is dropped: the target writes its own.

    Args:
      path: .jsonl or .jsonl.gz file.
      strict: raise when there are bad rows, instead of skipping them.
      limit: read no more than so many rows, bad ones counted.

    Raises:
      BadRowsError: `strict` and there are bad rows; the message names them.
      ValueError: the file is missing, of another kind, or cut short.
    """
    return _read(path, _prompt_of, strict, limit)


def read_conversations(path: str | Path, *, strict: bool = False) -> tuple[list[Conversation], ReadReport]:
    """Reads conversations that end with an answer known as text. Arguments and errors as `read_prompts`."""
    return _read(path, _conversation_of, strict)


def read_chats(path: str | Path, *, strict: bool = False) -> tuple[list[Chat], ReadReport]:
    """Reads regenerated chats, as `dflash_jax.data.regenerate` writes them. Arguments and errors as `read_prompts`."""
    return _read(path, _chat_of, strict)


def check_messages(messages: Any) -> None:
    """Checks that messages are: a system message or none, then user and assistant in turn, all with text.

    Raises:
      RowError: says what is wrong.
    """
    if not isinstance(messages, list):
        raise RowError('"messages" is not a list')
    if not messages:
        raise RowError('"messages" is empty')
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise RowError(f"messages[{i}] has no role")
        if message["role"] not in ("system", "user", "assistant"):
            raise RowError(f"messages[{i}] has role {message['role'][:40]!r}; allowed are system, user, assistant")
        if not isinstance(message.get("content"), str) or not message["content"].strip():
            raise RowError(f"messages[{i}] has no text content")
    roles = [message["role"] for message in messages]
    first = int(roles[0] == "system")
    if first == len(roles):
        raise RowError("there is nothing but a system message")
    for i in range(first, len(roles)):
        expected = ("user", "assistant")[(i - first) % 2]
        if roles[i] != expected:
            raise RowError(f"messages[{i}] has role {roles[i]!r} where {expected!r} is due")


def _prompt_of(row: dict, line: int, name: str) -> Conversation:
    messages: Any = row.get("messages")
    check_messages(messages)
    if messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    return Conversation(line, name, row.get("split"), messages)


def _conversation_of(row: dict, line: int, name: str) -> Conversation:
    messages: Any = row.get("messages")
    check_messages(messages)
    if messages[-1]["role"] != "assistant":
        raise RowError("the last message is not the assistant's")
    return Conversation(line, name, row.get("split"), messages)


def _chat_of(row: dict, line: int, name: str) -> Chat:
    conversation = _conversation_of(row, line, name)
    for key in ("prompt_ids", "answer_ids"):
        ids = row.get(key)
        if not isinstance(ids, list) or not ids or not all(type(i) is int and 0 <= i < 2**31 for i in ids):
            raise RowError(f'"{key}" is not a list of token ids')
    if row.get("finish_reason") not in ("stop", "length"):
        raise RowError('"finish_reason" is neither "stop" nor "length"')
    return Chat(
        line=line,
        id=name,
        split=conversation.split,
        messages=conversation.messages,
        prompt_ids=row["prompt_ids"],
        answer_ids=row["answer_ids"],
        finish_reason=row["finish_reason"],
    )


def _read(
    path: str | Path, parse: Callable[[dict, int, str], T], strict: bool, limit: int | None = None
) -> tuple[list[T], ReadReport]:
    report = ReadReport(source=str(path))
    kept: list[T] = []
    names: set[str] = set()
    for line, raw in itertools.islice(read_lines(path), limit):
        report.rows_in += 1
        name = None
        try:
            row = _row_of(raw)
            name = _name_of(row, line)
            if name in names:
                raise RowError("its id occurs twice")
            kept.append(parse(row, line, name))
            names.add(name)
        except RowError as error:
            report.skipped.append(SkippedRow(line, name, str(error)))
    report.rows_out = len(kept)
    if strict and report.skipped:
        raise BadRowsError(f"{len(report.skipped)} bad rows and strict reading was asked for\n{report.table()}")
    return kept, report


def _row_of(raw: bytes) -> dict:
    try:
        row = json.loads(raw)
    except UnicodeDecodeError as error:
        raise RowError("not UTF-8 text") from error
    except (ValueError, RecursionError) as error:
        raise RowError("broken JSON") from error
    if not isinstance(row, dict):
        raise RowError(f'a {type(row).__name__} and not an object with "messages"')
    return row


def _name_of(row: dict, line: int) -> str:
    name = row.get("id", f"line-{line}")
    if not isinstance(name, str | int):
        raise RowError('"id" is neither text nor a number')
    if not isinstance(row.get("split", ""), str):
        raise RowError('"split" is not text')
    return str(name)


def read_lines(path: str | Path) -> Iterator[tuple[int, bytes]]:
    """Yields (line number from 1, line) of a .jsonl or .jsonl.gz file, blank lines left out.

    Raises:
      ValueError: the file is missing, of another kind, or a gzip file that is cut short or damaged.
    """
    path = Path(path)
    if not path.name.endswith((".jsonl", ".jsonl.gz")):
        raise ValueError(f"{path} is not a .jsonl or .jsonl.gz file")
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            for line, raw in enumerate(file, start=1):
                if raw.strip():
                    yield line, raw
    except (EOFError, gzip.BadGzipFile, OSError, zlib.error) as error:
        raise ValueError(f"{path} can't be read to its end: {error}") from error

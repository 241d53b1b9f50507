"""Files of rows: JSON lines, JSON arrays and Parquet, plain or compressed by gzip or Zstandard, one row at a time.

Rows are numbered from 1: in JSON lines by line, so that an editor finds them, in the other kinds by place. Parquet and
Zstandard are read by pyarrow.
"""

import contextlib
import gzip
import io
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow
import pyarrow.parquet

KINDS = (".jsonl", ".json", ".parquet")
COMPRESSIONS = (".gz", ".zst")
_PARQUET_ROWS = 256  # decoded at a time; a row of a long-context set may hold a megabyte

# What reading raises when the bytes of a file are damaged, cut short, or of another kind than its name says.
_DAMAGE = (EOFError, OSError, zlib.error, UnicodeDecodeError, pyarrow.ArrowException)


def kind_of(path: str | Path) -> tuple[str, str]:
    """(kind, compression) of a file by its name, such as (".jsonl", ".gz"); the compression may be "".

    Raises:
      ValueError: the name says none of the kinds.
    """
    suffixes = Path(path).suffixes
    compression = suffixes.pop() if suffixes and suffixes[-1] in COMPRESSIONS else ""
    if not suffixes or suffixes[-1] not in KINDS:
        raise ValueError(
            f"{path} is not a {', '.join(KINDS)} file, plain or with {' or '.join(COMPRESSIONS)} behind it"
        )
    return suffixes[-1], compression


def read_rows(path: str | Path) -> Iterator[tuple[int, Any]]:
    """Yields (row number from 1, row); of JSON lines the bytes of the line, which may not parse, else a Python object.

    Blank lines are no rows. A file that ends in .json and holds JSON lines is read as such: many sets are named so.

    Raises:
      ValueError: the file is missing, of another kind, cut short or damaged.
    """
    path = Path(path)
    kind, compression = kind_of(path)
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    try:
        with contextlib.closing(_open(path, compression)) as file:
            if kind == ".parquet":
                yield from _parquet_rows(file)
            elif kind == ".json" and _next_character(file) == b"[":
                yield from _array_rows(io.TextIOWrapper(file, "utf-8"))
            else:
                yield from ((line, raw) for line, raw in enumerate(file, start=1) if raw.strip())
    except _DAMAGE as error:
        raise ValueError(f"{path} can't be read to its end: {error}") from error


def _open(path: Path, compression: str) -> BinaryIO:
    if compression == ".gz":
        return io.BufferedReader(gzip.open(path))  # type: ignore[arg-type]
    if compression == ".zst":
        return io.BufferedReader(pyarrow.CompressedInputStream(pyarrow.OSFile(str(path)), "zstd"))  # type: ignore[arg-type]
    return path.open("rb")


def _next_character(file: BinaryIO) -> bytes:
    """The first character that is not white space, with the file left where it was, or after white space."""
    while (ahead := file.peek(1)[:1]).isspace():  # type: ignore[attr-defined]
        file.read(1)
    return ahead


def _parquet_rows(file: BinaryIO) -> Iterator[tuple[int, Any]]:
    whole = file if file.seekable() and not isinstance(file, io.BufferedReader) else pyarrow.BufferReader(file.read())
    row = 0
    for batch in pyarrow.parquet.ParquetFile(whole).iter_batches(_PARQUET_ROWS):
        for values in batch.to_pylist():
            row += 1
            yield row, values


def _array_rows(file: io.TextIOWrapper) -> Iterator[tuple[int, Any]]:
    """The elements of a JSON array, decoded one by one: the text is in memory, the objects are not."""
    text = file.read()
    decoder = json.JSONDecoder()
    place, row = _skip_space(text, text.index("[") + 1), 0
    if text[place : place + 1] == "]":
        return
    while True:
        try:
            value, place = decoder.raw_decode(text, place)
        except (ValueError, RecursionError) as error:
            raise OSError(f"broken JSON in the array after row {row}") from error
        row += 1
        yield row, value
        place = _skip_space(text, place)
        if text[place : place + 1] == "]":
            return
        if text[place : place + 1] != ",":
            raise OSError(f"broken JSON in the array after row {row}")
        place = _skip_space(text, place + 1)


def _skip_space(text: str, place: int) -> int:
    while text[place : place + 1] in (" ", "\n", "\r", "\t"):
        place += 1
    return place

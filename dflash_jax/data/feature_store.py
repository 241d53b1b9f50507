"""Features of a set's rows on disk: safetensors shards, and a schema that says what they are of.

A folder holds schema.json and, for each split, SPLIT-00000-of-00012.safetensors and so on. A shard holds some rows, one
behind the other and without padding: "taps" [tokens, M, D] and, where the schema says so, "hidden" [tokens, D], the
final hidden states; "rows" int32 [R], their places in the set; "lengths" int32 [R], their tokens. Shards appear whole
or not at all. Each carries a hash of the schema, its place and its rows: a file of other features, or in another's
place, is known by its header. The features themselves are not hashed, which would mean to read all of them.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import secrets
import shutil
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  numpy then knows bfloat16
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from dflash_jax.config_types import typed
from dflash_jax.data.answer_log import check_same_settings

SCHEMA = "schema.json"
_KIND = "dflash_jax features 2"
_HEADER_BYTES = 450  # of a shard, about
_MADE_FOR = "made_for"  # where the header of a shard has its hash
_DTYPES = {"float32": "F32", "bfloat16": "BF16", "int32": "I32"}  # as safetensors calls them
_UNFINISHED = ".tmp"
_AGAIN = "delete it and run the command that wrote it again"
_DESCRIPTIVE = ("target", "source")  # names, which may change without changing what is named


@dataclasses.dataclass(frozen=True)
class SplitSchema:
    """The first `rows` rows of a split. source: the file or set. rows_sha256: of all its rows, see rows_fingerprint."""

    source: str
    rows_sha256: str
    rows: int
    tokens: int
    shards: int


@dataclasses.dataclass(frozen=True)
class FeatureSchema:
    """What decides the features of a folder.

    target_fingerprint, tokenizer_sha256: as in the provenance of a prepared set. tables_sha256: of the target's
    embedding and head, which tell it when its other weights are gone. layers: the tapped ones. hidden: whether final
    hidden states are there too. pass_rows, length_buckets: rows that ran together, and their padded lengths, on which
    the last bits depend.
    """

    target: str
    target_fingerprint: str
    tokenizer_sha256: str | None
    tables_sha256: str
    layers: tuple[int, ...]
    hidden: bool
    hidden_size: int
    dtype: str
    pass_rows: int
    length_buckets: tuple[int, ...]
    scan_layers: bool
    shard_bytes: int
    splits: Mapping[str, SplitSchema]

    @property
    def token_bytes(self) -> int:
        """Bytes that the features of a token take."""
        return (len(self.layers) + self.hidden) * self.hidden_size * np.dtype(self.dtype).itemsize


def plan_shards(lengths: Sequence[int], *, token_bytes: int, pass_rows: int, shard_bytes: int) -> list[list[int]]:
    """The rows of each shard, shortest rows first, so that every pass_rows of them run together with little padding.

    A shard ends with the pass that brings it to shard_bytes or more.
    """
    by_length = np.argsort(lengths, kind="stable").tolist()
    shards: list[list[int]] = []
    size = shard_bytes
    for first in range(0, len(by_length), pass_rows):
        if size >= shard_bytes:
            shards.append([])
            size = 0
        together = by_length[first : first + pass_rows]
        shards[-1] += together
        size += token_bytes * sum(lengths[row] for row in together)
    return shards


def stored_bytes(token_bytes: int, lengths: Sequence[int]) -> int:
    """Bytes of a shard with rows of these lengths."""
    return token_bytes * sum(lengths) + 2 * np.dtype(np.int32).itemsize * len(lengths) + _HEADER_BYTES


def shard_path(folder: str | Path, split: str, index: int, count: int) -> Path:
    """Where a shard lies once it is whole."""
    return Path(folder) / f"{split}-{index:05}-of-{count:05}.safetensors"


def tensors_of(schema: FeatureSchema, rows: int, tokens: int) -> dict[str, tuple[tuple[int, ...], str]]:
    """(shape, dtype) of what a shard of so many rows and tokens holds, by name."""
    tensors: dict[str, tuple[tuple[int, ...], str]] = {"rows": ((rows,), "int32"), "lengths": ((rows,), "int32")}
    tensors["taps"] = (tokens, len(schema.layers), schema.hidden_size), schema.dtype
    if schema.hidden:
        tensors["hidden"] = (tokens, schema.hidden_size), schema.dtype
    return tensors


def write_shard(
    folder: str | Path, schema: FeatureSchema, split: str, index: int, tensors: Mapping[str, np.ndarray]
) -> None:
    """Writes C-contiguous tensors, those of `tensors_of`, to a file that appears when they are on disk."""
    path = shard_path(folder, split, index, schema.splits[split].shards)
    # A name of its own: a process that is about to be ended for another's death may still write the same shard.
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}{_UNFINISHED}")
    made_for = _shard_hash(schema, split, index, tensors["rows"], tensors["lengths"])
    save_file(dict(tensors), temporary, metadata={_MADE_FOR: made_for})
    shutil.copymode(path.parent / SCHEMA, temporary)  # safetensors makes files that only their owner may read
    _to_disk(temporary)
    temporary.replace(path)


def read_index(folder: str | Path, schema: FeatureSchema, split: str, index: int) -> tuple[np.ndarray, np.ndarray]:
    """The rows of a shard and their lengths, int32 [R] each. Of the features only the header is read.

    Raises:
      ValueError: the file is cut short, of other features, in the place of another shard, or its tensors are not those
        that the schema describes; the message names it.
    """
    path = shard_path(folder, split, index, schema.splits[split].shards)
    with _opened(path) as shard:
        rows, lengths = shard.get_tensor("rows"), shard.get_tensor("lengths")
        slices = {name: shard.get_slice(name) for name in shard.keys()}  # noqa: SIM118  it is no mapping
        found = {name: (tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}
        made_for = (shard.metadata() or {}).get(_MADE_FOR)
    if made_for != _shard_hash(schema, split, index, rows, lengths):
        raise ValueError(f"{path} is of other features than {SCHEMA} beside it, or not in its place; {_AGAIN}")
    tensors = tensors_of(schema, len(rows), int(lengths.sum()))
    expected = {name: (shape, _DTYPES[dtype]) for name, (shape, dtype) in tensors.items()}
    if found != expected:
        raise ValueError(f"{path} holds {found}, and {SCHEMA} beside it describes {expected}; {_AGAIN}")
    return rows, lengths


def remove_unfinished(folder: Path) -> None:
    """Deletes what killed processes left of shards."""
    for path in folder.glob(f"*{_UNFINISHED}"):
        path.unlink(missing_ok=True)


def check_schema(folder: Path, schema: FeatureSchema) -> bool:
    """Whether features were begun in the folder.

    Raises:
      ValueError: yes, and others than `schema` describes; the message names what differs. Or there are shards, and
        nothing says what they are of.
    """
    if not (folder / SCHEMA).exists():
        if orphans := sorted(path.name for path in folder.glob("*-of-*.safetensors")):
            raise ValueError(
                f"{folder} holds {orphans[0]} without {SCHEMA}; delete the folder, or choose another --out"
            )
        return False
    check_same_settings(_settings(read_schema(folder)), _settings(schema), f"{folder} was begun")
    return True


def write_schema(folder: Path, schema: FeatureSchema) -> None:
    """Begins features in a folder."""
    temporary = folder / f"{SCHEMA}.tmp"
    temporary.write_text(json.dumps({"kind": _KIND, **dataclasses.asdict(schema)}, indent=2) + "\n", encoding="utf-8")
    _to_disk(temporary)
    temporary.replace(folder / SCHEMA)


def read_schema(folder: str | Path) -> FeatureSchema:
    """What the features of a folder are of.

    Raises:
      ValueError: it holds none.
    """
    path = Path(folder) / SCHEMA
    if not path.is_file():
        raise ValueError(f"{folder} holds no features; make them with python -m dflash_jax.data.features")
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if (kind := content.pop("kind")) != _KIND:
            raise ValueError(f"{kind!r} is not {_KIND!r}")
        splits = {name: _typed_fields(SplitSchema, part) for name, part in content.pop("splits").items()}
        schema = _typed_fields(FeatureSchema, content, splits=splits)
        if schema.dtype not in _DTYPES:
            raise ValueError(f"dtype={schema.dtype!r}")
        return schema
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} does not describe features that this version can read ({error})") from error


def _typed_fields(kind: type, content: Mapping[str, Any], **others: Any) -> Any:
    """A dataclass of JSON values, whose types are checked; TypeError or KeyError name what is wrong."""
    hints, values = typing.get_type_hints(kind), dict(others)
    for name, value in content.items():
        try:
            values[name] = typed(value, hints[name])
        except TypeError as error:
            raise TypeError(f"{name}={value!r}") from error
    return kind(**values)


class StoredSplit:
    """The features of a split's rows, each read from its shard when it is asked for.

    schema: of the folder.
    """

    def __init__(self, folder: str | Path, split: str):
        """Finds out where each row lies.

        Raises:
          ValueError: there are no features in the folder, none of this split, not all of them, or a shard is broken.
        """
        self.schema = read_schema(folder)
        if split not in self.schema.splits:
            raise ValueError(f"{folder} has no features of {split} rows; there are {', '.join(self.schema.splits)}")
        part = self.schema.splits[split]
        self._paths = [shard_path(folder, split, index, part.shards) for index in range(part.shards)]
        missing = [path.name for path in self._paths if not path.exists()]
        if missing:
            raise ValueError(
                f"{folder} lacks {len(missing)} of {part.shards} shards of {split} rows ({missing[0]} …); the command "
                "that wrote the others goes on where it stopped"
            )
        self._shard_of = np.full(part.rows, -1)
        self._first, self._lengths = np.zeros(part.rows, np.int64), np.zeros(part.rows, np.int64)
        for index in range(part.shards):
            rows, lengths = read_index(folder, self.schema, split, index)
            self._shard_of[rows], self._lengths[rows] = index, lengths
            self._first[rows] = np.cumsum(lengths) - lengths
        if (self._shard_of < 0).any():
            raise ValueError(f"{folder}: the shards of {split} rows lack row {int(np.argmin(self._shard_of))}")

    def read(self, name: str, row: int) -> np.ndarray:
        """ "taps" [T, M, D] or "hidden" [T, D] of the row at this place of the set, in the stored dtype."""
        first = int(self._first[row])
        with _opened(self._paths[self._shard_of[row]]) as shard:
            return shard.get_slice(name)[first : first + int(self._lengths[row])]


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="numpy") as shard:
            yield shard
    except SafetensorError as error:
        raise ValueError(f"{path} is broken ({error}); {_AGAIN}") from error
    except OSError as error:
        raise ValueError(f"{path} can't be read ({error})") from error


def _shard_hash(schema: FeatureSchema, split: str, index: int, rows: np.ndarray, lengths: np.ndarray) -> str:
    """Tells a shard from those of other features, and from the others of its own."""
    place = json.dumps([_settings(schema), split, index], sort_keys=True)
    return hashlib.sha256(place.encode() + b"\0" + rows.tobytes() + lengths.tobytes()).hexdigest()


def _settings(schema: FeatureSchema) -> dict[str, Any]:
    """What two schemas are compared by, a name for each setting."""
    fields = dataclasses.asdict(schema)
    splits = fields.pop("splits")
    fields |= {f"{split}.{name}": value for split, part in splits.items() for name, value in part.items()}
    named = {name: value for name, value in fields.items() if name.rpartition(".")[2] not in _DESCRIPTIVE}
    return json.loads(json.dumps(named))


def _to_disk(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())

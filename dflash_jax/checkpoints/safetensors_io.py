"""Safetensors files: reading a folder tensor by tensor, writing one file, and an independent check of what was written.

Nothing here is ever unpickled: folders that hold only .bin weights are refused.
"""

import hashlib
import json
import math
import os
import struct
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

DTYPES = {"F32": np.dtype(np.float32), "BF16": np.dtype(ml_dtypes.bfloat16), "F16": np.dtype(np.float16)}
# of tensors that are no weights, such as the tables of a draft vocabulary
_INDEX_DTYPES = {"I64": np.dtype(np.int64), "I32": np.dtype(np.int32), "BOOL": np.dtype(np.bool_)}
_HASHED_BLOCKS, _HASHED_BLOCK_BYTES = 256, 4096


class CheckpointError(ValueError):
    """A checkpoint that can't be read or written as asked."""


class TensorFolder:
    """The tensors of a folder, single file or sharded, read one by one. Use as a context manager.

    A shard is opened when the first of its tensors is read, so shards that nothing needs are never touched.

    Raises:
        CheckpointError: no safetensors weights, a broken index, or a shard name that leaves the folder.
    """

    def __init__(self, folder: str | os.PathLike):
        self.folder = Path(folder)
        self._stack = ExitStack()
        self._open = {}
        self._file_of = self._locate()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error) -> None:
        self._stack.close()
        self._open.clear()

    @property
    def names(self) -> frozenset[str]:
        """All tensor names, as listed by the index or by the single file."""
        return frozenset(self._file_of)

    def has(self, name: str) -> bool:
        """Whether a tensor is listed and the file that should hold it exists."""
        return name in self._file_of and (self.folder / self._file_of[name]).is_file()

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape in the file, without reading the tensor."""
        return tuple(self._slice(name).get_shape())

    def read(self, name: str, index: tuple[slice, ...] = ()) -> np.ndarray:
        """One tensor, or the part of it at `index`, as a numpy array (float32, bfloat16 or float16).

        Raises:
            CheckpointError: the dtype is none of these, as in quantised checkpoints.
        """
        dtype = self._slice(name).get_dtype()
        if dtype not in DTYPES:
            raise CheckpointError(
                f"tensor {name!r} in {self.folder} has dtype {dtype}; supported are {', '.join(DTYPES)}, "
                "not quantised weights"
            )
        return self._slice(name)[index] if index else self._handle(name).get_tensor(name)

    def read_indices(self, name: str) -> np.ndarray:
        """One tensor of integers, or of truth values.

        Raises:
            CheckpointError: it is of another dtype.
        """
        dtype = self._slice(name).get_dtype()
        if dtype not in _INDEX_DTYPES:
            raise CheckpointError(f"tensor {name!r} in {self.folder} has dtype {dtype}, not {', '.join(_INDEX_DTYPES)}")
        return self._handle(name).get_tensor(name)

    def _locate(self) -> dict[str, str]:
        if (self.folder / SINGLE_FILE).exists():
            self._file_of = {}
            return dict.fromkeys(self._open_file(SINGLE_FILE).keys(), SINGLE_FILE)
        if (self.folder / INDEX_FILE).exists():
            return read_index(self.folder / INDEX_FILE)
        pickled = sorted(path.name for path in self.folder.glob("*.bin"))
        reason = f"; {', '.join(pickled)} is pickled, which is never read: convert it to safetensors" if pickled else ""
        raise CheckpointError(f"{self.folder} has neither {SINGLE_FILE} nor {INDEX_FILE}{reason}")

    def _open_file(self, file_name: str):
        if file_name not in self._open:
            path = self.folder / file_name
            if not path.is_file():
                raise CheckpointError(f"{self.folder} lacks the shard {file_name} that {INDEX_FILE} names")
            try:
                self._open[file_name] = self._stack.enter_context(safe_open(path, framework="numpy"))
            except SafetensorError as error:
                raise CheckpointError(f"{path} is not a readable safetensors file: {error}{_hint(path)}") from error
        return self._open[file_name]

    def _handle(self, name: str):
        return self._open_file(self._file_of[name])

    def _slice(self, name: str):
        try:
            return self._handle(name).get_slice(name)
        except SafetensorError as error:
            raise CheckpointError(
                f"{self.folder / self._file_of[name]} doesn't hold tensor {name!r}, which {INDEX_FILE} places there"
            ) from error


def _hint(path: Path) -> str:
    """What a file that is none may be."""
    with path.open("rb") as file:
        pointer = file.read(40).startswith(b"version https://git-lfs")
    return "; it is a pointer of Git LFS: fetch the file itself (git lfs pull)" if pointer else "; was it cut short?"


def read_index(path: Path) -> dict[str, str]:
    """Tensor name → shard file name, from a model.safetensors.index.json.

    Raises:
        CheckpointError: not such an index, or a shard name that is not a plain .safetensors file name.
    """
    index = read_json(path)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path} has no weight_map from tensor names to shards")
    for shard in weight_map.values():
        # judged by name, not by resolving: hub caches hold the shards themselves as links to another folder
        if not isinstance(shard, str) or "/" in shard or "\\" in shard or not shard.endswith(".safetensors"):
            raise CheckpointError(f"{path} names the shard {shard!r}; a shard must be a .safetensors file beside it")
    return weight_map


def read_json(path: Path) -> dict:
    """A JSON object from a file.

    Raises:
        CheckpointError: the file is absent, is not JSON, or holds something else than an object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent} has no {path.name}") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must hold a JSON object, got {type(content).__name__}")
    return content


def write_safetensors(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Writes tensors to one file and reads it back to be sure.

    Raises:
        CheckpointError: what is in the file is not what was to be written.
    """
    # safetensors 0.8.0 writes the memory of a strided array in its order in memory, without an error
    contiguous = {name: np.ascontiguousarray(tensor).reshape(np.shape(tensor)) for name, tensor in tensors.items()}
    save_file(contiguous, path, metadata={"format": "pt"})
    check_written(path, tensors)


def check_written(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Compares a file, as read by `read_independently`, with the tensors that it should hold, bit by bit.

    Raises:
        CheckpointError: a name, shape, dtype or value differs.
    """
    left = dict(tensors)
    for name, written in read_independently(path):
        if name not in left:
            raise CheckpointError(f"{path} holds a tensor {name!r} that was not to be written, or holds it twice")
        wanted = left.pop(name)
        if written.dtype != wanted.dtype or written.shape != wanted.shape or written.tobytes() != wanted.tobytes():
            raise CheckpointError(
                f"{path}: tensor {name!r} reads back different from what was written; the file is bad"
            )
    if left:
        raise CheckpointError(f"{path} lacks {sorted(left)}, which were to be written")


def read_independently(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (name, array) of a file by the format's definition alone, without the safetensors library.

    The format: 8 bytes of little-endian header length, a JSON header with dtype, shape and byte offsets of each tensor
    relative to the header's end, then the row-major data without gaps.

    Raises:
        CheckpointError: the offsets leave the file, leave gaps, or don't fit dtype and shape.
    """
    with open(path, "rb") as file:
        (header_length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(header_length))
        header.pop("__metadata__", None)
        position = 0
        for name, info in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            begin, end = info["data_offsets"]
            dtype, shape = (DTYPES | _INDEX_DTYPES).get(info["dtype"]), tuple(info["shape"])
            if dtype is None or begin != position or end - begin != math.prod(shape) * dtype.itemsize:
                raise CheckpointError(f"{path}: the header entry of {name!r} is inconsistent: {info}")
            data = file.read(end - begin)
            if len(data) != end - begin:
                raise CheckpointError(f"{path} ends inside tensor {name!r}")
            position = end
            yield name, np.frombuffer(data, dtype).reshape(shape)
        if file.read(1):
            raise CheckpointError(f"{path} has data past its last tensor")


def fingerprint(folder: Path) -> str:
    """A short hash that tells checkpoints apart without reading them whole.

    It covers config.json, the size of every weight file, and blocks spread evenly over it (the header included; small
    files entirely).
    """
    digest = hashlib.sha256()
    for path in [folder / "config.json", *sorted(folder.glob("*.safetensors"))]:
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        with open(path, "rb") as file:
            if size <= _HASHED_BLOCKS * _HASHED_BLOCK_BYTES:
                digest.update(file.read())
                continue
            for block in range(_HASHED_BLOCKS):
                file.seek((size - _HASHED_BLOCK_BYTES) * block // (_HASHED_BLOCKS - 1))
                digest.update(file.read(_HASHED_BLOCK_BYTES))
    return digest.hexdigest()[:16]

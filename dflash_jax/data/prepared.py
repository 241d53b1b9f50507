"""Prepared sets: training rows in ArrayRecord files, written and described by tensorflow-datasets, without TensorFlow.

The stock writer of tensorflow-datasets holds a set in memory and beyond a gigabyte asks for TensorFlow. Rows keep
their order here, so they are streamed to their shards instead; reading is entirely that of tensorflow-datasets:
`tfds.builder_from_directory(folder).as_data_source("train")`.
"""

import array
import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow_datasets as tfds
from array_record.python import array_record_module  # type: ignore[attr-defined]
from tensorflow_datasets.core import dataset_builder
from tensorflow_datasets.core import splits as tfds_splits
from tensorflow_datasets.proto import tf_example_pb2

from dflash_jax.data.locks import only_writer
from dflash_jax.data.rows import TrainingRow

NAME, VERSION = "prepared_chats", "1.0.0"
SHARD_BYTES = 256 << 20


@dataclasses.dataclass(frozen=True)
class PreparedRow:
    """A training row, the split it belongs to, and where it came from: the file's name and the row in it, from 1."""

    row: TrainingRow
    split: str
    file: str
    line: int


class PreparedChats(dataset_builder.FileReaderBuilder):
    """The builder. `download_and_prepare` writes what an iterator yields; a folder appears whole or not at all."""

    name = NAME
    VERSION = tfds.core.Version(VERSION)

    def __init__(self, *, data_dir: str | Path, rows: Iterable[PreparedRow], provenance: Mapping[str, Any]):
        """Describes a set in `data_dir`/prepared_chats/1.0.0, to be made of `rows`, with its provenance beside it."""
        self._rows = rows
        self._provenance = tfds.core.MetadataDict(provenance)
        super().__init__(data_dir=os.fspath(data_dir), file_format="array_record")

    def _info(self) -> tfds.core.DatasetInfo:
        def tokens(dtype: type) -> tfds.features.Tensor:
            # As bytes: a list of integers takes ten times as long to write and to read.
            return tfds.features.Tensor(shape=(None,), dtype=dtype, encoding=tfds.features.Encoding.BYTES)

        features = {
            "ids": tokens(np.int32),
            "mask": tokens(np.bool_),
            "id": tfds.features.Text(),
            "file": tfds.features.Text(),
            "line": tfds.features.Scalar(np.int64),
        }
        return tfds.core.DatasetInfo(
            builder=self,
            description="Chats rendered for one target: token ids, and a mask of those that the target writes.",
            features=tfds.features.FeaturesDict(features),
            disable_shuffling=True,
            metadata=self._provenance,
        )

    def _make_download_manager(self, *_: Any, **__: Any) -> Any:
        return types.SimpleNamespace(downloaded_size=0)  # nothing is downloaded, so nothing looks for check sums

    def _log_download_bytes(self) -> None:
        pass  # the command has its own report

    def _log_download_done(self) -> None:
        pass

    def _download_and_prepare(self, dl_manager: Any, download_config: Any = None) -> None:
        del dl_manager, download_config  # there is nothing to download, and no setting applies
        with contextlib.ExitStack() as stack:
            writers: dict[str, _SplitWriter] = {}
            for prepared in self._rows:
                if prepared.split not in writers:
                    writers[prepared.split] = stack.enter_context(_SplitWriter(self.data_path, prepared.split))
                writers[prepared.split].write(record_of(prepared), prepared.row)
        if not writers:
            raise ValueError("there is no row to write")
        infos = [writers[name].finish(self._get_filename_template(name)) for name in sorted(writers)]
        self.info.set_splits(tfds_splits.SplitDict(infos))
        self._provenance["rows_sha256"] = {name: writers[name].digest.hexdigest() for name in sorted(writers)}


def record_of(prepared: PreparedRow) -> bytes:
    """A row as tensorflow-datasets stores it, sooner: its own serialiser checks and converts every value."""
    row = prepared.row
    texts = {"ids": row.tokens.tobytes(), "mask": row.loss_mask.tobytes()}
    texts |= {"id": row.id.encode(), "file": prepared.file.encode()}
    proto: Any = tf_example_pb2  # its classes are made at run time, which type checkers don't see
    example = proto.Example()
    features = example.features.feature
    for name, text in texts.items():
        features[name].bytes_list.value.append(text)
    features["line"].int64_list.value.append(prepared.line)
    return example.SerializeToString(deterministic=True)  # else fields stand in another order in every process


class _SplitWriter:
    """Writes one split to shards of about SHARD_BYTES, in order, with the lengths of its rows."""

    def __init__(self, folder: Any, split: str):
        self._folder, self._split = Path(folder), split
        self._writer: Any = None
        self._shard_bytes: list[int] = []
        self._shard_rows: list[int] = []
        self._lengths = array.array("l")
        self.digest = hashlib.sha256()

    def __enter__(self) -> "_SplitWriter":
        return self

    def __exit__(self, *exception: object) -> None:
        self._close()

    def write(self, record: bytes, row: TrainingRow) -> None:
        if self._writer is None:
            # A group of one row is what makes reading any row cheap. More encoders have nothing to share out then.
            path, options = self._part(len(self._shard_rows)), "group_size:1,max_parallelism:1"
            self._writer = array_record_module.ArrayRecordWriter(str(path), options)
            self._shard_bytes.append(0)
            self._shard_rows.append(0)
        self._writer.write(record)
        self._shard_bytes[-1] += len(record)
        self._shard_rows[-1] += 1
        self._lengths.append(len(row.tokens))
        self.digest.update(row_bytes(row))
        if self._shard_bytes[-1] >= SHARD_BYTES:
            self._close()

    def finish(self, template: Any) -> tfds_splits.SplitInfo:
        """Gives the shards their final names, which say how many there are."""
        for shard in range(len(self._shard_rows)):
            final = template.sharded_filepath(shard_index=shard, num_shards=len(self._shard_rows))
            self._part(shard).replace(os.fspath(final))
        np.save(lengths_path(self._folder, self._split), np.asarray(self._lengths, np.int32))
        return tfds_splits.SplitInfo(
            name=self._split,
            shard_lengths=self._shard_rows,
            num_bytes=sum(self._shard_bytes),
            filename_template=template,
        )

    def _part(self, shard: int) -> Path:
        return self._folder / f"{self._split}.part-{shard:05}"

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class PreparedSplit(Sequence[TrainingRow]):
    """The rows of one split, read when they are asked for. Can be sent to other processes.

    lengths: of all rows, int32, known without reading them.
    """

    def __init__(self, folder: str | Path, split: str):
        """Opens a split of a prepared set.

        Args:
          folder: what was given as --out, or the folder in it that holds dataset_info.json.
          split: such as "train".

        Raises:
          ValueError: the folder holds no prepared set, or no such split.
        """
        self.folder, self.split = find_folder(folder), split
        builder = tfds.builder_from_directory(self.folder)
        if split not in builder.info.splits:
            raise ValueError(f"{folder} has no split {split!r}; there are {', '.join(builder.info.splits)}")
        self.provenance = read_provenance(folder)
        self.lengths: np.ndarray = np.load(lengths_path(self.folder, split))
        self._source: Any = builder.as_data_source(split)  # pyright: ignore[reportCallIssue]

    @property
    def sha256(self) -> str:
        """Tells rows apart, by tokens, masks and order."""
        return self.provenance["rows_sha256"][self.split]

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[TrainingRow]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        record = self._source[range(len(self))[index]]
        return TrainingRow(record["id"].decode(), record["ids"], record["mask"])

    def origin(self, index: int) -> tuple[str, int]:
        """(file name, row in it from 1) that a row was made of."""
        record = self._source[index]
        return record["file"].decode(), int(record["line"])


def write_prepared(out: str | Path, rows: Iterable[PreparedRow], provenance: dict[str, Any]) -> Path:
    """Writes a prepared set; killed in between, it leaves no set.

    Args:
      out: folder to write into.
      rows: consumed as they are written.
      provenance: JSON-able; recorded with a hash of the rows in it.

    Returns:
      The folder that holds dataset_info.json.

    Raises:
      ValueError: there is a set already, another process is writing one, or there is no row.
    """
    with only_writer(out):
        if is_prepared(out):
            raise ValueError(f"{out} already holds a prepared set; delete it, or choose another --out")
        for leftover in (Path(out) / NAME).glob("incomplete.*"):  # of a run that was killed
            shutil.rmtree(leftover)
        builder = PreparedChats(data_dir=out, rows=rows, provenance=provenance)
        builder.download_and_prepare()
    return Path(builder.data_dir)


def is_prepared(folder: str | Path) -> bool:
    """Whether a folder holds a prepared set."""
    return any((path / "dataset_info.json").is_file() for path in _places(folder))


def find_folder(folder: str | Path) -> Path:
    """The folder with dataset_info.json, which may be `folder` itself.

    Raises:
      ValueError: there is none.
    """
    for path in _places(folder):
        if (path / "dataset_info.json").is_file():
            return path
    raise ValueError(f"{folder} holds no prepared set; make one with python -m dflash_jax.data.prepare")


def read_provenance(folder: str | Path) -> dict[str, Any]:
    """What a prepared set was made of and for.

    Raises:
      ValueError: the folder holds no prepared set.
    """
    return json.loads((find_folder(folder) / "metadata.json").read_text())


def lengths_path(folder: str | Path, split: str) -> Path:
    """Where the lengths of a split's rows are kept."""
    return Path(folder) / f"lengths-{split}.npy"


def row_bytes(row: TrainingRow) -> bytes:
    """What a hash of rows is computed from."""
    return np.int64(len(row.tokens)).tobytes() + row.tokens.tobytes() + row.loss_mask.tobytes()


def _places(folder: str | Path) -> tuple[Path, Path]:
    return Path(folder), Path(folder) / NAME / VERSION

"""One writer of an output at a time, whatever is written, and one message for the second."""

import errno
import fcntl
import os
from pathlib import Path

import numpy as np
import pytest

from dflash_jax.data.answer_log import AnswerLog
from dflash_jax.data.locks import only_writer, take_lock
from dflash_jax.data.prepared import PreparedRow, is_prepared, write_prepared
from dflash_jax.data.rows import TrainingRow


def log_answers(out: Path) -> None:
    AnswerLog(out / "chats.part", {}).__exit__()


def write_set(out: Path) -> None:
    row = TrainingRow("a", np.arange(5, dtype=np.int32), np.arange(5) > 2)
    write_prepared(out, [PreparedRow(row, "train", "a", 1)], {})


def begin_features(out: Path) -> None:
    with only_writer(out):
        pass


# What writes, the file that it locks, and what it names.
WRITERS = [(log_answers, "chats.part", "/chats.part"), (write_set, ".lock", ""), (begin_features, ".lock", "")]


@pytest.mark.parametrize(("write", "locked", "named"), WRITERS)
def test_a_second_writer_is_refused_while_the_first_is_there(tmp_path, write, locked, named):
    with (tmp_path / locked).open("ab") as file:
        take_lock(file, "")
        with pytest.raises(ValueError, match=f"{tmp_path}{named} is in use by another process; wait .* another --out"):
            write(tmp_path)
        assert not is_prepared(tmp_path)
    write(tmp_path)
    if write is not write_set:  # which is not made twice
        write(tmp_path)


@pytest.mark.parametrize(("write", "locked", "named"), WRITERS)
def test_a_disk_without_locks_is_named(tmp_path, monkeypatch, write, locked, named):
    def refuse(file, how):
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(ValueError, match=rf"{tmp_path}{named} can't be locked \(.*\); choose another disk for --out"):
        write(tmp_path)

"""One writer of an output at a time, by a lock that ends with the process that holds it."""

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path
from typing import IO

LOCK = ".lock"


@contextlib.contextmanager
def only_writer(folder: str | Path) -> Iterator[None]:
    """Inside, nobody else writes into the folder, which is made if need be. Errors as `take_lock`."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("ab") as file:
        take_lock(file, folder)
        yield


def take_lock(file: IO, out: str | Path) -> None:
    """Locks an open file for as long as it stays open.

    Args:
      out: what is written under the lock, for the message.

    Raises:
      ValueError: another process holds the lock, or the file system has none.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ValueError(f"{out} is in use by another process; wait for it or choose another --out") from error
    except OSError as error:
        raise ValueError(f"{out} can't be locked ({error.strerror}); choose another disk for --out") from error

"""An append-only file of answers that survives being killed at any moment.

The first line holds the settings, every later line one batch: {"answers": [[id, tokens, finish_reason, ids_from], …]}.
A batch is one write followed by fsync, so a kill leaves at most one unfinished line at the end; opening the log again
cuts it off.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from dflash_jax.data.locks import take_lock

_KIND = "dflash_jax answers, one batch a line"


class Answer(NamedTuple):
    """What the target said.

    tokens: with the stop token that ended it. finish_reason: "stop" or "length". ids_from: who knew the token ids,
    "engine" (ours), "server", or "text" when they are those of the text that a server returned.
    """

    tokens: list[int]
    finish_reason: str
    ids_from: str = "engine"


class AnswerLog:
    """Answers by prompt id, in memory and on disk. A context manager; one process at a time holds it."""

    def __init__(self, path: str | Path, settings: Mapping[str, Any]):
        """Opens the log at `path`, or begins one.

        Raises:
          ValueError: another process holds it, it was begun with other settings, or the file is something else.
        """
        self.path = Path(path)
        self.answers: dict[str, Answer] = {}
        self._file = self.path.open("ab+")
        try:
            take_lock(self._file, self.path)
            self._recover(settings)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()

    def append(self, answers: Sequence[tuple[str, Answer]]) -> None:
        """Adds the answers of one batch; when this returns they are on disk."""
        self._write({"answers": [[name, *answer] for name, answer in answers]})
        self.answers.update(answers)

    def _recover(self, settings: Mapping[str, Any]) -> None:
        self._file.seek(0)
        good = 0
        header = None
        for line in self._file:
            try:
                entry = json.loads(line) if line.endswith(b"\n") else None
            except ValueError:
                entry = None
            if entry is None:
                break
            if header is None:
                header = entry
                self._check_header(header, settings)
            else:
                self.answers.update((name, Answer(*answer)) for name, *answer in entry["answers"])
            good += len(line)
        if header is None and self._has_a_whole_line():
            raise ValueError(f"{self.path} is not a log of answers; move it away or choose another --out")
        self._file.truncate(good)
        if header is None:
            self._write({"kind": _KIND, "settings": dict(settings)})

    def _has_a_whole_line(self) -> bool:
        self._file.seek(0)
        return self._file.readline().endswith(b"\n")

    def _check_header(self, header: Any, settings: Mapping[str, Any]) -> None:
        if not isinstance(header, dict) or header.get("kind") != _KIND:
            raise ValueError(f"{self.path} is not a log of answers; move it away or choose another --out")
        check_same_settings(header["settings"], settings, f"{self.path} was begun")

    def _write(self, entry: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(entry).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())


def check_same_settings(before: Mapping[str, Any], now: Mapping[str, Any], what: str) -> None:
    """Raises ValueError, naming each setting that differs and both values, unless the two are the same."""
    now = json.loads(json.dumps(now))
    names = sorted(name for name in {*before, *now} if before.get(name) != now.get(name))
    if names:
        differences = "; ".join(f"{name} was {before.get(name)!r} and is now {now.get(name)!r}" for name in names)
        raise ValueError(f"{what} with other settings: {differences}. Delete it, or choose another --out")

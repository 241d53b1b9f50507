"""A memory of bounded size."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


class Recent(Generic[T]):
    """Keeps the values of the keys that were asked for last, at most so many of them, and makes others anew.

    Threads may share it.
    """

    def __init__(self, most: int):
        self._most = most
        self._lock = threading.RLock()  # as `make`, or a key's hash, may ask for another
        self._values: dict[Hashable, T] = {}  # the one that was asked for last at the end

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """The value of the key, `make()` where none is known."""
        with self._lock:
            value = self._values.pop(key, None)
            value = self._values[key] = make() if value is None else value
            if len(self._values) > self._most:
                del self._values[next(iter(self._values))]
            return value

"""A function applied to pieces of work by several processes, with the results in the order of the pieces."""

import collections
import gc
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

Piece = TypeVar("Piece")
Result = TypeVar("Result")

AHEAD = 2  # pieces under way for each worker: one that it works on and one that waits


def map_in_order(function: Callable[[Piece], Result], pieces: Iterable[Piece], workers: int) -> Iterator[Result]:
    """`map(function, pieces)` by so many processes; 0: by this one. Few pieces are in memory at a time.

    Args:
      function: sent to each process once, by pickle.
      pieces: read as they are needed.
      workers: processes.

    Raises:
      ValueError: a process ended without a result. What the function raises is raised here.
    """
    if not workers:
        yield from map(function, pieces)
        return
    # Not forked: this process has threads, which a fork would leave behind with their locks.
    context = multiprocessing.get_context("spawn")
    waiting: collections.deque[Future[Result]] = collections.deque()
    with ProcessPoolExecutor(workers, context, _start_worker, (function,)) as pool:
        try:
            for piece in pieces:
                waiting.append(pool.submit(_work, piece))
                if len(waiting) == AHEAD * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool as error:
            raise ValueError("a worker process ended unexpectedly (out of memory?); try fewer --workers") from error
        finally:
            pool.shutdown(cancel_futures=True)


def spare_collector() -> None:
    """Keeps Python's collector of cycles from going through all that was imported, again every few thousand chats."""
    gc.freeze()


_function: Callable[[Any], Any]


def _start_worker(function: Callable[[Any], Any]) -> None:
    global _function
    _function = function
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is interrupted too, and ends its workers
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there are as many workers as cores are wanted
    threading.Thread(target=_end_with_parent, daemon=True).start()
    spare_collector()


def _end_with_parent() -> None:
    """A parent that was killed can't end its workers."""
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        os._exit(1)


def _work(piece: Any) -> Any:
    return _function(piece)

"""Pieces of work done by several processes: results in order, little read ahead, errors and deaths told."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dflash_jax.data.workers import AHEAD, map_in_order


def slow_first(piece: int) -> tuple[int, int]:
    """The number and the process that got it; even ones take longer than those behind them."""
    time.sleep(0.05 * (piece % 2 == 0))
    return piece, os.getpid()


def fail_at_two(piece: int) -> int:
    if piece == 2:
        raise KeyError("two")
    return piece


def die(piece: int) -> None:
    os._exit(1)


def test_results_come_in_order_from_several_processes_that_read_little_ahead():
    read = []

    def pieces():
        for piece in range(12):
            read.append(piece)
            yield piece

    processes = set()
    for expected, (piece, process) in enumerate(map_in_order(slow_first, pieces(), 2)):
        assert piece == expected and len(read) - expected <= 2 * AHEAD
        processes.add(process)
    assert len(read) == 12 and len(processes) == 2 and os.getpid() not in processes
    assert not multiprocessing.active_children()
    assert list(map_in_order(slow_first, range(2), 0)) == [(0, os.getpid()), (1, os.getpid())]


def test_what_goes_wrong_in_a_process_is_told_here():
    done = []
    with pytest.raises(KeyError, match="two"):
        done.extend(map_in_order(fail_at_two, range(9), 1))
    with pytest.raises(ValueError, match="worker process ended unexpectedly.*fewer --workers"):
        list(map_in_order(die, range(9), 1))
    assert not multiprocessing.active_children()


def test_workers_end_when_their_parent_is_killed():
    program = (
        "from test_workers import slow_first; from dflash_jax.data.workers import map_in_order; import itertools\n"
        "if __name__ == '__main__':\n"
        "    for _, process in map_in_order(slow_first, itertools.count(), 1): print(process, flush=True)"
    )
    paths = [str(Path(__file__).parent), *filter(None, sys.path)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=environment)
    assert parent.stdout is not None
    worker = int(parent.stdout.readline())
    os.kill(worker, 0)  # it is there
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 60
    while alive(worker) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not alive(worker)


def alive(process: int) -> bool:
    """Whether a process runs; one that nobody has waited for does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False

"""One run on many hosts: joining the others, and stopping together.

Every process runs the same program on the same data and takes part in every collective; only process 0 writes files
and talks. Checkpoints need a folder that all see.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from jax.experimental import multihost_utils

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 60  # a process that was not heard of for so long counts as lost, and the others end

_LONGEST_WAIT_MS = 20 * 24 * 3600 * 1000

_EXPLICIT = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")


def join(environment: Mapping[str, str] = os.environ) -> bool:
    """Joins the other processes of the run, if the environment speaks of any. Call it before anything asks for devices.

    Known are the variables JAX_COORDINATOR_ADDRESS (host:port of process 0), JAX_NUM_PROCESSES and JAX_PROCESS_ID,
    Slurm's (one task a process: alone on a host it has all its GPUs, else one) and TPU_WORKER_HOSTNAMES, as on GKE.

    Returns:
        Whether there are others.

    Raises:
        ValueError: some of the three variables are set and some are not, or they are not as above; or Slurm or TPUs
            speak of others, and JAX does not find them by that.
    """
    given = [environment[name] for name in _EXPLICIT if environment.get(name)]
    if given and len(given) < len(_EXPLICIT):
        missing = [name for name in _EXPLICIT if not environment.get(name)]
        raise ValueError(f"{', '.join(missing)}: not set; a run of several processes needs {', '.join(_EXPLICIT)}")
    if given:
        address, *numbers = given
        if not all(number.isdigit() for number in numbers):
            raise ValueError(f"JAX_NUM_PROCESSES={numbers[0]!r}, JAX_PROCESS_ID={numbers[1]!r}: must be whole numbers")
        if not re.fullmatch(r".+:\d+", address):
            raise ValueError(f"JAX_COORDINATOR_ADDRESS={address!r}: must be host:port of process 0")
        count, index = map(int, numbers)
        if not 0 <= index < count:
            raise ValueError(f"JAX_PROCESS_ID={index} must be from 0 to below JAX_NUM_PROCESSES={count}")
        logger.info("process %d of %d: joining the others at %s", index, count, address)
        # Detection would give each task of Slurm one GPU here, too.
        jax.distributed.initialize(
            *(address, count, index),
            cluster_detection_method="deactivate",
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
        )
    elif _tasks(environment) > 1 or "," in environment.get("TPU_WORKER_HOSTNAMES", ""):
        logger.info("joining the other processes, of which Slurm or the TPU's host speaks")
        try:
            jax.distributed.initialize(heartbeat_timeout_seconds=HEARTBEAT_SECONDS)
        except ValueError as error:
            raise ValueError(
                "SLURM_STEP_NUM_TASKS or TPU_WORKER_HOSTNAMES speaks of several processes, which can't be found by it "
                f"({error}); set {', '.join(_EXPLICIT)} for each"
            ) from error
        _take_all_gpus_of_the_host(environment)
    else:
        return False
    return jax.process_count() > 1


def _tasks(environment: Mapping[str, str]) -> int:
    """Of this step of Slurm; 1 outside it."""
    tasks = environment.get("SLURM_STEP_NUM_TASKS") or "1"
    if not tasks.isdigit():
        raise ValueError(f"SLURM_STEP_NUM_TASKS={tasks!r}: must be a whole number")
    return int(tasks)


def _take_all_gpus_of_the_host(environment: Mapping[str, str]) -> None:
    """Under Slurm JAX shows each task one GPU, that of its number on the host; a task alone there wants all."""
    tasks, hosts = environment.get("SLURM_STEP_NUM_TASKS"), environment.get("SLURM_STEP_NUM_NODES")
    if tasks and tasks == hosts and not environment.get("JAX_LOCAL_DEVICE_IDS"):
        for vendor in ("cuda", "rocm"):
            jax.config.update(f"jax_{vendor}_visible_devices", "all")


@contextlib.contextmanager
def ending_at_once() -> Iterator[None]:
    """What is raised in here ends this process there and then, where it is one of several that have joined.

    An ordinary exit would wait minutes for the others, which wait for this one in a collective. Once it is gone they
    are told, by a broken connection or by the heartbeats that stop.
    """
    try:
        yield
    except BaseException as error:
        if not jax.distributed.is_initialized():
            raise
        status: Any = 1
        if isinstance(error, SystemExit):
            status = 0 if error.code is None else error.code
        else:
            traceback.print_exc()
            print("this process ends here, by its own error or another's end; the cause is above.", file=sys.stderr)
            print("Once it is gone, the same command goes on from what was saved.", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status if isinstance(status, int) else 1)


def check_joined() -> None:
    """Raises ValueError in one of several processes that the hardware joins and JAX's service does not."""
    if jax.process_count() > 1 and not jax.distributed.is_initialized():
        raise ValueError(
            f"this is one of {jax.process_count()} processes, and they have not joined; set JAX_COORDINATOR_ADDRESS, "
            "JAX_NUM_PROCESSES and JAX_PROCESS_ID for each (docs/clusters.md)"
        )


def wait_for_all(place: str) -> None:
    """Returns when all processes have come to this place, each once, however long that takes.

    No device is waited for, as in a collective, which would give up on a process that is hours behind. A process that
    dies ends the wait with an error.
    """
    from orbax.checkpoint import multihost

    multihost.get_barrier_sync_fn()(key=f"dflash_jax {place}", timeout_ms=_LONGEST_WAIT_MS)


def end_on_sigterm() -> None:
    """SIGTERM ends this process there and then. Of several processes JAX's service takes the signal, and only notes it
    for a `StopRequest`."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def is_first() -> bool:
    """Whether this process is the one that writes files and talks."""
    return jax.process_index() == 0


class Stopped(Exception):
    """The run was asked to end soon."""


class StopRequest:
    """Whether the run was asked to end soon: by SIGTERM, as clusters do before they take machines away, or by Ctrl-C.

    A second Ctrl-C ends the process there and then. A context manager: outside it, the signals do what they did before.
    """

    def __init__(self):
        self._asked = threading.Event()
        self._before: dict[int, Any] = {}
        self._looks = 0

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is not threading.main_thread():
            return self
        # Of several processes, JAX's service takes SIGTERM and finds a look that all have still before them.
        if jax.process_count() == 1:
            self._before[signal.SIGTERM] = signal.signal(signal.SIGTERM, lambda *_: self._asked.set())
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # which shells set for what they start with &
            self._before[signal.SIGINT] = signal.signal(signal.SIGINT, self._interrupted)
        return self

    def __exit__(self, *error) -> None:
        while self._before:
            signal.signal(*self._before.popitem())

    def _interrupted(self, *_) -> None:
        """Does at the first SIGINT what SIGTERM does; a second one is for the system, which waits for nothing."""
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.write(2, b"\nstopping after this step; Ctrl-C again ends at once, and nothing is saved\n")
        os.kill(os.getpid(), signal.SIGTERM)

    def check(self) -> None:
        """Of several processes, all have to call this the same number of times, and all get the same answer.

        To be called once before the first step, then between any two pieces of work: of several processes JAX lets the
        run stop at the first call behind the last one that any of them had made.

        Raises:
            Stopped: the run is to end here.
        """
        self._looks += 1
        several = jax.process_count() > 1
        if multihost_utils.reached_preemption_sync_point(self._looks) if several else self._asked.is_set():
            raise Stopped

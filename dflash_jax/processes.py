"""One run on many hosts: joining the others, and stopping together.

Every process runs the same program on the same data and takes part in every collective; only process 0 writes files
and talks. Checkpoints need a folder that all see.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping

import jax
from jax.experimental import multihost_utils

_EXPLICIT = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")


def join(environment: Mapping[str, str] = os.environ) -> bool:
    """Joins the other processes of the run, if the environment speaks of any. Call it before anything asks for devices.

    Known are the variables JAX_COORDINATOR_ADDRESS (host:port of process 0), JAX_NUM_PROCESSES and JAX_PROCESS_ID,
    Slurm's (one task a process: alone on a host it has all its GPUs, else one) and TPU_WORKER_HOSTNAMES, as on GKE.

    Returns:
        Whether there are others.

    Raises:
        ValueError: some of the three variables are set and some are not, or they are no numbers.
    """
    given = [environment[name] for name in _EXPLICIT if environment.get(name)]
    if given and len(given) < len(_EXPLICIT):
        missing = [name for name in _EXPLICIT if not environment.get(name)]
        raise ValueError(f"{', '.join(missing)}: not set; a run of several processes needs {', '.join(_EXPLICIT)}")
    if given:
        address, *numbers = given
        if not all(number.isdigit() for number in numbers):
            raise ValueError(f"JAX_NUM_PROCESSES={numbers[0]!r}, JAX_PROCESS_ID={numbers[1]!r}: must be whole numbers")
        count, index = map(int, numbers)
        if not 0 <= index < count:
            raise ValueError(f"JAX_PROCESS_ID={index} must be from 0 to below JAX_NUM_PROCESSES={count}")
        # Detection would give each task of Slurm one GPU here, too.
        jax.distributed.initialize(address, count, index, cluster_detection_method="deactivate")
    elif int(environment.get("SLURM_STEP_NUM_TASKS") or 1) > 1 or "," in environment.get("TPU_WORKER_HOSTNAMES", ""):
        jax.distributed.initialize()
        _take_all_gpus_of_the_host(environment)
    else:
        return False
    return jax.process_count() > 1


def _take_all_gpus_of_the_host(environment: Mapping[str, str]) -> None:
    """Under Slurm JAX shows each task one GPU, that of its number on the host; a task alone there wants all."""
    tasks, hosts = environment.get("SLURM_STEP_NUM_TASKS"), environment.get("SLURM_STEP_NUM_NODES")
    if tasks and tasks == hosts and not environment.get("JAX_LOCAL_DEVICE_IDS"):
        for vendor in ("cuda", "rocm"):
            jax.config.update(f"jax_{vendor}_visible_devices", "all")


def is_first() -> bool:
    """Whether this process is the one that writes files and talks."""
    return jax.process_index() == 0


def agreed(seconds: float) -> float:
    """The number that process 0 has, so that all decide alike. Of several processes it comes back in float32."""
    return seconds if jax.process_count() == 1 else float(multihost_utils.broadcast_one_to_all(seconds))


class StopRequest:
    """Whether the run was asked to end soon, by SIGTERM, as clusters do before they take machines away.

    A context manager: outside it, the signal does what it did before.
    """

    def __init__(self):
        self._asked = threading.Event()
        self._before = None

    def __enter__(self) -> StopRequest:
        # Of several processes, JAX's service takes the signal and finds a step that all can still reach.
        if jax.process_count() == 1 and threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, lambda *_: self._asked.set())
        return self

    def __exit__(self, *error) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)

    def reached(self, step: int) -> bool:
        """Whether to stop after this step; all processes get the same answer for the same step.

        To be asked once before the first step, then after every step: of several processes JAX lets the run stop at the
        first step behind the last one that it was asked about.
        """
        if jax.process_count() > 1:
            return multihost_utils.reached_preemption_sync_point(step)
        return self._asked.is_set()

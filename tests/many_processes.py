"""Runs of several processes on this machine, over gloo."""

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def start(
    file: Path, processes: int, *, devices: int = 1, program: Sequence[str] = ("train.py",)
) -> list[subprocess.Popen]:
    """train.py, or another program, in so many processes of so many devices each."""
    port = free_port()
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo"}
    if processes > 1:
        environment |= {"JAX_COORDINATOR_ADDRESS": f"localhost:{port}", "JAX_NUM_PROCESSES": str(processes)}
    return [
        subprocess.Popen(
            [sys.executable, *program, "--config", str(file)],
            cwd=ROOT,
            env=environment | ({"JAX_PROCESS_ID": str(index)} if processes > 1 else {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index in range(processes)
    ]


def ended(processes: list[subprocess.Popen]) -> list[str]:
    """What they printed, once all have ended well."""
    texts = [process.communicate(timeout=240)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), "\n".join(texts)
    return texts

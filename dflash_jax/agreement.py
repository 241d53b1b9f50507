"""What the processes of a run need to have in common: looked at before the first step, as nothing shows it later.

Every function is a meeting: all processes have to call it, in the same order.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from dflash_jax.processes import is_first

SHARED_SECONDS = 30  # for a file of one host to be seen by the others


def agreed(seconds: float) -> float:
    """The number that process 0 has, so that all decide alike. Of several processes it comes back in float32."""
    return seconds if jax.process_count() == 1 else float(multihost_utils.broadcast_one_to_all(seconds))


def check_equal(values: Mapping[str, Any]) -> None:
    """Raises ValueError, in all processes, where one has other values than process 0; the message names them.

    values: names of settings → what JSON knows.
    """
    if jax.process_count() == 1:
        return
    first, *others = map(json.loads, _gathered(json.dumps(values, sort_keys=True)))
    differing = [
        f"{name}: {first.get(name)!r} in process 0, {other.get(name)!r} in process {index}"
        for index, other in enumerate(others, start=1)
        for name in sorted(first.keys() | other.keys())
        if first.get(name) != other.get(name)
    ]
    if differing:
        raise ValueError(f"all processes of a run need the same settings and files ({'; '.join(differing)})")


def check_shared(directory: Path) -> None:
    """Raises ValueError, in all processes, where one does not see what process 0 writes into the directory."""
    if jax.process_count() == 1:
        return
    token = directory / _gathered(f".{secrets.token_hex(8)}")[0]
    if is_first():
        token.touch()
    multihost_utils.sync_global_devices("written")
    until = time.monotonic() + SHARED_SECONDS
    while not (seen := token.exists()) and time.monotonic() < until:
        time.sleep(0.1)
    blind = [index for index, answer in enumerate(_gathered(str(seen))) if answer != "True"]
    if is_first():
        token.unlink()
    if blind:
        raise ValueError(
            f"must be one directory for all processes: {', '.join(map(str, blind))} did not see in {SHARED_SECONDS} s "
            "what process 0 wrote there"
        )


def _gathered(text: str) -> list[str]:
    """The texts of all processes."""
    encoded_N = np.frombuffer(text.encode(), np.uint8)
    sizes_P = multihost_utils.process_allgather(np.int32(len(encoded_N)))
    padded_N = np.pad(encoded_N, (0, max(sizes_P) - len(encoded_N)))
    texts_PN = multihost_utils.process_allgather(padded_N)
    return [bytes(text_N[:size]).decode() for text_N, size in zip(texts_PN, sizes_P, strict=True)]

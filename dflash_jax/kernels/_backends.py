"""Which implementation of block attention runs: chosen by the platform that a program is compiled for.

Backends share one contract: `forward` gives the output and the log-sum-exp [B, N, A·W] of every row, `backward` takes
them back. With "auto" both are staged and the compiler's target picks one, so a program compiled for hardware that is
not here gets what it would get there. That is known only when a program is lowered, and so is what is logged.

"auto" does not take "gpu": its kernels have not run on a GPU yet, and a platform's name does not tell a Hopper GPU
from those that cannot run them.
"""

from __future__ import annotations

import functools
import logging
from typing import Literal

import jax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from dflash_jax.kernels import _tpu, _xla

Backend = Literal["auto", "reference", "xla", "tpu", "gpu"]
NAMES = ("xla", "tpu", "gpu")

log = logging.getLogger(__name__)


@functools.cache
def _say_once(level: int, message: str) -> None:
    log.log(level, message)


def _implementation(name: str):
    if name == "gpu":
        # Names of Mosaic GPU move between versions of jax: only who asks for this backend depends on them.
        from dflash_jax.kernels import _gpu

        return _gpu
    return {"xla": _xla, "tpu": _tpu}[name]


def choose(backend: Backend, *arrays: jax.Array) -> str:
    """The backend that can take these arrays: the one asked for, or "xla" with a log line that says why.

    Raises:
        ValueError: for an unknown backend.
    """
    if backend not in ("auto", *NAMES):
        raise ValueError(f"backend={backend!r} is not known; use auto, {', '.join(NAMES)} or reference")
    if backend == "xla":
        return backend
    kernels = "tpu" if backend == "auto" else backend
    if reason := _implementation(kernels).unsupported(*arrays):
        level = logging.INFO if backend == "auto" else logging.WARNING
        _say_once(level, f"block attention runs as xla on every platform: the {kernels} backend cannot take {reason}")
        return "xla"
    return backend


def run(pass_name: Literal["forward", "backward"], backend: str, *arrays: jax.Array, mask, scale: float):
    """Calls the pass of the backend, or of the one that belongs to the platform."""

    def implementation(name: str):
        function = getattr(_implementation(name), pass_name)

        def call(*arrays):
            first, *others = function(*arrays, mask=mask, scale=scale)
            return _lowered_p.bind(first, backend=name), *others

        return call

    if backend != "auto":
        return implementation(backend)(*arrays)
    return jax.lax.platform_dependent(*arrays, tpu=implementation("tpu"), default=implementation("xla"))


# The identity, which says so when it is lowered.

_lowered_p = Primitive("block_attention_backend")
_lowered_p.def_abstract_eval(lambda x, *, backend: x)
_lowered_p.def_impl(lambda x, *, backend: x)


def _lower(ctx, x, *, backend: str):
    platforms = " or ".join(ctx.platforms or ctx.module_context.platforms)
    _say_once(logging.INFO, f"block attention for {platforms}: {backend} backend")
    return [x]


def _batch(args, dims, *, backend: str):
    return _lowered_p.bind(*args, backend=backend), dims[0]


mlir.register_lowering(_lowered_p, _lower)
batching.primitive_batchers[_lowered_p] = _batch

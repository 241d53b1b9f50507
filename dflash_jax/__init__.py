"""dflash_jax: train DFlash drafters and decode with them, in JAX.

import dflash_jax as dj

target = dj.load_target("smollm2-135m-instruct")
drafter = dj.load_drafter("runs/smollm2_quickstart/drafter", target=target)
[result] = dj.generate(target, ["What is a hash table?"], drafter=drafter, max_new_tokens=100)
print(result.text, result.acceptance_length)
"""

import importlib

__version__ = "0.1.0"

_HOMES = {
    "load_target": "dflash_jax.checkpoints.huggingface",
    "load_drafter": "dflash_jax.checkpoints.huggingface",
    "export_drafter": "dflash_jax.checkpoints.drafter_export",
    "LoadedTarget": "dflash_jax.checkpoints.huggingface",
    "LoadedDrafter": "dflash_jax.checkpoints.huggingface",
    "generate": "dflash_jax.decoding.generate",
    "stream": "dflash_jax.decoding.generate",
    "Generation": "dflash_jax.decoding.generate",
}

__all__ = ["__version__", *_HOMES]  # pyright: ignore[reportUnsupportedDunderAll]


def __dir__() -> list[str]:
    """For completion: what __getattr__ would load, too."""
    return sorted({*globals(), *__all__})


def __getattr__(name: str):
    """Loads a public name when it is first used, so that importing the package costs nothing."""
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

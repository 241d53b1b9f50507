"""Makes a drafter folder that vLLM, SGLang and PyTorch load from a training checkpoint, on one device.

    python -m dflash_jax.checkpoints.export --checkpoint runs/qwen3_8b --out qwen3-8b-dflash

Needs neither the target nor the devices that the run had. Beside config.json and model.safetensors it writes
training.json (what the drafter was trained for and on) and README.md, a model card.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from absl import app, flags, logging
from flax import nnx

from dflash_jax.checkpoints.huggingface import export_drafter
from dflash_jax.checkpoints.safetensors_io import CheckpointError
from dflash_jax.checkpoints.training_state import TrainingCheckpoints, has_checkpoint
from dflash_jax.cli import exit_with
from dflash_jax.models.drafter import Drafter
from dflash_jax.models.family import DrafterConfig, parse_drafter_config

CHECKPOINTS = "checkpoints"  # the folder of a run's directory that they are in
MADE_WITH = "training.json"  # beside an exported drafter: what it was trained for and on


def export_checkpoint(
    run: str | Path, out: str | Path, *, step: int | None = None, dtype: str = "bfloat16", overwrite: bool = False
) -> Path:
    """Exports the drafter of a training checkpoint.

    Args:
        run: the directory of a run, or its checkpoints folder.
        out: the folder to make.
        step: which checkpoint; default: the newest.
        dtype: of the weights in the file.
        overwrite: whether a drafter and a README.md that are there already may be replaced.

    Returns:
        The folder.

    Raises:
        CheckpointError: there is no such checkpoint, it is of a version without a drafter's description, or a drafter
            is there already.
    """
    folder = Path(run) / CHECKPOINTS if (Path(run) / CHECKPOINTS).is_dir() else Path(run)
    if not has_checkpoint(folder):
        raise CheckpointError(f"{run} holds no training checkpoint; give the directory of a run")
    if (Path(out) / "README.md").exists() and not overwrite:
        raise CheckpointError(f"{out} already has README.md; choose another folder or set overwrite")
    checkpoints = TrainingCheckpoints(folder)
    chosen = checkpoints.latest_step() if step is None else step
    if chosen not in checkpoints.steps():
        raise CheckpointError(f"{run} has no checkpoint of step {chosen}; there are {checkpoints.steps()}")
    position = checkpoints.restore_position(chosen)
    if "drafter" not in position:
        raise CheckpointError(f"{run}, step {chosen}: was saved by a version that left out the drafter's description")
    config = parse_drafter_config(position["drafter"])
    drafter = nnx.eval_shape(lambda: Drafter(config, rngs=nnx.Rngs(0)))
    drafter = checkpoints.restore_part(chosen, "drafter", drafter)
    out = export_drafter(drafter, config, out, dtype=dtype, overwrite=overwrite)
    made_with = position["made_with"]
    (out / MADE_WITH).write_text(json.dumps(made_with, indent=2) + "\n", encoding="utf-8")
    (out / "README.md").write_text(model_card(config, made_with, chosen, position), encoding="utf-8")
    return out


def model_card(config: DrafterConfig, made_with: Mapping[str, Any], step: int, position: Mapping[str, Any]) -> str:
    """The text of README.md: what the drafter is for, and the settings that made it."""
    best, experiment = position["best"], position["experiment"]
    reached = "not evaluated" if best is None else f"{best:.2f} (best of the run, held-out chats, greedy decoding)"
    settings = {part: experiment[part] for part in ("model", "training", "optimizer")}
    sources = ("target", "warm_start")  # may be paths of the machine that it was trained on
    settings["model"] = {name: value for name, value in settings["model"].items() if name not in sources}
    return f"""# A DFlash drafter for {made_with["target"]}

Proposes blocks of tokens for speculative decoding with its target (DFlash, arXiv 2602.06036); no model by itself.

| | |
|---|---|
| target | {made_with["target"]}, weights {made_with["target_fingerprint"]} |
| trained on | {made_with["train_file"]}, rows {position["inputs"]["data.train_file"][:16]} |
| block size | {config.block_size} |
| layers, taps | {config.num_layers}, {list(config.target_layer_ids)} |
| step | {step} |
| acceptance length | {reached} |

## Settings

```json
{json.dumps(settings, indent=2)}
```
"""


def _define_flags() -> None:
    flags.DEFINE_string("checkpoint", None, "The directory of a run.", required=True)
    flags.DEFINE_string("out", None, "The folder to make.", required=True)
    flags.DEFINE_integer("step", None, "Which checkpoint; default: the newest.", lower_bound=0)
    flags.DEFINE_enum("dtype", "bfloat16", ["float32", "bfloat16"], "Of the weights.")
    flags.DEFINE_bool("overwrite", False, "Replace a drafter and a README.md that are there already.")


def main(argv: list[str]) -> None:
    logging.set_verbosity(logging.WARNING)  # Orbax tells at INFO of all its parts
    if len(argv) > 1:
        exit_with(ValueError(f"unknown arguments: {' '.join(argv[1:])}"))
    flag = flags.FLAGS
    try:
        out = export_checkpoint(flag.checkpoint, flag.out, step=flag.step, dtype=flag.dtype, overwrite=flag.overwrite)
    except (ValueError, OSError) as error:
        exit_with(error)
    print(f"drafter: {out}")


if __name__ == "__main__":
    _define_flags()
    app.run(main)

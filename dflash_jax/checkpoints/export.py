"""Makes a drafter folder that vLLM, SGLang and PyTorch load from a training checkpoint, on one device.

    python -m dflash_jax.checkpoints.export --checkpoint runs/qwen3_8b --out qwen3-8b-dflash
    python -m dflash_jax.checkpoints.export --checkpoint runs/qwen3_8b --out qwen3-8b-dflash --layout speculators

Needs neither the target nor the devices that the run had. Beside config.json and model.safetensors it writes
training.json (what the drafter was trained for and on), README.md, a model card, and draft_vocabulary.json where the
run set checkpoint.draft_vocab_size. The layout "z-lab" is that of released drafters, "speculators" that of the library
of this name, from which `vllm serve FOLDER` knows the target too: --verifier is its hub id, unless the run's name for
it is. Commands for servers are in docs/serving.md.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from absl import flags, logging
from flax import nnx
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from dflash_jax.checkpoints.drafter_export import Layout, export_drafter
from dflash_jax.checkpoints.huggingface import MADE_WITH
from dflash_jax.checkpoints.safetensors_io import CheckpointError
from dflash_jax.checkpoints.training_state import TrainingCheckpoints, has_checkpoint
from dflash_jax.cli import exit_with, run_command
from dflash_jax.models.drafter import Drafter
from dflash_jax.models.family import DrafterConfig, parse_drafter_config

CHECKPOINTS = "checkpoints"  # the folder of a run's directory that they are in
METRICS = "metrics.jsonl"  # the file beside it of what was measured, a JSON object a line


def export_checkpoint(
    run: str | Path,
    out: str | Path,
    *,
    step: int | None = None,
    dtype: str = "bfloat16",
    overwrite: bool = False,
    layout: Layout = "z-lab",
    verifier: str | None = None,
) -> Path:
    """Exports the drafter of a training checkpoint.

    Args:
        run: the directory of a run, or its checkpoints folder.
        out: the folder to make.
        step: which checkpoint; default: the newest.
        dtype: of the weights in the file.
        overwrite: whether a drafter, a README.md and a training.json that are there already may be replaced.
        layout, verifier: as for `export_drafter`; verifier defaults to the run's name for its target.

    Returns:
        The folder.

    Raises:
        CheckpointError: there is no such checkpoint, it is damaged or of a version without a drafter's description, or
            a drafter is there already.
        ConfigError: the layout can't describe this drafter.
    """
    folder = Path(run) / CHECKPOINTS if (Path(run) / CHECKPOINTS).is_dir() else Path(run)
    if verifier and layout != "speculators":
        raise CheckpointError(f"verifier={verifier!r}: the layout {layout} names no target; only speculators does")
    if not has_checkpoint(folder):
        hint = "; it seems to be one: name its run, and which by step" if Path(run).name.isdigit() else ""
        raise CheckpointError(f"{run} holds no training checkpoint; give the directory of a run{hint}")
    if Path(out).exists() and not Path(out).is_dir():
        raise CheckpointError(f"out={str(out)!r} is a file; choose another name for the folder")
    for name in ("README.md", MADE_WITH):
        if (Path(out) / name).exists() and not overwrite:
            raise CheckpointError(f"{out} already has {name}; choose another folder, or allow overwriting (overwrite)")
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
    made_with = position["made_with"]
    named = (verifier or made_with["target"]) if layout == "speculators" else None
    if named and not is_hub_id(named):
        logging.warning("verifier %r is no hub id, org/name; `vllm serve %s` needs one: docs/serving.md", named, out)
    options: dict[str, Any] = {"dtype": dtype, "overwrite": overwrite, "layout": layout, "verifier": named}
    out = export_drafter(drafter, config, out, draft_vocabulary=position.get("draft_vocabulary"), **options)
    (out / MADE_WITH).write_text(json.dumps(made_with, indent=2) + "\n", encoding="utf-8")
    card = model_card(config, position, chosen, acceptance_of(folder.parent / METRICS, chosen))
    (out / "README.md").write_text(card, encoding="utf-8")
    return out


def is_hub_id(name: str) -> bool:
    """Whether a name is org/name and no folder that is here: what vLLM can take from a drafter's file as its target."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return "/" in name and not Path(name).exists()


def acceptance_of(metrics: Path, step: int) -> float | None:
    """The acceptance length that a run measured at a step; None where it measured none then."""
    found = None
    for line in metrics.read_text(encoding="utf-8").splitlines() if metrics.exists() else ():
        with contextlib.suppress(json.JSONDecodeError):  # a line that a killed run cut short
            measured = json.loads(line)
            if isinstance(measured, dict) and measured.get("step") == step:
                found = measured.get("acceptance_length", found)
    return found


def model_card(config: DrafterConfig, position: Mapping[str, Any], step: int, acceptance: float | None) -> str:
    """The text of README.md: what the drafter is for, the settings that made it, what it reached at this step."""
    made_with, experiment = position["made_with"], position["experiment"]
    reached = "not measured" if acceptance is None else f"{acceptance:.2f} (held-out chats, greedy decoding)"
    settings = {part: experiment[part] for part in ("model", "training", "optimizer")}
    proposed = position.get("draft_vocabulary")
    vocabulary = "any token" if proposed is None else f"{len(proposed):,} tokens where draft_vocabulary.json is read"
    sources = ("target", "warm_start")  # may be paths of the machine that it was trained on
    settings["model"] = {name: value for name, value in settings["model"].items() if name not in sources}
    return f"""# A DFlash drafter for {made_with["target"]}

Proposes blocks of tokens for speculative decoding with its target (DFlash, arXiv 2602.06036); no model by itself.

| | |
|---|---|
| target | {made_with["target"]}, weights {made_with["target_fingerprint"]} |
| trained on | {made_with["train_file"]}, rows {position["inputs"]["data.train_file"][:16]} |
| block size | {config.block_size} |
| proposes | {vocabulary} |
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
    flags.DEFINE_bool("overwrite", False, "Replace a drafter, a README.md and a training.json that are there already.")
    flags.DEFINE_enum("layout", "z-lab", get_args(Layout), "Of config.json.")
    flags.DEFINE_string("verifier", None, "Hub id of the target, for the speculators layout.")


def main() -> None:
    flag = flags.FLAGS
    try:
        names = ("step", "dtype", "overwrite", "layout", "verifier")
        options: dict[str, Any] = {name: flag[name].value for name in names}
        out = export_checkpoint(flag.checkpoint, flag.out, **options)
    except (ValueError, OSError) as error:
        exit_with(error)
    print(f"drafter: {out}")


if __name__ == "__main__":
    _define_flags()
    run_command(main)

"""Training checkpoints (Orbax): drafter, optimizer state, counters, data position and the settings that made them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from dflash_jax.checkpoints.safetensors_io import CheckpointError


class TrainingCheckpoints:
    """A directory of step-numbered checkpoints, written whole or not at all, the oldest deleted beyond `keep`.

    Methods that read raise CheckpointError where a checkpoint was damaged since, or holds other arrays.
    """

    def __init__(self, directory: str | Path, *, keep: int | None = None):
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=True)
        self._directory = Path(directory).absolute()
        self._manager = ocp.CheckpointManager(self._directory, options=options)

    def latest_step(self) -> int | None:
        """The newest whole checkpoint's step, or None."""
        return self._manager.latest_step()

    def steps(self) -> list[int]:
        """The steps of all whole checkpoints, ascending."""
        return sorted(self._manager.all_steps())

    def save(self, step: int, state: Any, position: dict[str, Any]) -> None:
        """Saves a pytree of arrays and a JSON dictionary. Returns once the arrays are copied, and writes on behind."""
        if self._manager.latest_step() == step:
            return
        arguments = ocp.args.Composite(state=ocp.args.StandardSave(_named(state)), position=ocp.args.JsonSave(position))
        self._manager.save(step, args=arguments)

    def restore_position(self, step: int) -> dict[str, Any]:
        """The JSON dictionary of a checkpoint."""
        with self._reading(step):
            return self._manager.restore(step, args=ocp.args.Composite(position=ocp.args.JsonRestore()))["position"]

    def restore(self, step: int, like: Any) -> Any:
        """The state of a checkpoint, in the structure, shapes, dtypes and shardings of `like`."""
        arguments = ocp.args.Composite(state=ocp.args.StandardRestore(_named(like)))
        with self._reading(step):
            named = self._manager.restore(step, args=arguments)["state"]
        leaves = [named[name] for name in _named(like)]
        return jax.tree.unflatten(jax.tree.structure(like), leaves)

    def restore_part(self, step: int, name: str, like: Any) -> Any:
        """One field of the state, such as "drafter", on this process's first device, in the structure of `like`."""
        here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        shapes = {
            f"{name}.{path}": jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here)
            for path, leaf in _named(like).items()
        }
        arguments = ocp.args.PyTreeRestore(
            shapes, restore_args=ocp.checkpoint_utils.construct_restore_args(shapes), partial_restore=True
        )
        with self._reading(step), ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
            named = reader.restore(self._directory / str(step) / "state", args=arguments)
        return jax.tree.unflatten(jax.tree.structure(like), [named[path] for path in shapes])

    @contextlib.contextmanager
    def _reading(self, step: int) -> Iterator[None]:
        """What Orbax raises in here, of many types, becomes an error that names the checkpoint."""
        try:
            yield
        except Exception as error:
            earlier = [str(other) for other in self.steps() if other < step]
            told = (str(error) or type(error).__name__).strip().splitlines()[0][:300]
            raise CheckpointError(
                f"checkpoint {self._directory / str(step)} can't be read ({told}); once this folder is moved away, "
                f"{'that of step ' + earlier[-1] if earlier else 'none'} is the newest"
            ) from error

    def close(self) -> None:
        """Waits for what is being written."""
        self._manager.wait_until_finished()
        self._manager.close()


def has_checkpoint(directory: str | Path) -> bool:
    """Whether a run's checkpoint directory holds a whole checkpoint. Makes nothing."""
    path = Path(directory).absolute()
    return path.is_dir() and bool(ocp.utils.checkpoint_steps(path))


def _named(tree: Any) -> dict[str, jax.Array]:
    """A flat dictionary of the leaves, named by their paths: readable in the checkpoint, free of custom classes."""
    paths_and_leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in paths_and_leaves}

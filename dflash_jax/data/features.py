"""Computes the target's features of every training row once and stores them, so that training runs without the target.

    python -m dflash_jax.data.features --config configs/qwen3_8b.py --out features/qwen3_8b
    python train.py --config configs/qwen3_8b.py --config.data.features=features/qwen3_8b

The config is that of the training run, whose target, taps, rows, mesh and dtype count: --config.part.field=value
changes fields as it does there. Stored are the taps of all training rows and of the held-out rows that evaluations
score, and final hidden states where the loss is "teacher"; data/feature_store.py describes the files. How many bytes
they will take is told before the target is loaded, and nothing is done where the disk has no room for them.
Killed or stopped, the same command goes on behind the last whole shard.

Started on several hosts (docs/clusters.md), each process computes every so many-th shard, on its own devices. Which
process computed a shard makes no difference to it, so another number of them may go on.
"""

from __future__ import annotations

import dataclasses
import logging
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from dflash_jax.data import feature_store
from dflash_jax.data.feature_store import FeatureSchema, SplitSchema, shard_path
from dflash_jax.data.locks import only_writer
from dflash_jax.data.pipeline import check_fit, collate, padded_length
from dflash_jax.data.provenance import tokenizer_hash
from dflash_jax.data.report import histogram
from dflash_jax.data.rows import TrainingRow

if TYPE_CHECKING:  # `data` itself knows no model, only its commands do, once wrong flags have been told
    from jax.sharding import Mesh

    from dflash_jax.config import ExperimentConfig, MeshConfig
    from dflash_jax.training.features import FeatureSource

SHARD_GB = 1.0
_SHARED = "it must be one folder for all of them"


@dataclasses.dataclass(frozen=True)
class Split:
    """Rows to compute: lengths of those that are used, and which of them go to which shard."""

    rows: Sequence[TrainingRow]
    lengths: list[int]
    shards: list[list[int]]


@dataclasses.dataclass(frozen=True)
class Shard:
    """A shard to write: which one of which split, named `name`, and the split's rows that go there."""

    name: str
    index: int
    split: Split
    rows: list[int]

    @property
    def lengths(self) -> list[int]:
        return [self.split.lengths[row] for row in self.rows]

    def path(self, out: Path) -> Path:
        return shard_path(out, self.name, self.index, len(self.split.shards))


def run(
    experiment: ExperimentConfig,
    out: str | Path,
    *,
    shard_bytes: int = int(SHARD_GB * 1e9),
    say: Callable[[str], None] = print,
) -> str:
    """Stores the features of an experiment's rows in the folder `out`, and returns the closing table.

    Of several processes each computes its share, only the first talks, and the others return "" when all are done.

    Args:
      shard_bytes: a shard ends with the rows that bring it to so many.
      say: receives the estimate.

    Raises:
      ValueError: settings, data or target are wrong, the disk is too small, the mesh does not fit one process, somebody
        else writes into the folder, or it holds other features; the message names what is wrong.
    """
    from dflash_jax.checkpoints.huggingface import outline_target
    from dflash_jax.config import naming
    from dflash_jax.evaluation.training_run import mesh_of_run
    from dflash_jax.processes import check_joined, is_first, wait_for_all

    model, out = experiment.model, Path(out)
    check_joined()
    mesh = mesh_of_run(experiment, _devices(experiment.mesh))
    with naming("model.target", model.target):
        outline = outline_target(model.target)
    schema, splits = _plan(experiment, outline, shard_bytes)
    shards = [
        Shard(name, index, split, rows) for name, split in splits.items() for index, rows in enumerate(split.shards)
    ]
    if not is_first():
        wait_for_all("features begun")
        _check_begun(out, schema)
        _compute_share(experiment, mesh, out, schema, shards)
        wait_for_all("features computed")
        return ""
    estimate = _bytes(schema, shards)
    say(_estimate(schema, estimate, len(shards)))
    begun = time.monotonic()
    with only_writer(out):
        left = _begin(out, schema, shards)
        wait_for_all("features begun")
        _compute_share(experiment, mesh, out, schema, shards)
        wait_for_all("features computed")
        _check_complete(out, shards)
    return _table(out, schema, shards, left, estimate, time.monotonic() - begun)


def _devices(mesh: MeshConfig) -> list[Any]:
    """Those of this process, over which it divides the target; where all sizes of the mesh are 1, its first."""
    import jax

    from dflash_jax.config import ConfigError, MeshConfig
    from dflash_jax.sharding import mesh_sizes

    devices, processes = jax.local_devices(), jax.process_count()
    if mesh == MeshConfig(1, 1, 1):
        return devices[:1]
    try:
        mesh_sizes((mesh.data, mesh.fsdp, mesh.sequence, mesh.tensor), len(devices))
    except ValueError as error:
        if processes == 1:
            raise ConfigError(str(error)) from error
        raise ConfigError(
            f"{error}. These are the devices of one of {processes} processes: each computes whole shards, so the mesh "
            "is of its own devices, and a target that has to be divided over several hosts can't be used here"
        ) from error
    return devices


def _plan(experiment: ExperimentConfig, outline: Any, shard_bytes: int) -> tuple[FeatureSchema, dict[str, Split]]:
    """What is to be stored: its description, and the rows of each split."""
    from dflash_jax.checkpoints.target_files import tables_hash
    from dflash_jax.config import naming
    from dflash_jax.evaluation.training_run import rows_in_use
    from dflash_jax.training.setup import tapped_layers

    data, training = experiment.data, experiment.training
    files = {"train": data.train_file} | ({"heldout": data.heldout_file} if data.heldout_file else {})
    limits = {"train": None, "heldout": experiment.evaluation.rows}
    used = {name: rows_in_use(experiment, outline, name) for name in files}
    schema = FeatureSchema(
        target=experiment.model.target,
        target_fingerprint=outline.fingerprint,
        tokenizer_sha256=None if outline.tokenizer is None else tokenizer_hash(outline.tokenizer),
        tables_sha256=tables_hash(experiment.model.target),
        layers=tapped_layers(experiment.model, outline),
        hidden=training.loss == "teacher",
        hidden_size=outline.config.hidden_size,
        dtype=experiment.model.target_dtype,
        pass_rows=training.rows_per_step // training.accumulation,
        length_buckets=data.length_buckets,
        scan_layers=training.scan_layers,
        shard_bytes=shard_bytes,
        splits={},
    )
    splits, described = {}, {}
    for name, (rows, lengths, sha256) in used.items():
        lengths = lengths[: limits[name]]
        with naming(f"data.{name}_file", files[name]):
            check_fit(lengths, data.length_buckets)
        shards = feature_store.plan_shards(
            lengths, token_bytes=schema.token_bytes, pass_rows=schema.pass_rows, shard_bytes=shard_bytes
        )
        splits[name] = Split(rows, lengths, shards)
        described[name] = SplitSchema(files[name], sha256, len(lengths), sum(lengths), len(shards))
    return dataclasses.replace(schema, splits=described), splits


def _begin(out: Path, schema: FeatureSchema, shards: Sequence[Shard]) -> list[Shard]:
    """Begins the features in the folder, or checks those begun there; the shards that are still to be written."""
    fresh = not feature_store.check_schema(out, schema)
    left = _still_to_write(out, schema, shards)
    _check_disk(out, _bytes(schema, left))
    if fresh:
        feature_store.write_schema(out, schema)
    feature_store.remove_unfinished(out)
    return left


def _check_begun(out: Path, schema: FeatureSchema) -> None:
    """Raises ValueError where this process does not see, or would not write, what the first has begun."""
    if not feature_store.check_schema(out, schema):
        raise ValueError(
            f"--out={out}: {feature_store.SCHEMA} is there for the first process and not for this one; {_SHARED}"
        )


def _check_complete(out: Path, shards: Sequence[Shard]) -> None:
    """Raises ValueError where the first process does not see what the others have written."""
    missing = [path.name for shard in shards if not (path := shard.path(out)).exists()]
    if missing:
        raise ValueError(
            f"--out={out}: {len(missing)} shards ({missing[0]} …) that others wrote are not there; {_SHARED}"
        )


def _still_to_write(out: Path, schema: FeatureSchema, shards: Sequence[Shard]) -> list[Shard]:
    """The shards that are not there. Those that are must be the ones that would be written."""
    left = []
    for shard in shards:
        if shard.path(out).exists():
            feature_store.read_index(out, schema, shard.name, shard.index)
        else:
            left.append(shard)
    return left


def _compute_share(
    experiment: ExperimentConfig, mesh: Mesh | None, out: Path, schema: FeatureSchema, shards: Sequence[Shard]
) -> None:
    """Writes those of this process's shards that are not there, one after the other."""
    import jax

    from dflash_jax.checkpoints.huggingface import load_target
    from dflash_jax.config import naming
    from dflash_jax.processes import is_first
    from dflash_jax.sharding import on_mesh
    from dflash_jax.training.features import OnlineFeatures

    left = _still_to_write(out, schema, shards[jax.process_index() :: jax.process_count()])
    if not left:
        return
    model = experiment.model
    with naming("model.target", model.target):
        target = load_target(model.target, dtype=model.target_dtype, mesh=mesh)
    scan = experiment.training.scan_layers
    features = OnlineFeatures(target.model, schema.layers, with_hidden=schema.hidden, scan=scan)
    total = sum(sum(shard.lengths) for shard in left)
    bar = tqdm(total=total, desc="features", unit="tok", unit_scale=True, dynamic_ncols=True, disable=not is_first())
    with bar, on_mesh(mesh):
        for shard in left:
            feature_store.write_shard(out, schema, shard.name, shard.index, _tensors(shard, features, schema, bar))


def _tensors(shard: Shard, features: FeatureSource, schema: FeatureSchema, bar: tqdm) -> Mapping[str, np.ndarray]:
    """What a shard holds."""
    described = feature_store.tensors_of(schema, len(shard.rows), sum(shard.lengths))
    stored = {name: np.empty(*of) for name, of in described.items()}
    stored["rows"][:], stored["lengths"][:] = shard.rows, shard.lengths
    names = [name for name in ("taps", "hidden") if name in stored]
    first = 0
    for start in range(0, len(shard.rows), schema.pass_rows):
        together = shard.rows[start : start + schema.pass_rows]
        lengths = [shard.split.lengths[row] for row in together]
        padded = padded_length(max(lengths), schema.length_buckets)
        # All passes of a length are one program: a last one that is not full repeats a row.
        batch = collate(shard.split.rows, together + together[:1] * (schema.pass_rows - len(together)), padded)
        found = features(batch)
        on_host = {name: np.asarray(getattr(found, name)) for name in names}
        for slot, length in enumerate(lengths):
            for name in names:
                stored[name][first : first + length] = on_host[name][slot, :length]
            first += length
        bar.update(sum(lengths))
    return stored


def _bytes(schema: FeatureSchema, shards: Sequence[Shard]) -> int:
    """That the shards take."""
    return sum(feature_store.stored_bytes(schema.token_bytes, shard.lengths) for shard in shards)


def _check_disk(out: Path, needed: int) -> None:
    free = shutil.disk_usage(out).free
    if needed > free:
        raise ValueError(
            f"--out={out}: {_size(needed)} are still to be written there, and {_size(free)} are free; choose another "
            "disk, or fewer rows (data.max_rows, data.max_length)"
        )


def _estimate(schema: FeatureSchema, size: int, shards: int) -> str:
    rows = ", ".join(f"{part.rows:,} {name} rows of {part.tokens:,} tokens" for name, part in schema.splits.items())
    return f"{rows}: {schema.token_bytes:,} bytes a token, {_size(size)} in {shards:,} shards"


def _size(size: int) -> str:
    """Bytes, and the same for people."""
    return f"{size:,} bytes ({size / 1e9:.3g} GB)"


def _table(
    out: Path, schema: FeatureSchema, shards: Sequence[Shard], written: Sequence[Shard], estimate: int, seconds: float
) -> str:
    size = sum(shard.path(out).stat().st_size for shard in shards)
    tokens = sum(sum(shard.lengths) for shard in written)
    cells = [(f"{name} rows", f"{part.rows:,}") for name, part in schema.splits.items()]
    cells += [
        ("tokens", f"{sum(part.tokens for part in schema.splits.values()):,}"),
        ("tapped layers", str(list(schema.layers))),
        ("final hidden states", "yes" if schema.hidden else "no"),
        ("dtype", schema.dtype),
        ("shards written", f"{len(written):,}"),
        ("shards from before", f"{len(shards) - len(written):,}"),
        ("bytes", f"{size:,}, estimated {estimate:,}"),
        ("tokens a second", f"{tokens / seconds:,.0f}, with loading" if written else "nothing was left to compute"),
    ]
    width = max(len(label) for label, _ in cells)
    lines = [f"features → {out}", *(f"  {label:<{width}}  {text}" for label, text in cells)]
    lengths = [length for shard in shards for length in shard.lengths]
    return "\n".join([*lines, *(f"  {line}" for line in histogram(lengths))])


def main(argv: Sequence[str]) -> None:
    """Runs the command; an error of the user, and Ctrl-C, is one message, not a traceback."""
    from dflash_jax.cli import ending_when_interrupted

    with ending_when_interrupted(goes_on=True):
        _main(argv)


def _main(argv: Sequence[str]) -> None:
    from dflash_jax.cli import ending_when_interrupted, exit_with, experiment_from_flags
    from dflash_jax.cli_help import config_parser

    parser = config_parser("dflash_jax.data.features", __doc__)
    parser.add_argument("--out", required=True, help="folder to write into")
    parser.add_argument("--shard_gb", type=float, default=SHARD_GB, help="size of a shard; a kill costs one")
    options, rest = parser.parse_known_args(argv[1:])
    logging.basicConfig(format="%(message)s")
    logging.getLogger("dflash_jax").setLevel(logging.INFO)
    try:
        if not 0 < options.shard_gb < float("inf"):
            raise ValueError(f"--shard_gb={options.shard_gb}: must be more than 0, and finite")
        experiment = experiment_from_flags([argv[0], *rest])
    except ValueError as error:
        exit_with(error)
    from dflash_jax.processes import end_on_sigterm, ending_at_once, is_first, join

    with ending_at_once(), ending_when_interrupted(goes_on=True):
        try:
            if join():
                end_on_sigterm()
            if not is_first():
                logging.getLogger("dflash_jax").setLevel(logging.WARNING)
            table = run(experiment, options.out, shard_bytes=int(options.shard_gb * 1e9))
        except (ValueError, OSError) as error:
            exit_with(error)
    if table:
        print(table)


if __name__ == "__main__":
    main(sys.argv)

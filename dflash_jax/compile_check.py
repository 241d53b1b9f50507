"""Compiles an experiment for hardware that is not here: does it fit, and what will a step cost.

    python -m dflash_jax.compile_check --config configs/qwen3_8b.py --hardware v5p:2x2x2
    python -m dflash_jax.compile_check --config configs/qwen3_8b.py --hardware v6e:2x4,h200x8 --target_layers 8

The real programs of training and decoding (feature pass, training step, a decoding round) are compiled by the
compilers of TPUs and GPUs, which need neither. Memory is what they plan on each device; FLOPs and collectives are
counted in their optimised programs. Times are the largest of three quotients (FLOPs, bytes, collectives by the chip's
published rates) and no measurements. Exit status 1: something does not fit. Slices of TPUs, and GPUs of one host.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from dflash_jax.checkpoints.huggingface import LoadedTarget, read_target_config
from dflash_jax.cli import ending_when_interrupted, exit_with, experiment_from_flags, writing
from dflash_jax.cli_help import config_parser
from dflash_jax.compile_report import Program, report
from dflash_jax.compiled_work import work_of
from dflash_jax.config import ConfigError, ExperimentConfig
from dflash_jax.decoding.flat import flatten
from dflash_jax.decoding.loop import LoopSettings, LoopState, prefill, run_rounds
from dflash_jax.decoding.request import cache_bucket
from dflash_jax.decoding.sampling import Sampling
from dflash_jax.hardware import Hardware, hardware
from dflash_jax.models.drafter import Drafter
from dflash_jax.models.family import DrafterConfig, TargetConfig, parse_target_config
from dflash_jax.models.target import Target
from dflash_jax.sharding import parameter_shardings, spec_of
from dflash_jax.training.setup import drafter_config, mesh_for, optimizer_of, step_settings
from dflash_jax.training.step import (
    Batch,
    VocabularyTables,
    context_taps,
    hidden_and_taps,
    initial_state,
    train_step,
)

# config.json of targets by hub id, for machines that can't reach the hub
SHAPES = Path(__file__).parent.parent / "configs" / "targets"
PROGRAMS = ("features", "step", "decode")


class Models:
    """Target and drafter of an experiment as shapes, divided over a mesh."""

    def __init__(self, experiment: ExperimentConfig, target_config: TargetConfig, mesh: Mesh):
        self.experiment, self.mesh = experiment, mesh
        self.target_config = target_config
        target_dtype = experiment.model.target_dtype
        self.target = self.placed(nnx.eval_shape(lambda: Target(target_config, rngs=nnx.Rngs(0))), target_dtype)
        loaded = LoadedTarget(self.target, target_config, None, (), experiment.model.target, "")
        self.drafter_config: DrafterConfig = drafter_config(experiment.model, loaded)
        self.drafter = self.placed(nnx.eval_shape(lambda: Drafter(self.drafter_config, rngs=nnx.Rngs(0))), "float32")

    def placed(self, tree: Any, dtype: str | None = None) -> Any:
        """Shapes of parameters, with the dtype and where they live."""

        def place(leaf, sharding):
            kind = leaf.dtype if dtype is None else jnp.dtype(dtype)
            return jax.ShapeDtypeStruct(leaf.shape, kind, sharding=sharding)

        return jax.tree.map(place, tree, parameter_shardings(self.mesh, tree))

    def array(self, shape: tuple[int, ...], dtype, *meaning: str | None) -> Any:
        """The shape of an activation whose first axes mean this, as a ShapeDtypeStruct."""
        padded = (*meaning, *(None,) * (len(shape) - len(meaning)))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(self.mesh, spec_of(self.mesh, padded, shape)))


def feature_pass(models: Models) -> jax.stages.Lowered:
    """The target's pass over the rows of a step."""
    training, length = models.experiment.training, models.experiment.data.length_buckets[-1]
    tokens_BT = models.array((training.rows_per_step, length), jnp.int32, "rows")
    run = hidden_and_taps if training.loss == "teacher" else context_taps
    layers = models.drafter_config.target_layer_ids
    starts_BT = tokens_BT if models.experiment.data.packing else None
    return run.lower(models.target, tokens_BT, starts_BT, layers=layers, scan=training.scan_layers)


def training_step(models: Models) -> jax.stages.Lowered:
    """One update, with all its micro-batches."""
    experiment = models.experiment
    parts, T = experiment.training.accumulation, experiment.data.length_buckets[-1]
    B, D = experiment.training.rows_per_step // parts, models.target_config.hidden_size
    M = len(models.drafter_config.target_layer_ids)

    dtype, teacher = jnp.dtype(experiment.model.target_dtype), experiment.training.loss == "teacher"

    def rows(dtype, *sizes: int):
        return models.array((parts, B, *sizes), dtype, None, "rows")

    def features(*sizes: int):
        return models.array((parts, B, T, *sizes, D), dtype, None, "rows", "positions")

    hidden = features() if teacher else None
    shortlist = models.array((experiment.training.loss_tokens, D), dtype) if teacher else None
    starts = rows(jnp.int32, T) if experiment.data.packing else None
    batch = Batch(rows(jnp.int32, T), rows(bool, T), rows(jnp.int32), features(M), hidden, starts)
    optimizer = optimizer_of(experiment.optimizer, experiment.training.steps or 1000)
    state = models.placed(jax.eval_shape(lambda drafter: initial_state(drafter, optimizer), models.drafter))
    head = models.target.embedding if models.target.head is None else models.target.head
    tables = VocabularyTables(models.target.embedding.get_value(), head.get_value(), shortlist)
    settings = step_settings(experiment, models.drafter_config)._replace(compute_dtype="bfloat16")
    return train_step.lower(state, tables, batch, settings=settings, optimizer=optimizer)


def decoding_round(models: Models, *, batch: int, context: int) -> jax.stages.Lowered:
    """Rounds of the decoding loop at the trained width, both models in the target's dtype."""
    width, dtype = models.drafter_config.block_size, models.experiment.model.target_dtype
    drafter = models.placed(models.drafter, dtype)
    length = cache_bucket(context + width)
    integers = models.array((batch,), jnp.int32)
    floats = models.array((batch,), jnp.float32)
    sampling = Sampling(
        keys=jax.eval_shape(lambda: jax.vmap(jax.random.key)(jnp.zeros(batch, jnp.uint32))),
        temperature=floats,
        top_k=integers,
        top_p=floats,
    )
    settings = LoopSettings(width=width, stop_tokens=(0,))
    prompts = models.array((batch, 32), jnp.int32)
    start = jax.eval_shape(
        lambda *arrays: prefill(*arrays, settings=settings._replace(width=1), cache_length=length)[0],
        *(models.target, drafter, prompts, integers, integers, sampling),
    )

    def place(path, leaf):
        cached = "cache" in jax.tree_util.keystr(path)
        return models.array(leaf.shape, leaf.dtype, *(("rows", "heads") if cached else ()))

    state: LoopState = jax.tree_util.tree_map_with_path(place, start)
    number = jax.ShapeDtypeStruct((), jnp.int32)
    return run_rounds.lower(flatten(models.target, drafter), state, number, number, settings=settings)


def sizes_of(models: Models, *, batch: int, context: int) -> dict[str, str]:
    """For what rows each program is compiled, in words."""
    training, length = models.experiment.training, models.experiment.data.length_buckets[-1]
    width, parts = models.drafter_config.block_size, training.accumulation
    return {
        "features": f"{training.rows_per_step} rows of {length} tokens",
        "step": f"{parts} × {training.rows_per_step // parts} rows of {length} tokens, "
        f"{training.anchors_per_row} anchors × {width} slots a row",
        "decode": f"batch {batch}, width {width}, caches of {cache_bucket(context + width)} positions",
    }


def compiled(
    name: str, sizes: str, lower: Callable[[], jax.stages.Lowered], target: Hardware, dump: str | None = None
) -> Program:
    """Compiles one program and reads what the compiler says of it. sizes: as in Program. dump: a folder for its
    text."""
    begun = time.monotonic()
    try:
        program = lower().compile(compiler_options=target.options)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return Program(name, sizes, time.monotonic() - begun, refused=str(error).strip().splitlines()[0])
    seconds = time.monotonic() - begun
    memory: Any = program.memory_analysis()
    text = program.as_text() or ""
    if dump:
        with writing("--dump", dump):
            (Path(dump) / f"{name}.{target.name.replace(':', '-')}.hlo").write_text(text, encoding="utf-8")
    return Program(
        name=name,
        sizes=sizes,
        seconds=seconds,
        given=memory.argument_size_in_bytes,
        temporary=memory.temp_size_in_bytes,
        results=memory.output_size_in_bytes - memory.alias_size_in_bytes,
        work=work_of(text),
    )


def resident(models: Models) -> dict[str, float]:
    """Bytes on each device that stay for the whole run, by kind."""
    optimizer = optimizer_of(models.experiment.optimizer, 1000)
    state = models.placed(jax.eval_shape(lambda drafter: initial_state(drafter, optimizer), models.drafter))
    training, T = models.experiment.training, models.experiment.data.length_buckets[-1]
    arrays = len(models.drafter_config.target_layer_ids) + (training.loss == "teacher")
    features = models.array(
        (training.rows_per_step, T, arrays, models.target_config.hidden_size),
        jnp.dtype(models.experiment.model.target_dtype),
        *("rows", "positions"),
    )
    kinds = {"target": models.target, "drafter": state.drafter, "moments": state.optimizer, "features": features}
    return {kind: sum(map(_device_bytes, jax.tree.leaves(tree))) for kind, tree in kinds.items()}


def _device_bytes(leaf: jax.ShapeDtypeStruct) -> int:
    shape = leaf.sharding.shard_shape(leaf.shape)
    size = leaf.dtype.itemsize
    for axis in shape:
        size *= axis
    return size


def known_target(source: str, file: str | None) -> TargetConfig:
    """The target's description: from a file, a folder or the hub, or from the shapes that come with the configs."""
    bundled = SHAPES / f"{source.replace('/', '--')}.json"
    chosen = Path(file) if file else bundled if bundled.is_file() and not Path(source).is_dir() else None
    if chosen is None:
        return read_target_config(source)
    try:
        return parse_target_config(json.loads(chosen.read_text(encoding="utf-8")))
    except OSError as error:
        raise ConfigError(f"--target_config={chosen}: {error.strerror}") from error
    except ValueError as error:  # no JSON, or not of a target that is known
        raise ConfigError(f"{chosen}: {error}") from error


def check(experiment: ExperimentConfig, config: TargetConfig, target: Hardware, mesh: Mesh, options) -> bool:
    """Compiles the programs that were asked for, prints the report, and says whether all fit."""
    models = Models(experiment, config, mesh)
    decoded = {"batch": options.decode_batch, "context": options.decode_context}
    known = {
        "features": lambda: feature_pass(models),
        "step": lambda: training_step(models),
        "decode": lambda: decoding_round(models, **decoded),
    }
    sizes, names = sizes_of(models, **decoded), options.programs.split(",")
    with jax.set_mesh(mesh):
        programs = [compiled(name, sizes[name], known[name], target, options.dump) for name in names]
    text, fits = report(resident(models), mesh, programs, target)
    print(text, flush=True)
    return fits


def _check_options(options: argparse.Namespace) -> None:
    if unknown := set(options.programs.split(",")) - set(PROGRAMS):
        raise ConfigError(f"--programs={options.programs}: no {', '.join(sorted(unknown))}; use {', '.join(PROGRAMS)}")
    for name in ("target_layers", "decode_batch", "decode_context"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name}={value}: must be at least 1")
    if options.dump and not Path(options.dump).is_dir():
        raise ConfigError(f"--dump={options.dump}: there is no such folder")


def _with_taps_in(experiment: ExperimentConfig, layers: int) -> ExperimentConfig:
    """As many taps as before, where there are layers enough, spread over a target of so many layers."""
    count = min(len(experiment.model.target_layer_ids) or experiment.model.num_taps, layers)
    taps = tuple(round(index * (layers - 1) / max(count - 1, 1)) for index in range(count))
    return dataclasses.replace(experiment, model=dataclasses.replace(experiment.model, target_layer_ids=taps))


def _look_for_no_devices() -> None:
    """Nothing runs here but compilers: those of accelerators shall not complain that these are missing."""
    if not os.environ.get("JAX_PLATFORMS"):
        jax.config.update("jax_platforms", "cpu")
    # libtpu does so at any level of logging, unless it is told that this is a host of TPUs.
    os.environ.setdefault("TPU_HOST_BOUNDS", "1,1,1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")


@ending_when_interrupted()
def main(argv: list[str]) -> None:
    _look_for_no_devices()
    parser = config_parser("dflash_jax.compile_check", __doc__)
    parser.add_argument("--hardware", required=True, help="names with commas, such as v5p:2x2x2,h200x8")
    parser.add_argument("--target_config", help="a config.json, in place of that of model.target")
    parser.add_argument("--target_layers", type=int, help="compile only so many of the target's layers")
    parser.add_argument("--programs", default=",".join(PROGRAMS), help=f"some of {', '.join(PROGRAMS)}")
    parser.add_argument("--decode_batch", type=int, default=1, help="rows of the decoding round")
    parser.add_argument("--decode_context", type=int, default=2048, help="tokens of its caches")
    parser.add_argument("--dump", help="a folder to write the optimised programs to")
    options, rest = parser.parse_known_args(argv[1:])
    logging.basicConfig(format="%(message)s")
    try:
        _check_options(options)
        experiment = experiment_from_flags([argv[0], *rest])
        config = known_target(experiment.model.target, options.target_config)
        if options.target_layers:
            if options.target_layers > config.num_layers:
                raise ConfigError(f"--target_layers={options.target_layers}: the target has {config.num_layers}")
            layers = f"{options.target_layers} of the target's {config.num_layers} layers"
            print(f"compiled with {layers} only: the whole needs more", flush=True)
            config = dataclasses.replace(config, num_layers=options.target_layers)
            experiment = _with_taps_in(experiment, options.target_layers)
        # All of them, before the first is compiled for.
        targets = [hardware(name) for name in options.hardware.split(",")]
        meshes = [mesh_for(experiment, config, target.devices) for target in targets]
        fits = [check(experiment, config, target, mesh, options) for target, mesh in zip(targets, meshes, strict=True)]
    except ValueError as error:
        exit_with(error)
    sys.exit(0 if all(fits) else 1)


if __name__ == "__main__":
    main(sys.argv)

"""Benchmark of a drafter: plain and speculative decoding of the same prompts, at several batch sizes and temperatures.

    python -m dflash_jax.evaluation.benchmark --config configs/smollm2_benchmark.py
    python -m dflash_jax.evaluation.benchmark --config configs/smollm2_benchmark.py --config.prompts.sets=my.jsonl

Prints tables laid out as the DFlash paper's, and writes results.json, table.md and plot.png (with matplotlib) into
config.output.directory: the first two after every group of cells, as unfinished.results.json and unfinished.table.md
until all are measured, so that a benchmark that is cut off keeps what it measured. What is being measured is told on
stderr. Both arms of a cell decode the same prompts with the same settings and seeds, in turn: once to compile, and then
decoding.repetitions times, of which the median time counts. Wrong settings or files: status 2.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import logging
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import jax

from dflash_jax.checkpoints.huggingface import LoadedDrafter, LoadedTarget, load_drafter, load_target, read_made_with
from dflash_jax.cli import ending_when_interrupted, exit_with, settings_from_flags, writing
from dflash_jax.cli_help import asks_for_help, help_on_fields
from dflash_jax.config_parts import ConfigError
from dflash_jax.data.chat_template import arguments_from_flag
from dflash_jax.data.presets import read_prompts
from dflash_jax.data.prompts import encode_prompts
from dflash_jax.decoding.generate import Generation, generate
from dflash_jax.evaluation.benchmark_config import PARTS, BenchmarkConfig, DecodingConfig, to_benchmark
from dflash_jax.evaluation.benchmark_files import RESULTS, UNFINISHED, check_writable, write
from dflash_jax.evaluation.benchmark_results import Arm, Cell, PromptSet, Results
from dflash_jax.evaluation.benchmark_tables import tables
from dflash_jax.evaluation.heldout import DecodingReport, decoding_report

logger = logging.getLogger("dflash_jax.evaluation.benchmark")  # __name__ is "__main__" when this is the command

EXAMPLE = "configs/smollm2_benchmark.py"
SETTLING_RUNS = 6  # at most: one for each width that "adaptive" may try, and one more


def run(config: BenchmarkConfig, on_cells: Callable[[Results], object] = lambda so_far: None) -> Results:
    """Measures every cell.

    Args:
        on_cells: called after every group of cells (one set, temperature and batch size) with the results so far, whose
            `complete` is False.

    Raises:
        ConfigError: a model or set can't be had, or does not fit; the message names the field.
    """
    target, drafter, widths = _loaded(config)
    sets = {source: prompts_of(source, config, target) for source in config.prompts.sets}
    name, decoding = config.models.drafter, config.decoding
    made_with = _named("models.drafter", name, lambda: read_made_with(name))
    results = Results(
        settings=dataclasses.asdict(config),
        device=_device(),
        platform=jax.default_backend(),
        jax_version=jax.__version__,
        matmul_precision=jax.config.jax_default_matmul_precision or "default",  # pyright: ignore[reportAttributeAccessIssue]
        target_fingerprint=target.fingerprint,
        drafter_width=drafter.config.block_size,
        vocab_size=target.config.vocab_size,
        draft_vocab_size=drafter.draft_vocab_size,
        template_arguments=arguments_from_flag(config.prompts.template_arguments),
        drafter_template_arguments=made_with.get("template_arguments"),
        sets=[_described(source, prompts) for source, prompts in sets.items()],
        cells=[],
        complete=False,
    )
    groups = list(itertools.product(sets.items(), decoding.temperatures, decoding.batch_sizes))
    for number, ((source, prompts), temperature, batch_size) in enumerate(groups, start=1):
        logger.info(
            "measuring %d of %d: %s, T %g, batch %d, plain and width %s",
            *(number, len(groups), source, temperature, batch_size, ", ".join(map(str, widths))),
        )
        new = measure(target, drafter, source, prompts, widths, temperature, batch_size, decoding)
        for cell in new:
            logger.info("%s", cell)
        results = dataclasses.replace(results, cells=[*results.cells, *new])
        if new:
            on_cells(results)
    if not results.cells:
        raise ConfigError(f"prompts.sets={config.prompts.sets}: all texts end with their first token; nothing is timed")
    return dataclasses.replace(results, complete=True)


def _loaded(config: BenchmarkConfig) -> tuple[LoadedTarget, LoadedDrafter, Sequence[int | Literal["adaptive"]]]:
    """Target, drafter and the widths to measure; errors as `run`."""
    models, decoding = config.models, config.decoding
    target = _named("models.target", models.target, lambda: load_target(models.target, dtype=models.target_dtype))
    drafter = _named(
        *("models.drafter", models.drafter),
        lambda: load_drafter(
            models.drafter, target=target, dtype=models.drafter_dtype, draft_vocabulary=models.draft_vocabulary
        ),
    )
    widths = decoding.widths or (drafter.config.block_size,)
    if any(width != "adaptive" and width > drafter.config.block_size for width in widths):
        raise ConfigError(
            f"decoding.widths={decoding.widths}: {models.drafter} was trained for {drafter.config.block_size}"
        )
    return target, drafter, widths


def prompts_of(source: str, config: BenchmarkConfig, target: LoadedTarget) -> list[list[int]]:
    """The prompts of a set as serving renders them; those that can't be used are reported.

    Raises:
        ConfigError: there is no such set, it has too few prompts for the largest batch, or there is no room for any.
    """
    if target.tokenizer is None:
        raise ConfigError(f"models.target={config.models.target!r} has no tokenizer to render prompts with")
    try:
        arguments = arguments_from_flag(config.prompts.template_arguments)
    except ValueError as error:
        raise ConfigError(str(error).replace("--template_arguments", "prompts.template_arguments")) from error
    context = target.config.max_position_embeddings
    if config.decoding.max_new_tokens >= context:
        raise ConfigError(
            f"decoding.max_new_tokens={config.decoding.max_new_tokens}: must be below {context}, the target's context"
        )
    conversations, report = _named("prompts.sets", source, lambda: read_prompts(source, limit=config.prompts.limit))
    encoded = encode_prompts(
        *(target.tokenizer, conversations, report),
        max_prompt_length=context - config.decoding.max_new_tokens,
        embedding_rows=target.config.vocab_size,
        template_arguments=arguments,
    )
    if report.skipped:
        logger.warning("%s", report.table())
    if len(encoded) < max(config.decoding.batch_sizes):
        raise ConfigError(
            f"decoding.batch_sizes={config.decoding.batch_sizes}: {source} gives {len(encoded)} prompts "
            f"(prompts.limit={config.prompts.limit}), too few to fill the largest batch"
        )
    return [prompt.ids for prompt in encoded]


def measure(
    target: LoadedTarget,
    drafter: LoadedDrafter,
    source: str,
    prompts: Sequence[Sequence[int]],
    widths: Sequence[int | Literal["adaptive"]],
    temperature: float,
    batch_size: int,
    decoding: DecodingConfig,
) -> list[Cell]:
    """One cell a width, all against the same runs of plain decoding.

    None, with a warning, where every text ends with its first token: prefill gives that, so there is nothing to time.
    """
    options = {
        "max_new_tokens": decoding.max_new_tokens,
        "temperature": temperature,
        "seed": decoding.seed,
        "batch_size": batch_size,
    }
    arms: dict[int | str, dict[str, Any]] = {1: {}}
    arms |= {width: {"drafter": drafter, "width": width, "proposals": decoding.proposals} for width in widths}
    runs: dict[int | str, list[list[Generation]]] = {width: [] for width in arms}
    # In turn, so that a machine that grows slower does so for all arms.
    for number, run in enumerate((generate, *[_settled_run] * decoding.repetitions)):
        for width, arm in arms.items():
            began = time.perf_counter()
            runs[width].append(run(target, prompts, **arm, **options))
            _tell(number, decoding.repetitions, width, time.perf_counter() - began)
    timed = {width: all_runs[1:] for width, all_runs in runs.items()}
    plain = timed[1][0]
    if not any(row.acceptance_lengths for row in plain):
        logger.warning("prompts.sets=%r: every text ends with its first token; there is nothing to time", source)
        return []
    return [
        Cell(
            source=source,
            temperature=temperature,
            batch_size=batch_size,
            width=width,
            baseline=_arm(timed[1]),
            dflash=_arm(timed[width]),
            identical=sum(a.tokens == b.tokens for a, b in zip(plain, timed[width][0], strict=True)),
            acceptance=_acceptance(timed[width][0], width, drafter),
        )
        for width in widths
    ]


def _tell(number: int, repetitions: int, width: int | str, seconds: float) -> None:
    """A sign of life after each run of an arm; run 0 is the one that compiles."""
    which = f"run {number} of {repetitions}" if number else "compiling run"
    arm = "plain" if width == 1 else f"width {width}"
    logger.info("  %s, %s: %.1f s", which, arm, seconds)


def _acceptance(rows: Sequence[Generation], width: int | Literal["adaptive"], drafter: LoadedDrafter) -> DecodingReport:
    if width == "adaptive":
        return decoding_report(rows, drafter.model.max_width, adaptive=True)
    return decoding_report(rows, width)


def _settled_run(target: LoadedTarget, prompts: Sequence[Sequence[int]], **options) -> list[Generation]:
    """A run that compiled nothing: the adaptive width may try one late, and the first rounds of a program are slow even
    when its compilation is left out."""
    for _ in range(SETTLING_RUNS):
        rows = generate(target, prompts, **options)
        if not rows[0].stats.compile_seconds:
            break
    return rows


def _arm(runs: Sequence[Sequence[Generation]]) -> Arm:
    """What the runs of one arm gave: medians of their times, and the counts of the first, which are those of all but
    where the width is adaptive."""
    stats, rows = [run[0].stats for run in runs], runs[0]
    return Arm(
        tokens=sum(len(row.tokens) for row in rows),
        decoded_tokens=sum(sum(row.acceptance_lengths) for row in rows),
        batch_rounds=stats[0].batch_rounds,
        decode_seconds=statistics.median(run.decode_seconds for run in stats),
        prefill_seconds=statistics.median(run.prefill_seconds for run in stats),
        decode_seconds_of_runs=[run.decode_seconds for run in stats],
    )


def _described(source: str, prompts: Sequence[Sequence[int]]) -> PromptSet:
    lengths = [len(prompt) for prompt in prompts]
    digest = hashlib.sha256(json.dumps([list(prompt) for prompt in prompts]).encode()).hexdigest()
    return PromptSet(source, len(prompts), min(lengths), statistics.mean(lengths), max(lengths), digest)


def _device() -> str:
    """What is decoded on. JAX calls every CPU "cpu", so its model is asked for elsewhere."""
    device = jax.devices()[0]
    cpuinfo = Path("/proc/cpuinfo")
    if device.platform != "cpu" or not cpuinfo.is_file():
        return device.device_kind
    lines = [line.partition(":") for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()]
    models = [value.strip() for name, _, value in lines if name.strip() == "model name"]
    return f"{len(models)} × {models[0]}" if models else device.device_kind


def _named(field: str, value: str, load):
    """What `load` gives; its error names the field."""
    try:
        return load()
    except (ValueError, OSError) as error:
        raise ConfigError(f"{field}={value!r}: {error}") from error


def _keep(results: Results, directory: Path) -> None:
    """Writes what is measured so far. A file that can't be written now is told, and does not end the benchmark."""
    try:
        write(results, directory)
    except OSError as error:
        logger.warning("output.directory=%r: not written yet: %s", str(directory), error)
    else:
        logger.info("%d cells so far are in %s", len(results.cells), directory / (UNFINISHED + RESULTS))


@ending_when_interrupted()
def main(argv: list[str]) -> None:
    if asks_for_help(argv):
        print(__doc__, help_on_fields(PARTS), sep="\n")
        return
    logging.basicConfig(format="%(message)s", force=True)  # a library that was imported has set up its own
    logging.getLogger("dflash_jax").setLevel(logging.INFO)
    try:
        config = to_benchmark(settings_from_flags(argv, PARTS, example=EXAMPLE))
        directory = Path(config.output.directory)
        with writing("output.directory", directory):
            check_writable(directory)
        results = run(config, lambda so_far: _keep(so_far, directory))
        print(tables(results))  # first: whatever becomes of the files, it was measured
        with writing("output.directory", directory):
            write(results, directory)
    except ValueError as error:  # wrong settings, files or models; anything else is a bug and keeps its traceback
        exit_with(error)


if __name__ == "__main__":
    main(sys.argv)

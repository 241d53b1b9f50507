"""The tables of a benchmark in Markdown, laid out as in the DFlash paper (arXiv 2602.06036), so that they compare."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence

from dflash_jax.evaluation.benchmark_results import Cell, Results


def tables(results: Results) -> str:
    """All tables, headed by what was measured where."""
    parts = [_heading(results), _main_table(results), _concurrency_table(results), _acceptance_table(results)]
    return "\n\n".join([*parts, _verdict(results.cells)])


def _heading(results: Results) -> str:
    models, decoding = results.settings["models"], results.settings["decoding"]
    lines = [
        f"# {models['drafter']} for {models['target']}",
        "",
        *["**Not finished: only some of the cells are measured.**", ""] * (not results.complete),
        f"- device: {results.device} ({results.platform}), JAX {results.jax_version}, matrix products at precision "
        f"{results.matmul_precision}",
        f"- dtype: target {models['target_dtype']}, drafter {models['drafter_dtype']}",
        f"- at most {decoding['max_new_tokens']} new tokens, seed {decoding['seed']}, {decoding['proposals']} "
        f"proposals, timed runs (median): {decoding['repetitions']}, after one that compiles",
    ]
    lines += [
        f"- {part.source}: {part.prompts} prompts of {part.shortest} to {part.longest} tokens "
        f"({part.mean_length:.0f} on average)"
        for part in results.sets
    ]
    if results.draft_vocab_size is not None:
        lines.append(f"- draft vocabulary: {results.draft_vocab_size:,} of {results.vocab_size:,} tokens")
    if decoding["proposals"] == "sampled":
        lines.append(
            "- sampled proposals draw other texts, equally likely: identical ones are due at temperature 0 only"
        )
    ours, theirs = results.template_arguments, results.drafter_template_arguments
    recorded = "not recorded in its folder" if theirs is None else json.dumps(theirs)
    lines.append(f"- chat template arguments: this run {json.dumps(ours)}, the drafter's training data {recorded}")
    if theirs is not None and theirs != ours:
        lines.append("- **The drafter was trained with other template arguments: expect fewer accepted tokens.**")
    lines += [
        "",
        "τ is the acceptance length: tokens a round gives, the target's own token counted, over all rounds. Speed "
        "is that of decoding: prefill, its token and compilation are left out. Break-even is the τ from which on "
        "rounds of the measured cost beat plain decoding. Accepted/drafted is of all proposals; of an adaptive width, "
        "of those that were verified, and slots that no round verified show 0.00.",
    ]
    return "\n".join(lines)


def _main_table(results: Results) -> str:
    """Methods under temperatures, sets in columns (paper, table 1), at the smallest batch."""
    batch = min(cell.batch_size for cell in results.cells)
    sources = [part.source for part in results.sets]
    header = ["Temperature", "Method"]
    header += [f"{source} {what}" for source in [*sources, "Mean"] for what in ("Speedup", "τ")]
    rows = []
    for temperature in sorted({cell.temperature for cell in results.cells}):
        rows.append([f"{temperature:g}", "Baseline", *["1.00", "1.00"] * (len(sources) + 1)])
        for width in _widths(results.cells):
            cells = {
                cell.source: (cell.speedup, cell.acceptance.acceptance_length)
                for cell in results.cells
                if (cell.temperature, cell.width, cell.batch_size) == (temperature, width, batch)
            }
            pairs = [cells.get(source) for source in sources]
            speedups, lengths = zip(*cells.values(), strict=True) if cells else ((), ())
            pairs.append(None if None in pairs else (statistics.mean(speedups), statistics.mean(lengths)))
            row = [f"{temperature:g}", f"DFlash ({width})"]
            for pair in pairs:
                row += ["–", "–"] if pair is None else [f"{value:.2f}" for value in pair]
            rows.append(row)
    return f"## Speedup and τ, batch {batch}\n\n" + _markdown(header, rows)


def _concurrency_table(results: Results) -> str:
    """Rows by concurrency under set, temperature and width (paper, table 3)."""
    header = ["Set", "Temperature", "Width", "Concurrency", "Baseline tok/s", "DFlash tok/s", "Speedup", "τ"]
    header += ["Break-even τ", "Identical texts"]
    prompts = {part.source: part.prompts for part in results.sets}
    rows = [
        [
            *(cell.source, f"{cell.temperature:g}", str(cell.width), str(cell.batch_size)),
            *(f"{cell.baseline.tokens_per_second:.1f}", f"{cell.dflash.tokens_per_second:.1f}"),
            *(f"{cell.speedup:.2f}", f"{cell.acceptance.acceptance_length:.2f}", _break_even(cell)),
            f"{cell.identical} of {prompts[cell.source]}",
        ]
        for cell in sorted(results.cells, key=lambda cell: _place(results, cell))
    ]
    return "## By concurrency\n\n" + _markdown(header, rows)


def _acceptance_table(results: Results) -> str:
    """How much of the proposals is accepted, slot by slot over the rounds that verified it, at the smallest batch."""
    batch = min(cell.batch_size for cell in results.cells)
    widest = 1 + max(len(cell.acceptance.position_acceptance) for cell in results.cells)
    header = ["Set", "Temperature", "Width", "τ", "Rounds", "Accepted/drafted"]
    header += [f"Slot {slot}" for slot in range(1, widest)]
    rows = []
    for cell in sorted(results.cells, key=lambda cell: _place(results, cell)):
        if cell.batch_size == batch:
            part = cell.acceptance
            shares = [part.accepted_share, *part.position_acceptance]
            row = [cell.source, f"{cell.temperature:g}", str(cell.width), f"{part.acceptance_length:.2f}"]
            row += [str(part.rounds), *(f"{share:.2f}" for share in shares)]
            rows.append(row + ["–"] * (len(header) - len(row)))
    return f"## Slots accepted, of the rounds that verified them, batch {batch}\n\n" + _markdown(header, rows)


def _verdict(cells: Sequence[Cell]) -> str:
    """Says so where drafting does not pay."""
    slower = [cell for cell in cells if cell.speedup < 1]
    if not slower:
        return f"Faster than plain decoding in all {len(cells)} cells."
    worst = min(slower, key=lambda cell: cell.speedup)
    needed = f", where rounds of this cost need {_break_even(worst)} to break even" if worst.break_even else ""
    return f"**Slower than plain decoding in {len(slower)} of {len(cells)} cells**, most of all: {worst}{needed}."


def _place(results: Results, cell: Cell) -> tuple:
    sources = [part.source for part in results.sets]
    return sources.index(cell.source), *cell.place


def _widths(cells: Sequence[Cell]) -> list[int | str]:
    """All widths, each once, "adaptive" last."""
    return list(dict.fromkeys(cell.width for cell in sorted(cells, key=lambda cell: cell.place[1:])))


def _break_even(cell: Cell) -> str:
    return "–" if cell.break_even is None else f"{cell.break_even:.2f}"


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)

"""The figure of a benchmark: acceptance length, speed and speedup over the batch size, and acceptance slot by slot."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from dflash_jax.evaluation.benchmark_results import Results


def plot(results: Results, path: Path) -> None:
    """Draws the figure into a file."""
    figure = Figure(figsize=(11, 8), layout="constrained")
    (lengths, speeds), (speedups, slots) = figure.subplots(2, 2)
    batches = sorted({cell.batch_size for cell in results.cells})
    ordered = sorted(results.cells, key=lambda cell: (cell.source, *cell.place))
    for key in dict.fromkeys((cell.source, cell.temperature, cell.width) for cell in ordered):
        cells = [cell for cell in ordered if (cell.source, cell.temperature, cell.width) == key]
        label = f"{key[0]}, T {key[1]:g}, width {key[2]}"
        sizes = [cell.batch_size for cell in cells]
        [line] = lengths.plot(sizes, [cell.acceptance.acceptance_length for cell in cells], "o-", label=label)
        color = line.get_color()
        if key[2] != "adaptive":
            lengths.plot(sizes, [cell.break_even for cell in cells], ":", color=color)
        speeds.plot(sizes, [cell.dflash.tokens_per_second for cell in cells], "o-", color=color)
        speeds.plot(sizes, [cell.baseline.tokens_per_second for cell in cells], "x--", color=color)
        speedups.plot(sizes, [cell.speedup for cell in cells], "o-", color=color)
        shares = cells[0].acceptance.position_acceptance
        slots.plot(range(1, len(shares) + 1), shares, "o-", color=color)
    speedups.axhline(1.0, color="grey", linewidth=1)
    titles = {
        lengths: "Acceptance length (dotted: break-even)",
        speeds: "Tokens a second (dashed: plain decoding)",
        speedups: "Speedup",
    }
    for axes, title in titles.items():
        axes.set(title=title, xlabel="prompts decoded together", xscale="log")
        axes.xaxis.set(major_locator=FixedLocator(batches), minor_locator=NullLocator(), major_formatter="{x:g}")
    slots.set(title=f"Slots accepted where verified, batch {batches[0]}", xlabel="slot", ylim=(0, 1))
    lengths.legend(fontsize="small")
    models = results.settings["models"]
    figure.suptitle(
        f"{models['drafter']} for {models['target']} · {results.device} · {models['target_dtype']} · at most "
        f"{results.settings['decoding']['max_new_tokens']} new tokens"
    )
    figure.savefig(path, dpi=120)

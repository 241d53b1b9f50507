"""The files of a benchmark: written after every group of cells, so that one that is cut off keeps what it measured.

Until all is measured they have names of their own, and what an earlier benchmark left stays.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from dflash_jax.evaluation.benchmark_results import Results
from dflash_jax.evaluation.benchmark_tables import tables

RESULTS, TABLES, PLOT = "results.json", "table.md", "plot.png"  # in output.directory
UNFINISHED = "unfinished."  # before the names of the first two, while there is more to measure


def check_writable(directory: Path) -> None:
    """Raises OSError, before anything is measured, where the files of `write` can't be made; makes the folder."""
    directory.mkdir(parents=True, exist_ok=True)
    for name in (RESULTS, TABLES, PLOT, UNFINISHED + RESULTS, _temporary(RESULTS)):
        before = (directory / name).exists()
        with (directory / name).open("ab"):
            pass
        if not before:
            (directory / name).unlink()


def write(results: Results, directory: Path) -> None:
    """Writes results.json, table.md and, of complete results and with matplotlib, plot.png.

    The first two are never seen half-written, and named UNFINISHED while they are.
    """
    directory.mkdir(parents=True, exist_ok=True)
    prefix = "" if results.complete else UNFINISHED
    content = json.dumps(results.to_dict(), indent=2, ensure_ascii=False, allow_nan=False)
    _replace(directory / (prefix + RESULTS), content + "\n")
    _replace(directory / (prefix + TABLES), tables(results) + "\n")
    if results.complete:
        for old in (UNFINISHED + RESULTS, UNFINISHED + TABLES, PLOT):
            (directory / old).unlink(missing_ok=True)
        _plot(results, directory / PLOT)


def _temporary(name: str) -> str:
    return name + ".tmp"


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(_temporary(path.name))
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _plot(results: Results, path: Path) -> None:
    try:
        from dflash_jax.evaluation.benchmark_plot import plot
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        print("no plot.png: matplotlib is not installed (pip install 'dflash-jax[benchmark]')", file=sys.stderr)
    else:
        plot(results, path)

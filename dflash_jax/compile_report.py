"""What compilers say of some programs, as a table: memory, work, the least time, and whether all of it fits."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from jax.sharding import Mesh

from dflash_jax.compiled_work import Work
from dflash_jax.hardware import Chip, Hardware

ROOM = 0.95  # of a device's memory: the rest is the runtime's


@dataclasses.dataclass(frozen=True)
class Program:
    """One compiled program. sizes: for what rows, in words. seconds: of compiling. memory, in bytes on each device: of
    what it is given, temporary, and of results that don't take an argument's place. refused: what the compiler said
    that found no room for it; there are no figures then."""

    name: str
    sizes: str
    seconds: float
    given: float = 0.0
    temporary: float = 0.0
    results: float = 0.0
    work: Work = dataclasses.field(default_factory=Work)
    refused: str = ""

    def times(self, chip: Chip) -> dict[str, float]:
        """Seconds that FLOPs, memory and links each need at least."""
        return {
            "compute": self.work.flops / chip.flops,
            "memory": self.work.bytes_moved / chip.memory_rate,
            "links": sum(self.work.bytes.values()) / chip.link_rate,
        }


_COLUMNS = ("program", "temporary GB", "results GB", "peak GB", "fits", "TFLOP", "GB moved", "GB over links")
_COLUMNS += ("least ms", "bound by", "compiled in")


def report(kept: Mapping[str, float], mesh: Mesh, programs: Sequence[Program], target: Hardware) -> tuple[str, bool]:
    """The tables, and whether everything fits. kept: bytes on each device that training holds, by kind."""
    chip = target.chip
    sizes = ", ".join(f"{name} {size}" for name, size in mesh.shape.items())
    room, total = ROOM * chip.memory, sum(kept.values())
    lines = [
        f"{target.name}: mesh {sizes}; {chip.memory / 1e9:.0f} GB a device",
        f"kept on each device, GB: {', '.join(f'{kind} {_gb(size)}' for kind, size in kept.items())} = {_gb(total)}",
        "",
        _row(*_COLUMNS),
        "|---" * len(_COLUMNS) + "|",
    ]
    peaks = {program.name: _peak(program, total) for program in programs}
    too_large = {name for name, peak in peaks.items() if peak > room}
    for program in programs:
        figures = _figures(program, peaks[program.name], program.name not in too_large, chip)
        lines.append(_row(program.name, *figures, f"{program.seconds:.0f} s"))
    lines += map(_told, programs)
    if too_large - {"decode"}:
        lines.append(
            "Does not fit: raise mesh.fsdp (parameters, moments), training.accumulation, mesh.data or, for long rows, "
            "mesh.sequence (activations), or lower training.rows_per_step (features), training.loss_chunk."
        )
    if "decode" in too_large:
        lines.append("Decoding does not fit: raise mesh.tensor, or lower --decode_batch, --decode_context.")
    return "\n".join(lines), not too_large


def _peak(program: Program, kept: float) -> float:
    """Bytes on each device while it runs. kept: by training.

    Decoding is another process: it holds what it is given, both models and their caches, and nothing of training.
    """
    if program.refused:
        return math.inf
    return (program.given if program.name == "decode" else kept) + program.temporary + program.results


def _figures(program: Program, peak: float, fits: bool, chip: Chip) -> list[str]:
    """The cells between name and time."""
    if program.refused:
        return ["–", "–", "–", "NO", *["–"] * 5]
    times, work = program.times(chip), program.work
    bound = max(times, key=lambda name: times[name])
    cost = (work.flops / 1e12, work.bytes_moved / 1e9, sum(work.bytes.values()) / 1e9, 1e3 * times[bound])
    memory = [_gb(program.temporary), _gb(program.results), _gb(peak), "yes" if fits else "NO"]
    return [*memory, *(f"{value:.3g}" for value in cost), bound]


def _told(program: Program) -> str:
    """What the table has no column for."""
    if program.refused:
        return f"{program.name}: {program.sizes}; the compiler found no room: {program.refused}"
    kinds = [f"{kind} ×{count} {_gb(program.work.bytes[kind])} GB" for kind, count in program.work.count.items()]
    held = f"; holds {_gb(program.given)} GB, both models and caches, in place of what is kept"
    collectives = f"collectives {', '.join(kinds) or 'none'}"
    return f"{program.name}: {program.sizes}; {collectives}{held if program.name == 'decode' else ''}"


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _gb(size: float) -> str:
    return f"{size / 1e9:.2f}"

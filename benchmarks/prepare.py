"""How fast chats are prepared, and in how much memory: rows a second, rows a second of one core, peak.

    python benchmarks/prepare.py --out /tmp/set                              # 100,000 chats of about 300 tokens
    taskset -c 0 python benchmarks/prepare.py --rows 20000 --workers 0       # on one core

Chats are random passages of Python's own reference, a question and an answer each, so that words repeat as they do in
English. They are written to a file first; the command `dflash_jax.data.prepare` is then run on it and timed as a whole,
from its start to its end, imports included. Before, it is run on the first chat alone, which tells what of that is its
start. Memory is that of all its processes together, sampled.
"""

import json
import os
import pydoc_data.topics
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from absl import app, flags

from dflash_jax.cli import parsed_flags

FLAGS = flags.FLAGS
flags.DEFINE_string("target", "smollm2-135m-instruct", "Whose tokenizer and chat template.")
flags.DEFINE_integer("rows", 100_000, "Chats.", lower_bound=5000)
flags.DEFINE_integer("workers", None, "Processes that render and tokenise; see the command.", lower_bound=0)
flags.DEFINE_string("out", None, "Keep the prepared set in this folder.")

PROMPT, ANSWER = 150, 950  # characters, on average


def write_chats(path: Path, rows: int) -> None:
    text = "\n".join(pydoc_data.topics.topics.values())
    draw = random.Random(0)

    def passage(average: int) -> str:
        start = draw.randrange(len(text) - 2 * average)
        return text[start : start + draw.randint(average // 2, average * 3 // 2)].strip() or "?"

    with path.open("w") as file:
        for row in range(rows):
            contents = {"user": passage(PROMPT), "assistant": passage(ANSWER)}
            messages = [{"role": role, "content": content} for role, content in contents.items()]
            file.write(json.dumps({"id": f"chat-{row}", "messages": messages}) + "\n")


class Run(NamedTuple):
    """Of a command: seconds, seconds of processors, and the bytes in memory at its peak, all processes together."""

    seconds: float
    processors: float
    peak: int


def run(command: list[str], stdout: int | None = None) -> Run:
    begun, before = time.monotonic(), processors_of_children()
    resident = peak = 0
    running = subprocess.Popen(command, stdout=stdout)
    while running.poll() is None:
        time.sleep(0.1)
        now = resident_of(running.pid)
        if now > 1.01 * resident:
            resident, peak = now, max(peak, memory_of(running.pid))
    if running.returncode:
        sys.exit(running.returncode)
    return Run(time.monotonic() - begun, processors_of_children() - before, peak)


def processors_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def resident_of(process: int) -> int:
    """Pages that a process and its descendants hold in memory, what they share counted as often as it is shared."""
    try:
        pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    except OSError:
        return 0  # it has ended
    return pages + sum(map(resident_of, children_of(process)))


def memory_of(process: int) -> int:
    """Bytes that a process and its descendants hold in memory, what they share counted once.

    Linux goes through all their pages for this, which takes time of the very cores that are measured. So it is asked
    only when there are more pages than before.
    """
    try:
        rollup = Path(f"/proc/{process}/smaps_rollup").read_text()
    except OSError:
        return 0  # it has ended
    share = next(line for line in rollup.splitlines() if line.startswith("Pss:"))
    return 1024 * int(share.split()[1]) + sum(map(memory_of, children_of(process)))


def children_of(process: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    except OSError:
        return []


def main(_):
    with tempfile.TemporaryDirectory() as scratch:
        chats = Path(scratch) / "chats.jsonl"
        write_chats(chats, FLAGS.rows)
        command = [sys.executable, "-m", "dflash_jax.data.prepare", f"--target={FLAGS.target}", f"--chats={chats}"]
        command += [f"--workers={FLAGS.workers}"] * (FLAGS.workers is not None)
        start = run([*command, f"--out={scratch}/one", "--limit=1"], stdout=subprocess.DEVNULL)
        whole = run([*command, f"--out={FLAGS.out or scratch + '/set'}"])
    seconds, processors = whole.seconds - start.seconds, whole.processors - start.processors
    print(
        f"{FLAGS.rows:,} chats on {len(os.sched_getaffinity(0))} cores: {rates(whole.seconds, whole.processors)}; "
        f"peak {whole.peak / 1e9:.2f} GB\n"
        f"one chat: {start.seconds:.1f} s, {start.processors:.1f} s of processors; without these: "
        f"{rates(seconds, processors)}"
    )


def rates(seconds: float, processors: float) -> str:
    return (
        f"{seconds:.1f} s, {FLAGS.rows / seconds:,.0f} a second; "
        f"{processors:.1f} s of processors, {FLAGS.rows / processors:,.0f} a second of one core"
    )


if __name__ == "__main__":
    app.run(main, flags_parser=parsed_flags)

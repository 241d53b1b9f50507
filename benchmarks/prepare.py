"""How fast chats are prepared, and in how much memory: rows a second, rows a second of one core, peak.

    python benchmarks/prepare.py --out /tmp/set                              # 100,000 chats of about 300 tokens
    taskset -c 0 python benchmarks/prepare.py --rows 20000 --workers 0       # on one core

Chats are random passages of Python's own reference, a question and an answer each, so that words repeat as they do in
English. They are written to a file first; the command `dflash_jax.data.prepare` is then run on it and timed as a whole,
from its start to its end, imports included. Memory is that of all its processes together, sampled.
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

from absl import app, flags

FLAGS = flags.FLAGS
flags.DEFINE_string("target", "smollm2-135m-instruct", "Whose tokenizer and chat template.")
flags.DEFINE_integer("rows", 100_000, "Chats.", lower_bound=1)
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


def memory_of(process: int) -> int:
    """Bytes that a process and its descendants hold in memory, what they share counted once."""
    try:
        children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
        rollup = Path(f"/proc/{process}/smaps_rollup").read_text()
    except OSError:
        return 0  # it has ended
    share = next(line for line in rollup.splitlines() if line.startswith("Pss:"))
    return 1024 * int(share.split()[1]) + sum(memory_of(int(child)) for child in children)


def main(_):
    with tempfile.TemporaryDirectory() as scratch:
        chats = Path(scratch) / "chats.jsonl"
        write_chats(chats, FLAGS.rows)
        out = FLAGS.out or f"{scratch}/set"
        command = [sys.executable, "-m", "dflash_jax.data.prepare", f"--target={FLAGS.target}", f"--chats={chats}"]
        command += [f"--out={out}"] + [f"--workers={FLAGS.workers}"] * (FLAGS.workers is not None)
        begun, peak = time.monotonic(), 0
        running = subprocess.Popen(command)
        while running.poll() is None:
            peak = max(peak, memory_of(running.pid))
            time.sleep(0.1)
        seconds = time.monotonic() - begun
    if running.returncode:
        sys.exit(running.returncode)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu, cores = used.ru_utime + used.ru_stime, len(os.sched_getaffinity(0))
    print(
        f"{FLAGS.rows:,} chats in {seconds:.1f} s on {cores} cores: {FLAGS.rows / seconds:,.0f} a second; "
        f"{cpu:.1f} s of processors: {FLAGS.rows / cpu:,.0f} a second of one core; peak {peak / 1e9:.2f} GB"
    )


if __name__ == "__main__":
    app.run(main)

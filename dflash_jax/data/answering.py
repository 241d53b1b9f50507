"""Answers prompts into a file, by whichever engine, and goes on where it was interrupted.

Answers are kept in OUT.part as they come, in any order; OUT appears at the end, rows in the order of the prompts.
"""

import collections
import contextlib
import dataclasses
import gzip
import json
import os
import time
from collections.abc import Callable, Container, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dflash_jax.data.answer_log import Answer, AnswerLog, check_same_settings
from dflash_jax.data.prompts import EncodedPrompt, row_seed
from dflash_jax.data.provenance import meta_path
from dflash_jax.data.report import ReadReport, SkippedRow

# Prompts are sorted by length inside windows of this many batches: little padding, and progress that can be trusted.
WINDOW_BATCHES = 32
# Batches that are decoded and kept together: few slots run empty at the end of a group, and a kill costs one group.
GROUP_BATCHES = 4
PROGRESS_SECONDS = 5.0
_IDS_FROM = {
    "engine": "token ids from the engine",
    "server": "token ids as the server sampled them",
    "text": "token ids of the server's text, which may differ from those it sampled",
}


@dataclasses.dataclass(frozen=True)
class NoAnswer:
    """A prompt that was given up, and why."""

    reason: str


Outcomes = list[tuple[str, Answer | NoAnswer]]

# (all prompts, ids of those answered before) → outcomes of the others by id; each list is kept before the next is made.
Engine = Callable[[Sequence[EncodedPrompt], Container[str]], Generator[Outcomes]]

# (token ids of each prompt, a seed for each) → the answer to each.
GenerateGroup = Callable[[list[list[int]], list[int]], Sequence[Answer]]


def in_groups(generate: GenerateGroup, *, batch_size: int, seed: int) -> Engine:
    """An engine that answers a group of prompts at a time.

    Which prompts make a group does not depend on what was answered before, so an interrupted run gives the rows of an
    uninterrupted one to the bit, even where rounding decides between two tokens.
    """

    def engine(prompts: Sequence[EncodedPrompt], answered: Container[str]) -> Generator[Outcomes]:
        for group in plan_groups([len(prompt.ids) for prompt in prompts], batch_size):
            todo = [prompts[row] for row in group if prompts[row].name not in answered]
            if todo:
                answers = generate([prompt.ids for prompt in todo], [row_seed(seed, prompt.name) for prompt in todo])
                yield [(prompt.name, answer) for prompt, answer in zip(todo, answers, strict=True)]

    return engine


def plan_groups(lengths: Sequence[int], batch_size: int) -> list[list[int]]:
    """Indices of the prompts of each group: neighbours in length within windows of WINDOW_BATCHES batches."""
    window, size = batch_size * WINDOW_BATCHES, batch_size * GROUP_BATCHES
    groups = []
    for first in range(0, len(lengths), window):
        rows = sorted(range(first, min(first + window, len(lengths))), key=lambda row: lengths[row])
        groups += [rows[i : i + size] for i in range(0, len(rows), size)]
    return groups


def answer_into(
    out: str | Path,
    prompts: Sequence[EncodedPrompt],
    report: ReadReport,
    engine: Engine,
    tokenizer,
    settings: Mapping[str, Any],
    *,
    notes: Mapping[str, Any] | None = None,
    say: Callable[[str], None] = print,
) -> str:
    """Answers prompts into the file `out`, resuming where an earlier call with the same settings was interrupted.

    Args:
      out: .jsonl or .jsonl.gz file to write.
      prompts, report: from `encode_prompts`; the report is brought up to date.
      engine: what answers.
      tokenizer: decodes the answers.
      settings: everything that decides what is written, JSON-able; compared on resuming and recorded.
      notes: recorded besides the settings, not compared.
      say: receives lines of progress.

    Returns:
      A table of what was done.

    Raises:
      ValueError: `out` or its .part file comes from other settings, no prompt is left to answer, or none was answered.
    """
    out = Path(out)
    if not prompts:
        raise ValueError(f"no prompt is left to answer\n{report.table()}")
    if out.exists():
        _check_finished(out, settings)
        return f"{out} is already complete"
    out.parent.mkdir(parents=True, exist_ok=True)
    part = Path(f"{out}.part")
    with AnswerLog(part, settings) as log:
        reasons, speed = _answer(prompts, engine, log, say)
        rows = _finished_rows(prompts, log.answers, reasons, tokenizer, report)
        if not rows:
            raise ValueError(f"no prompt was answered\n{report.table()}")
        counts = _counts(rows, report, [log.answers[row["id"]].ids_from for row in rows])
        _write_finished(out, rows, {**settings, **(notes or {}), "counts": counts})
        part.unlink()
    lines = [f"finished by {reason}: {n:,}" for reason, n in counts["finish_reasons"].items()]
    lines += [f"{_IDS_FROM[source]}: {n:,}" for source, n in counts["ids_from"].items()]
    lines += [f"{counts['answer_tokens']:,} answer tokens, {counts['prompt_tokens']:,} prompt tokens; {speed}"]
    return "\n".join([report.table(), *(f"  {line}" for line in lines), f"  written to {out}"])


def _answer(
    prompts: Sequence[EncodedPrompt], engine: Engine, log: AnswerLog, say: Callable[[str], None]
) -> tuple[dict[str, str], str]:
    """Has the prompts answered that `log` lacks, and keeps the answers there. Returns why some have none, the speed."""
    done = sum(prompt.name in log.answers for prompt in prompts)
    if done:
        say(f"{done} of {len(prompts)} rows were answered before")
    reasons: dict[str, str] = {}
    start, rows, tokens = time.monotonic(), 0, 0
    said, warned = start, False
    with contextlib.closing(engine(prompts, log.answers)) as batches:
        for batch in batches:
            answers = [(name, outcome) for name, outcome in batch if isinstance(outcome, Answer)]
            if answers:
                log.append(answers)
            if not warned and any(answer.ids_from == "text" for _, answer in answers):
                warned = True
                say(f"note: {_IDS_FROM['text']}")
            reasons |= {name: outcome.reason for name, outcome in batch if isinstance(outcome, NoAnswer)}
            rows += len(batch)
            tokens += sum(len(answer.tokens) for _, answer in answers)
            now = time.monotonic()
            if now - said >= PROGRESS_SECONDS or done + rows == len(prompts):
                said = now
                say(_progress(done + rows, len(prompts), rows, tokens, now - start))
    seconds = time.monotonic() - start
    return reasons, f"{tokens / seconds:.1f} tokens/s in this run" if tokens else "nothing generated in this run"


def _progress(done: int, total: int, rows: int, tokens: int, seconds: float) -> str:
    left = (total - done) * seconds / rows
    return (
        f"{done}/{total} rows  {rows / seconds:.2f} rows/s  {tokens / seconds:.1f} tokens/s  "
        f"{int(left // 60)} min {int(left % 60)} s left"
    )


def _finished_rows(
    prompts: Sequence[EncodedPrompt],
    answers: Mapping[str, Answer],
    reasons: Mapping[str, str],
    tokenizer,
    report: ReadReport,
) -> list[dict]:
    """The rows of the finished file, in the order of the prompts. What has no answer, or no text in it, is reported."""
    rows = []
    for prompt in prompts:
        conversation, answer = prompt.conversation, answers.get(prompt.name)
        if answer is None:
            report.skipped.append(SkippedRow(conversation.line, prompt.name, reasons[prompt.name]))
            continue
        spoken = answer.tokens[:-1] if answer.finish_reason == "stop" else answer.tokens
        text = tokenizer.decode(spoken, skip_special_tokens=True)
        if not text.strip():
            report.skipped.append(SkippedRow(conversation.line, prompt.name, "the target's answer has no text"))
            continue
        row: dict[str, Any] = {"id": prompt.name}
        if conversation.split:
            row["split"] = conversation.split
        row["messages"] = [*conversation.messages, {"role": "assistant", "content": text}]
        row |= {"prompt_ids": prompt.ids, "answer_ids": answer.tokens, "finish_reason": answer.finish_reason}
        rows.append(row)
        report.add(len(prompt.ids) + len(answer.tokens), len(answer.tokens), answer.finish_reason == "length")
    report.rows_out = len(rows)
    return rows


def _write_finished(out: Path, rows: Sequence[Mapping[str, Any]], meta: Mapping[str, Any]) -> None:
    """Writes rows and meta file; `out` appears whole and last, so that where it exists it is complete."""
    data = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    _replace(meta_path(out), (json.dumps(meta, indent=2, ensure_ascii=False) + "\n").encode())
    # Without a time stamp the same rows give the same bytes.
    _replace(out, gzip.compress(data, mtime=0) if out.suffix == ".gz" else data)


def _replace(path: Path, data: bytes) -> None:
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _check_finished(out: Path, settings: Mapping[str, Any]) -> None:
    if not meta_path(out).is_file():
        raise ValueError(f"{out} exists and {meta_path(out).name} does not; move it away or choose another --out")
    before = json.loads(meta_path(out).read_text())
    check_same_settings({name: before.get(name) for name in settings}, settings, f"{out} exists and was made")


def _counts(rows: Sequence[Mapping[str, Any]], report: ReadReport, ids_from: Sequence[str]) -> dict[str, Any]:
    return {
        "rows_in": report.rows_in,
        "rows_out": report.rows_out,
        "skipped": dict(collections.Counter(row.reason for row in report.skipped)),
        "finish_reasons": dict(sorted(collections.Counter(row["finish_reason"] for row in rows).items())),
        "ids_from": dict(sorted(collections.Counter(ids_from).items())),
        "prompt_tokens": sum(len(row["prompt_ids"]) for row in rows),
        "answer_tokens": sum(len(row["answer_ids"]) for row in rows),
    }

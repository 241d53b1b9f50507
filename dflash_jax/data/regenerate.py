"""Lets the target answer prompts, so that a drafter can be trained on the target's own words.

    python -m dflash_jax.data.regenerate --target smollm2-135m-instruct --prompts prompts.jsonl \
        --out chats.jsonl.gz --batch_size 32 --max_new_tokens 160

Prompts are JSON lines with "messages" (dflash_jax.data.docstring_prompts makes some). Each row of --out holds the chat,
its "prompt_ids" and "answer_ids" token for token, and its "finish_reason"; beside it, OUT.meta.json records the target
and every setting. A run that is killed goes on where it stopped when the same command is given again; until it is
done, answers are kept in OUT.part.
"""

import collections
import dataclasses
import gzip
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import app, flags

from dflash_jax.data import chat, chat_template
from dflash_jax.data.answer_log import Answer, AnswerLog, check_same_settings
from dflash_jax.data.provenance import meta_path, tokenizer_hash
from dflash_jax.data.records import Conversation, ReadReport, SkippedRow, read_prompts

# Prompts are sorted by length inside windows of this many batches: little padding, and progress that can be trusted.
WINDOW_BATCHES = 32

# (token ids of each prompt, a seed for each) → (new tokens with the stop token kept, "stop" or "length") of each.
GenerateBatch = Callable[[list[list[int]], list[int]], Sequence[Answer]]


@dataclasses.dataclass(frozen=True)
class EncodedPrompt:
    """A conversation and the token ids that the target reads."""

    conversation: Conversation
    ids: list[int]


def encode_prompts(
    tokenizer,
    conversations: Sequence[Conversation],
    report: ReadReport,
    *,
    max_prompt_length: int,
    embedding_rows: int | None = None,
    template_arguments: Mapping[str, Any] | None = None,
    system: str | None = None,
) -> list[EncodedPrompt]:
    """Renders prompts as serving does. What can't be rendered or is too long moves to the report's skipped rows.

    Args:
      tokenizer: the target's.
      conversations: as `records.read_prompts` gives them, with its `report`, which is updated.
      max_prompt_length: in tokens.
      embedding_rows: rows of the target's embedding.
      template_arguments: further variables of the chat template.
      system: a system message for conversations that have none.

    Raises:
      ChatTemplateError: the template is missing or unsafe, which no row could survive.
    """
    chat_template.check_safe(tokenizer)
    encoded = []
    for conversation in conversations:
        if system and conversation.messages[0]["role"] != "system":
            messages = [{"role": "system", "content": system}, *conversation.messages]
            conversation = dataclasses.replace(conversation, messages=messages)
        try:
            ids = chat.render(
                tokenizer,
                conversation.messages,
                add_generation_prompt=True,
                template_arguments=template_arguments,
                embedding_rows=embedding_rows,
            )
            if len(ids) > max_prompt_length:
                raise ValueError(f"a prompt longer than {max_prompt_length} tokens")
            encoded.append(EncodedPrompt(conversation, ids))
        except ValueError as error:
            report.skipped.append(SkippedRow(conversation.line, conversation.id, str(error)))
    report.rows_out = len(encoded)
    return encoded


def plan_batches(lengths: Sequence[int], batch_size: int) -> list[list[int]]:
    """Indices of the prompts of each batch: neighbours in length within windows of WINDOW_BATCHES batches."""
    window = batch_size * WINDOW_BATCHES
    batches = []
    for first in range(0, len(lengths), window):
        rows = sorted(range(first, min(first + window, len(lengths))), key=lambda row: lengths[row])
        batches += [rows[i : i + batch_size] for i in range(0, len(rows), batch_size)]
    return batches


def answer_prompts(
    prompts: Sequence[EncodedPrompt],
    generate_batch: GenerateBatch,
    log: AnswerLog,
    *,
    batch_size: int,
    seed: int = 0,
    say: Callable[[str], None] = print,
) -> tuple[int, float]:
    """Answers the prompts that `log` lacks, batch by batch, and appends every batch to it.

    Batches don't depend on what was answered before, so an interrupted run gives the rows of an uninterrupted one.

    Returns:
      (new tokens, seconds) of this call.
    """
    done = sum(prompt.conversation.id in log.answers for prompt in prompts)
    if done:
        say(f"{done} of {len(prompts)} rows were answered before")
    start, rows, tokens = time.monotonic(), 0, 0
    for batch in plan_batches([len(prompt.ids) for prompt in prompts], batch_size):
        todo = [prompts[row] for row in batch if prompts[row].conversation.id not in log.answers]
        if not todo:
            continue
        names = [prompt.conversation.id for prompt in todo]
        answers = generate_batch([prompt.ids for prompt in todo], [_row_seed(seed, name) for name in names])
        log.append(list(zip(names, answers, strict=True)))
        rows += len(todo)
        tokens += sum(len(new) for new, _ in answers)
        say(_progress(done + rows, len(prompts), rows, tokens, time.monotonic() - start))
    return tokens, time.monotonic() - start


def _row_seed(seed: int, name: str) -> int:
    """A seed of 31 bits for one row, the same in whichever batch it is answered."""
    return int.from_bytes(hashlib.sha256(f"{seed}\x1f{name}".encode()).digest()[:4], "big") >> 1


def _progress(done: int, total: int, rows: int, tokens: int, seconds: float) -> str:
    left = (total - done) * seconds / rows
    return (
        f"{done}/{total} rows  {rows / seconds:.2f} rows/s  {tokens / seconds:.1f} tokens/s  "
        f"{int(left // 60)} min {int(left % 60)} s left"
    )


def finished_rows(
    prompts: Sequence[EncodedPrompt], answers: Mapping[str, Answer], tokenizer, report: ReadReport
) -> list[dict]:
    """The rows of the finished file, in the order of the prompts. An answer without text moves to the report."""
    rows = []
    for prompt in prompts:
        conversation = prompt.conversation
        tokens, finish_reason = answers[conversation.id]
        text = tokenizer.decode(tokens[:-1] if finish_reason == "stop" else tokens, skip_special_tokens=True)
        if not text.strip():
            report.skipped.append(SkippedRow(conversation.line, conversation.id, "the target's answer has no text"))
            continue
        row: dict[str, Any] = (
            {"id": conversation.id, "split": conversation.split} if conversation.split else {"id": conversation.id}
        )
        row["messages"] = [*conversation.messages, {"role": "assistant", "content": text}]
        rows.append(row | {"prompt_ids": prompt.ids, "answer_ids": tokens, "finish_reason": finish_reason})
    report.rows_out = len(rows)
    return rows


def write_finished(out: Path, rows: Sequence[Mapping[str, Any]], meta: Mapping[str, Any]) -> None:
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


def regenerate(
    out: str | Path,
    prompts: Sequence[EncodedPrompt],
    report: ReadReport,
    generate_batch: GenerateBatch,
    tokenizer,
    settings: Mapping[str, Any],
    *,
    batch_size: int,
    seed: int = 0,
    notes: Mapping[str, Any] | None = None,
    say: Callable[[str], None] = print,
) -> str:
    """Answers prompts into the file `out`, resuming where an earlier call with the same settings was interrupted.

    Args:
      out: .jsonl or .jsonl.gz file to write.
      prompts, report: from `encode_prompts`; the report is brought up to date.
      generate_batch: the engine.
      tokenizer: decodes the answers.
      settings: everything that decides what is written, JSON-able; compared on resuming and recorded.
      batch_size: prompts per call of the engine; may differ on resuming.
      seed: for sampling.
      notes: recorded besides the settings, not compared.
      say: receives lines of progress.

    Returns:
      A table of what was done.

    Raises:
      ValueError: `out` or its .part file comes from other settings, or nothing is left to answer.
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
        tokens, seconds = answer_prompts(prompts, generate_batch, log, batch_size=batch_size, seed=seed, say=say)
        rows = finished_rows(prompts, log.answers, tokenizer, report)
        counts = _counts(rows, report)
        write_finished(out, rows, {**settings, **(notes or {}), "counts": counts})
        part.unlink()
    speed = f"{tokens / seconds:.1f} tokens/s in this run" if tokens else "nothing generated in this run"
    extra = [f"finished by {reason}: {n:,}" for reason, n in counts["finish_reasons"].items()]
    extra += [f"{counts['answer_tokens']:,} answer tokens, {counts['prompt_tokens']:,} prompt tokens; {speed}"]
    return "\n".join([report.table(), *(f"  {line}" for line in extra), f"  written to {out}"])


def _check_finished(out: Path, settings: Mapping[str, Any]) -> None:
    if not meta_path(out).is_file():
        raise ValueError(f"{out} exists and {meta_path(out).name} does not; move it away or choose another --out")
    before = json.loads(meta_path(out).read_text())
    check_same_settings({name: before.get(name) for name in settings}, settings, f"{out} exists and was made")


def _counts(rows: Sequence[Mapping[str, Any]], report: ReadReport) -> dict[str, Any]:
    return {
        "rows_in": report.rows_in,
        "rows_out": report.rows_out,
        "skipped": dict(collections.Counter(row.reason for row in report.skipped)),
        "finish_reasons": dict(sorted(collections.Counter(row["finish_reason"] for row in rows).items())),
        "prompt_tokens": sum(len(row["prompt_ids"]) for row in rows),
        "answer_tokens": sum(len(row["answer_ids"]) for row in rows),
    }


def _define_flags() -> None:
    # Not at import: importing this module must not claim flag names in other programs.
    flags.DEFINE_string("target", None, "Hugging Face folder or hub id, or smollm2-135m-instruct.", required=True)
    flags.DEFINE_string("prompts", None, "JSON lines file (.jsonl, .jsonl.gz) of prompts.", required=True)
    flags.DEFINE_string("out", None, "File to write: .jsonl or .jsonl.gz.", required=True)
    flags.DEFINE_integer("batch_size", 32, "Prompts decoded together.", lower_bound=1)
    flags.DEFINE_integer("max_new_tokens", 160, "Longest answer, in tokens.", lower_bound=1)
    flags.DEFINE_float("temperature", 0.0, "0 is greedy.", lower_bound=0.0)
    flags.DEFINE_integer("seed", 0, "For sampling.")
    flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "Of the target's parameters.")
    flags.DEFINE_string("template_arguments", "{}", 'Chat template variables, JSON: {"enable_thinking": false}.')
    flags.DEFINE_string("system", None, "System message for prompts that have none.")
    flags.DEFINE_bool("strict", False, "Fail on bad rows of --prompts instead of skipping them.")
    flags.DEFINE_integer("limit", None, "Use no more than so many rows of --prompts.", lower_bound=1)


def _run(flag: flags.FlagValues) -> str:
    if not flag.out.endswith((".jsonl", ".jsonl.gz")):
        raise ValueError(f"--out={flag.out} is not a .jsonl or .jsonl.gz file")
    arguments = chat_template.arguments_from_flag(flag.template_arguments)
    conversations, report = read_prompts(flag.prompts, strict=flag.strict, limit=flag.limit)

    # Imported here: `data` itself knows no model, only this command does; and wrong flags are told without the wait.
    from dflash_jax.checkpoints.huggingface import load_target
    from dflash_jax.decoding.generate import generate

    target = load_target(flag.target, dtype=flag.dtype)
    if target.tokenizer is None:
        raise ValueError(f"--target={flag.target} has no tokenizer.json; prompts can't be rendered without")
    settings = {
        "target_fingerprint": target.fingerprint,
        "tokenizer_sha256": tokenizer_hash(target.tokenizer),
        "prompts_sha256": hashlib.sha256(Path(flag.prompts).read_bytes()).hexdigest(),
        "template_arguments": arguments,
        **{name: flag[name].value for name in ("system", "max_new_tokens", "temperature", "seed", "dtype", "limit")},
    }
    prompts = encode_prompts(
        target.tokenizer,
        conversations,
        report,
        max_prompt_length=target.config.max_position_embeddings - flag.max_new_tokens,
        embedding_rows=target.config.vocab_size,
        template_arguments=arguments,
        system=flag.system,
    )

    def generate_batch(ids: list[list[int]], seeds: list[int]) -> list[Answer]:
        options = {"max_new_tokens": flag.max_new_tokens, "temperature": flag.temperature, "seed": seeds}
        return [(row.tokens, row.finish_reason) for row in generate(target, ids, **options)]

    return regenerate(
        flag.out,
        prompts,
        report,
        generate_batch,
        target.tokenizer,
        settings,
        batch_size=flag.batch_size,
        seed=flag.seed,
        notes={"target": flag.target, "prompts": Path(flag.prompts).name},
        say=lambda line: print(line, flush=True),
    )


def main(argv: list[str]) -> None:
    """Runs the command that the flags describe; an error of the user is one message, not a traceback."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}; every setting is a --flag=value")
    try:
        print(_run(flags.FLAGS))
    except ValueError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    _define_flags()
    app.run(main)

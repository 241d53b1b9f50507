"""Lets the target answer prompts, so that a drafter can be trained on the target's own words.

    python -m dflash_jax.data.regenerate --target smollm2-135m-instruct --prompts prompts.jsonl \
        --out chats.jsonl.gz --batch_size 32 --max_new_tokens 160
    python -m dflash_jax.data.regenerate --target Qwen/Qwen3-8B --prompts ultrachat --out chats.jsonl.gz \
        --server http://gpu1:8000 --server http://gpu2:8000 --concurrency 256 --max_new_tokens 2048

Prompts are chats as data/prepare.py reads them, known sets by name included; a last answer in them is dropped. Each row
of --out holds the chat, its "prompt_ids" and "answer_ids" token for token, and its "finish_reason"; beside it,
OUT.meta.json records the target and every setting. A run that is killed goes on where it stopped when the same command
is given again; until it is done, answers are kept in OUT.part.

Without --server our own engine answers; a --drafter changes no token, greedy or sampled (but near-ties in bfloat16),
and is faster where drafting pays. With --server any OpenAI-compatible server does (vLLM, SGLang …) that serves the same
target and takes prompts of token ids: --target is needed all the same, for its tokenizer, template and fingerprint.
vLLM and SGLang return the ids that they sampled; of servers that don't, the text is tokenised, and the report says so.
For servers that refuse unknown fields, --server_arguments '{"return_token_ids": null}' leaves one out. Each row has a
seed of its own, which makes it repeatable as far as the server honours seeds.

Prompts and answers are held in memory, token for token in Python lists: for more than some 10⁸ tokens, split the
prompts.
"""

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from absl import flags

from dflash_jax.cli import exit_with, run_command
from dflash_jax.data import presets
from dflash_jax.data.answer_log import Answer
from dflash_jax.data.answering import Engine, answer_into, in_groups
from dflash_jax.data.chat_template import arguments_from_flag
from dflash_jax.data.completions import Completions
from dflash_jax.data.prompts import encode_prompts, longest_prompt
from dflash_jax.data.provenance import file_hash, tokenizer_hash
from dflash_jax.data.server_pool import Patience, ServerPool, find_model, server_url

_SERVER_ONLY = ("server_model", "server_arguments", "server_key_variable", "concurrency", "retries", "timeout")
_OWN_ONLY = ("drafter", "width", "batch_size", "dtype")


def define_flags(into: flags.FlagValues = flags.FLAGS) -> None:
    """Defines the command's flags. Not done at import: importing this module must not claim names in other programs."""
    define: dict[str, Any] = {"flag_values": into}
    flags.DEFINE_string(
        "target", None, "Hugging Face folder or hub id, or smollm2-135m-instruct.", required=True, **define
    )
    flags.DEFINE_string("prompts", None, "File, folder, hub id, or name of a known set.", required=True, **define)
    flags.DEFINE_enum("preset", None, list(presets.PRESETS), "The known set that a local file is of.", **define)
    flags.DEFINE_string("out", None, "File to write: .jsonl or .jsonl.gz.", required=True, **define)
    flags.DEFINE_integer("max_new_tokens", 160, "Longest answer, in tokens.", lower_bound=1, **define)
    flags.DEFINE_float("temperature", 0.0, "0 is greedy.", lower_bound=0.0, **define)
    flags.DEFINE_integer("top_k", None, "Sample only from so many of the likeliest tokens.", lower_bound=1, **define)
    flags.DEFINE_float(
        "top_p", None, "Sample only from the likeliest tokens that together have this probability.", **define
    )
    flags.DEFINE_integer("seed", 0, "For sampling; each row has a seed of its own, from this and its id.", **define)
    flags.DEFINE_string("template_arguments", "{}", "Chat template variables, JSON.", **define)
    flags.DEFINE_string("system", None, "System message for prompts that have none.", **define)
    flags.DEFINE_bool("strict", False, "Fail on bad rows of --prompts instead of skipping them.", **define)
    flags.DEFINE_integer("limit", None, "Use no more than so many rows of --prompts.", lower_bound=1, **define)
    # Of our own engine.
    flags.DEFINE_string(
        "drafter", None, "Drafter folder or hub id: the same answers, faster where drafting pays.", **define
    )
    flags.DEFINE_string("width", None, "Block width, anchor included, or adaptive; default: the drafter's.", **define)
    flags.DEFINE_integer("batch_size", 32, "Prompts decoded together.", lower_bound=1, **define)
    flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "Of the models' parameters.", **define)
    # Of servers.
    flags.DEFINE_multi_string("server", [], "An OpenAI-compatible server: http://host:8000. May be repeated.", **define)
    flags.DEFINE_string("server_model", None, "Name of the target there; default: the only model.", **define)
    flags.DEFINE_string("server_arguments", "{}", "Further fields of each request, JSON; null drops one.", **define)
    flags.DEFINE_string("server_key_variable", None, "Environment variable with the servers' key.", **define)
    flags.DEFINE_integer("concurrency", 32, "Requests at a time, over all servers.", lower_bound=1, **define)
    flags.DEFINE_integer("retries", Patience.retries, "Of a failed request.", lower_bound=0, **define)
    flags.DEFINE_float("timeout", Patience.timeout, "Seconds until an answer must be there.", lower_bound=0.1, **define)


def run(flag: flags.FlagValues, say: Callable[[str], None] = print) -> str:
    """Does what the flags say, and returns the closing table.

    Raises:
      ValueError: a flag, file or checkpoint is wrong, or the servers fail.
    """
    _check(flag)
    template_arguments = arguments_from_flag(flag.template_arguments)
    preset = presets.find_training_preset(flag.preset, flag.prompts)
    paths = presets.find_files(flag.prompts, preset)
    conversations, report = presets.read_prompt_files(
        flag.prompts, paths, preset, strict=flag.strict, limit=flag.limit, unique_ids=True
    )

    # Imported here: `data` itself knows no model, only its commands do; and wrong flags are told without the wait.
    from dflash_jax.checkpoints.target_files import describe_target

    target = describe_target(flag.target)
    if flag.server:
        engine, of_engine, context = _servers(flag, target, say)
    else:
        engine, of_engine, context = _own_engine(flag), {"dtype": flag.dtype}, None
    room = longest_prompt(min(target.context_length, context or target.context_length), flag.max_new_tokens)
    hashes = [file_hash(path) for path in paths]
    names = ("system", "max_new_tokens", "temperature", "top_k", "top_p", "seed", "limit", "preset")
    settings = {
        "target_fingerprint": target.fingerprint,
        "tokenizer_sha256": tokenizer_hash(target.tokenizer),
        "prompts_sha256": hashes[0] if len(hashes) == 1 else hashes,
        "template_arguments": template_arguments,
        **{name: flag[name].value for name in names},
        **of_engine,
    }
    prompts = encode_prompts(
        target.tokenizer,
        conversations,
        report,
        max_prompt_length=room,
        embedding_rows=target.embedding_rows,
        template_arguments=template_arguments,
        system=flag.system,
    )
    notes = {"target": flag.target, "prompts": Path(flag.prompts).name, "drafter": flag.drafter}
    notes |= {} if flag.server else {"batch_size": flag.batch_size}
    return answer_into(flag.out, prompts, report, engine, target.tokenizer, settings, notes=notes, say=say)


def _check(flag: flags.FlagValues) -> None:
    """Raises ValueError for flags that don't go together."""
    if not flag.out.endswith((".jsonl", ".jsonl.gz")):
        raise ValueError(f"--out={flag.out} is not a .jsonl or .jsonl.gz file")
    if flag.top_p is not None and not 0 < flag.top_p <= 1:
        raise ValueError(f"--top_p={flag.top_p} must be above 0 and at most 1")
    if flag.width and not flag.drafter:
        from dflash_jax.decoding.request import width_from_flag

        width_from_flag(flag.width, drafted=False)
    for name in _OWN_ONLY if flag.server else _SERVER_ONLY:
        if flag[name].present:
            raise ValueError(f"--{name} goes {'without' if flag.server else 'with'} --server")


def _own_engine(flag: flags.FlagValues) -> Engine:
    """Our own engine; the models are loaded when the first prompts come."""
    from dflash_jax.decoding.request import width_from_flag

    width = width_from_flag(flag.width)

    @functools.cache
    def models() -> tuple[Any, Any]:
        from dflash_jax.checkpoints.huggingface import load_drafter, load_target

        target = load_target(flag.target, dtype=flag.dtype)
        return target, load_drafter(flag.drafter, target=target, dtype=flag.dtype) if flag.drafter else None

    def generate_group(ids: list[list[int]], seeds: list[int]) -> list[Answer]:
        from dflash_jax.decoding.generate import generate

        target, drafter = models()
        names = ("max_new_tokens", "temperature", "top_k", "top_p", "batch_size")
        options: dict[str, Any] = {name: flag[name].value for name in names}
        rows = generate(target, ids, drafter=drafter, width=width, seed=seeds, **options)
        return [Answer(row.tokens, row.finish_reason) for row in rows]

    return in_groups(generate_group, batch_size=flag.batch_size, seed=flag.seed)


def _servers(
    flag: flags.FlagValues, target: Any, say: Callable[[str], None]
) -> tuple[Engine, dict[str, Any], int | None]:
    """Servers as an engine, their settings, and the context length that they state."""
    urls = [server_url(text) for text in flag.server]
    fields = arguments_from_flag(flag.server_arguments, "server_arguments")
    key = None
    if flag.server_key_variable:
        key = os.environ.get(flag.server_key_variable)
        if not key:
            raise ValueError(f"--server_key_variable={flag.server_key_variable}: there is no such environment variable")
    model, context = find_model(urls, flag.server_model, key=key, say=say)
    completions = Completions(
        model=model,
        tokenizer=target.tokenizer,
        embedding_rows=target.embedding_rows,
        stop_token_ids=target.stop_token_ids,
        max_new_tokens=flag.max_new_tokens,
        temperature=flag.temperature,
        top_p=flag.top_p,
        top_k=flag.top_k,
        fields=fields,
    )
    pool = ServerPool(
        urls,
        completions,
        concurrency=flag.concurrency,
        seed=flag.seed,
        patience=Patience(flag.timeout, flag.retries),
        key=key,
        say=say,
    )
    return pool, {"server_model": model, "server_arguments": fields}, context


def main() -> None:
    """Runs the command that the flags describe; an error of the user is one message, not a traceback."""
    try:
        print(run(flags.FLAGS, say=lambda line: print(line, flush=True)))
    except (ValueError, OSError) as error:
        exit_with(error)


if __name__ == "__main__":
    define_flags()
    run_command(main, goes_on=True)

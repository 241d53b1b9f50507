"""Checks that decoding with a drafter gives the target's own greedy text, prompt by prompt.

    python -m dflash_jax.evaluation.lossless --target smollm2-135m-instruct --drafter runs/smollm2_quickstart/drafter \
        --prompts configs/data/smollm2_docstrings.heldout.jsonl.gz --limit 64 --max_new_tokens 32

In float32 every text must be identical. In bfloat16 a verify pass rounds otherwise than a single-token pass, so texts
may part where two tokens are nearly equal: the margin between the target's two best logits is reported for the first
difference of each prompt, and one above --epsilon fails. Status 0: lossless; 1: not; 2: wrong flags or files.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from absl import flags

from dflash_jax.cli import exit_with, run_command
from dflash_jax.decoding.generate import generate
from dflash_jax.decoding.request import Options, Width, checked_options, width_from_flag

EPSILON = {"float32": 0.0, "bfloat16": 0.3}
MARGIN_BUCKET = 64  # prefixes are padded to multiples of this, so that margins share programs


@dataclasses.dataclass(frozen=True)
class Difference:
    """Where two texts of one prompt part.

    prompt: number of the prompt. index: of the first new token that differs. plain, drafted: the tokens there, None
    where a text has ended. margin: between the target's two best logits there.
    """

    prompt: int
    index: int
    plain: int | None
    drafted: int | None
    margin: float


def differences(
    target, drafter, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, width: Width, batch_size: int
) -> list[Difference]:
    """Decodes every prompt greedily with the drafter and without, and returns the prompts whose texts differ.

    Raises:
        ValueError: an option is wrong; nothing has been decoded then.
    """
    asked = Options(drafter=drafter, max_new_tokens=max_new_tokens, width=width)
    checked_options(asked, len(prompts), drafter.model.max_width)
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "batch_size": batch_size}
    plain = generate(target, prompts, progress="plain", **options)
    drafted = generate(target, prompts, drafter=drafter, width=width, progress="with the drafter", **options)
    found = []
    for number, (prompt, ours, theirs) in enumerate(zip(prompts, drafted, plain, strict=True)):
        pairs = itertools.zip_longest(theirs.tokens, ours.tokens)
        parting = next(((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1]), None)
        if parting is not None:
            index, (plain_token, drafted_token) = parting
            margin = top_margin(target, [*prompt, *theirs.tokens[:index]])
            found.append(Difference(number, index, plain_token, drafted_token, margin))
    return found


def top_margin(target, tokens: Sequence[int]) -> float:
    """Best logit less second best of the token that follows."""
    length = -(-len(tokens) // MARGIN_BUCKET) * MARGIN_BUCKET
    tokens_T = jnp.asarray([*tokens, *[0] * (length - len(tokens))], jnp.int32)
    return float(_margin(target.model, tokens_T, jnp.int32(len(tokens) - 1)))


@jax.jit
def _margin(model, tokens_T: jax.Array, last: jax.Array) -> jax.Array:
    hidden_1TD, _, _ = model.forward(tokens_T[None], jnp.arange(len(tokens_T))[None])
    best, second = jax.lax.top_k(model.logits(hidden_1TD[0, last]), 2)[0]
    return best - second


def report(found: Sequence[Difference], prompts: int, epsilon: float) -> str:
    """A line for each difference, and the count."""
    lines = [
        f"prompt {d.prompt}: new token {d.index} is {d.drafted} with the drafter and {d.plain} without, "
        f"margin {d.margin:.3f}{' ABOVE EPSILON' if d.margin > epsilon else ''}"
        for d in found
    ]
    return "\n".join([*lines, f"{prompts - len(found)} of {prompts} prompts identical, epsilon {epsilon}"])


def _define_flags() -> None:
    flags.DEFINE_string("target", None, "Folder, hub id, or smollm2-135m-instruct.", required=True)
    flags.DEFINE_string("drafter", None, "Drafter folder or hub id.", required=True)
    flags.DEFINE_string(
        "prompts", None, "File of prompts or chats, or name of a known set such as humaneval.", required=True
    )
    flags.DEFINE_integer("limit", 64, "Prompts to check, from the first.", lower_bound=1)
    flags.DEFINE_integer("max_new_tokens", 64, "New tokens of each.", lower_bound=1)
    flags.DEFINE_integer("batch_size", 16, "Prompts decoded together.", lower_bound=1)
    flags.DEFINE_string("width", None, "Block width, or adaptive; default: the drafter's.")
    flags.DEFINE_enum("dtype", "float32", sorted(EPSILON), "Of both models' parameters.")
    flags.DEFINE_float("epsilon", None, "Largest margin of a difference; default 0 (float32) or 0.3 (bfloat16).")


def _run(flag: flags.FlagValues) -> bool:
    from dflash_jax.checkpoints.huggingface import load_drafter, load_target
    from dflash_jax.data.presets import read_prompts
    from dflash_jax.data.prompts import encode_prompts, longest_prompt

    target = load_target(flag.target, dtype=flag.dtype)
    longest = longest_prompt(target.config.max_position_embeddings, flag.max_new_tokens)
    drafter = load_drafter(flag.drafter, target=target, dtype=flag.dtype)
    if target.tokenizer is None:
        raise ValueError(f"--target={flag.target} has no tokenizer to render prompts with")
    conversations, read = read_prompts(flag.prompts, limit=flag.limit)
    rows = target.config.vocab_size
    encoded = encode_prompts(target.tokenizer, conversations, read, max_prompt_length=longest, embedding_rows=rows)
    if not encoded:
        raise ValueError(f"--prompts={flag.prompts}: no prompt of it can be used\n{read.table()}")
    found = differences(
        *(target, drafter, [prompt.ids for prompt in encoded]),
        max_new_tokens=flag.max_new_tokens,
        width=width_from_flag(flag.width),
        batch_size=flag.batch_size,
    )
    epsilon = EPSILON[flag.dtype] if flag.epsilon is None else flag.epsilon
    print(report(found, len(encoded), epsilon))
    if flag.dtype == "float32" and flag.epsilon is None:
        return not found
    return all(difference.margin <= epsilon for difference in found)


def main() -> None:
    try:
        lossless = _run(flags.FLAGS)
    except (ValueError, OSError) as error:
        exit_with(error)
    sys.exit(0 if lossless else 1)


if __name__ == "__main__":
    _define_flags()
    run_command(main)

"""Checks that decoding with a drafter gives the target's own greedy text, prompt by prompt.

    python -m dflash_jax.evaluation.lossless --target smollm2-135m-instruct --drafter configs/drafters/smollm2 \
        --prompts configs/data/smollm2_docstrings.heldout.jsonl.gz --limit 64 --max_new_tokens 32

In float32 every text must be identical. In bfloat16 a verify pass rounds otherwise than a single-token pass, so texts
may part where two tokens are nearly equal: for the first difference of each prompt the margin between the target's two
best logits is reported, and how far apart the logits of the two tokens are. Either above --epsilon fails. Prompts are
numbered as the rows of their file. Status 0: lossless; 1: not; 2: wrong flags or files.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from dflash_jax.cli import exit_with, run_command
from dflash_jax.decoding.generate import generate
from dflash_jax.decoding.request import Options, Width, checked_options, width_from_flag

EPSILON = {"float32": None, "bfloat16": 0.3}  # None: no difference at all
PREFIX_BUCKET = 64  # prefixes are padded to multiples of this, so that they share programs


@dataclasses.dataclass(frozen=True)
class Difference:
    """Where two texts of one prompt part.

    prompt: number of the prompt. index: of the first new token that differs. plain, drafted: the tokens there, None
    where a text has ended. margin: between the target's two best logits there. apart: between its logits of the two
    tokens; infinite where a text has ended.
    """

    prompt: int
    index: int
    plain: int | None
    drafted: int | None
    margin: float
    apart: float

    @property
    def size(self) -> float:
        """What rounding would have to bridge, in logits."""
        return max(self.margin, self.apart)


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
            logits_V = next_logits(target, [*prompt, *theirs.tokens[:index]])
            second, best = np.partition(logits_V, -2)[-2:]
            apart = float("inf")
            if plain_token is not None and drafted_token is not None:
                apart = float(abs(logits_V[plain_token] - logits_V[drafted_token]))
            found.append(Difference(number, index, plain_token, drafted_token, float(best - second), apart))
    return found


def next_logits(target, tokens: Sequence[int]) -> np.ndarray:
    """The target's logits [V] of the token that follows, float32."""
    length = -(-len(tokens) // PREFIX_BUCKET) * PREFIX_BUCKET
    tokens_T = jnp.asarray([*tokens, *[0] * (length - len(tokens))], jnp.int32)
    return np.asarray(_logits_at(target.model, tokens_T, jnp.int32(len(tokens) - 1)), np.float32)


@jax.jit
def _logits_at(model, tokens_T: jax.Array, last: jax.Array) -> jax.Array:
    hidden_1TD, _, _ = model.forward(tokens_T[None], jnp.arange(len(tokens_T))[None])
    return model.logits(hidden_1TD[0, last])


def passes(found: Sequence[Difference], epsilon: float | None) -> bool:
    """Whether every difference can be rounding; epsilon: None allows no difference at all."""
    return not found if epsilon is None else all(difference.size <= epsilon for difference in found)


def report(found: Sequence[Difference], prompts: int, epsilon: float | None) -> str:
    """A line for each difference, and the count; epsilon as in `passes`."""
    verdict = "lossless" if passes(found, epsilon) else "NOT lossless"
    judgement = "WRONG" if epsilon is None else "ABOVE EPSILON"
    bound = "and all must be" if epsilon is None else f"epsilon {epsilon}"
    lines = [
        f"prompt {d.prompt}: new token {d.index} is {d.drafted} with the drafter and {d.plain} without, "
        f"margin {d.margin:.3f}, logits {d.apart:.3f} apart{'' if passes([d], epsilon) else ' ' + judgement}"
        for d in found
    ]
    return "\n".join([*lines, f"{prompts - len(found)} of {prompts} prompts identical, {bound}: {verdict}"])


def _define_flags() -> None:
    flags.DEFINE_string("target", None, "Folder, hub id, or smollm2-135m-instruct.", required=True)
    flags.DEFINE_string("drafter", None, "Drafter folder or hub id.", required=True)
    flags.DEFINE_string(
        "prompts", None, "File of chats (docs/data.md), or name of a known set such as humaneval.", required=True
    )
    flags.DEFINE_integer("limit", 64, "Prompts to check, from the first.", lower_bound=1)
    flags.DEFINE_integer("max_new_tokens", 64, "New tokens of each.", lower_bound=1)
    flags.DEFINE_integer("batch_size", 16, "Prompts decoded together.", lower_bound=1)
    flags.DEFINE_string("width", None, "Block width, or adaptive; default: the drafter's.")
    flags.DEFINE_enum("dtype", "float32", sorted(EPSILON), "Of both models' parameters.")
    flags.DEFINE_float(
        "epsilon",
        None,
        "Largest difference in logits that passes; default 0.3 in bfloat16, none in float32.",
        lower_bound=0.0,
    )


def _run(flag: flags.FlagValues) -> bool:
    from dflash_jax.checkpoints.huggingface import load_drafter, load_target, read_drafter_config, read_target_config
    from dflash_jax.data.presets import read_prompts
    from dflash_jax.data.prompts import encode_prompts, longest_prompt

    width = width_from_flag(flag.width)
    config = read_target_config(flag.target)
    longest = longest_prompt(config.max_position_embeddings, flag.max_new_tokens)
    checked_options(Options(width=width), 1, read_drafter_config(flag.drafter, config).block_size)
    conversations, read = read_prompts(flag.prompts, limit=flag.limit)
    target = load_target(flag.target, dtype=flag.dtype)
    drafter = load_drafter(flag.drafter, target=target, dtype=flag.dtype)
    if target.tokenizer is None:
        raise ValueError(f"--target={flag.target} has no tokenizer to render prompts with")
    rows = target.config.vocab_size
    encoded = encode_prompts(target.tokenizer, conversations, read, max_prompt_length=longest, embedding_rows=rows)
    if not encoded:
        raise ValueError(f"--prompts={flag.prompts}: no prompt of it can be used\n{read.table()}")
    if read.skipped:
        print(read.table(), file=sys.stderr)
    found = differences(
        *(target, drafter, [prompt.ids for prompt in encoded]),
        max_new_tokens=flag.max_new_tokens,
        width=width,
        batch_size=flag.batch_size,
    )
    found = [dataclasses.replace(each, prompt=encoded[each.prompt].conversation.line) for each in found]
    epsilon = EPSILON[flag.dtype] if flag.epsilon is None else flag.epsilon
    print(report(found, len(encoded), epsilon))
    return passes(found, epsilon)


def main() -> None:
    try:
        lossless = _run(flags.FLAGS)
    except (ValueError, OSError) as error:
        exit_with(error)
    sys.exit(0 if lossless else 1)


if __name__ == "__main__":
    _define_flags()
    run_command(main)

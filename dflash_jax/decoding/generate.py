"""Public decoding: `generate` for lists of prompts, `stream` for one prompt piece by piece."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from tqdm import tqdm

from dflash_jax.decoding.batching import decode_all
from dflash_jax.decoding.processing import LogitsProcessor
from dflash_jax.decoding.request import Options, Prompt, Proposals, Width, checked_request
from dflash_jax.decoding.stats import Clock, Stats
from dflash_jax.decoding.streaming import Stream


@dataclass(frozen=True)
class Generation:
    """What came out for one prompt.

    Attributes:
        tokens: new token ids; a stop token that ended the text is kept as the last.
        text: the decoded text without special tokens, "" where the target has no tokenizer.
        prompt_length: tokens of the prompt.
        acceptance_lengths: tokens each round gave, the target's own token counted. The first token comes from
            prefill and belongs to no round, so they sum to len(tokens) − 1.
        verified_lengths: slots each round verified, slot 0 counted: its width, or less where the budget left no room
            or a stop token came before.
        finish_reason: "stop" or "length".
        stats: of the call it came from.
    """

    tokens: list[int]
    text: str
    prompt_length: int
    acceptance_lengths: list[int]
    verified_lengths: list[int]
    finish_reason: str
    stats: Stats = field(compare=False)

    @property
    def acceptance_length(self) -> float:
        """Mean tokens a round, the target's token counted; NaN when there was no round."""
        return float(np.mean(self.acceptance_lengths)) if self.acceptance_lengths else float("nan")


def generate(
    target,
    prompts: Sequence[Prompt],
    *,
    drafter=None,
    max_new_tokens: int = 256,
    temperature: float | Sequence[float] = 0.0,
    top_k: int | Sequence[int | None] | None = None,
    top_p: float | Sequence[float | None] | None = None,
    seed: int | Sequence[int] = 0,
    width: Width = None,
    proposals: Proposals = "argmax",
    logits_processor: LogitsProcessor | None = None,
    stop_token_ids: Sequence[int] | None = None,
    batch_size: int | None = None,
    progress: bool | str | Callable[[int], object] = False,
) -> list[Generation]:
    """Decodes every prompt, speculatively when a drafter is given; the distribution of the text is the same either way.

    A row's text depends on its prompt, its settings and its seed, not on the rows beside it. With argmax proposals it
    does not depend on the drafter either: the tokens are those of autoregressive decoding.

    Args:
        target: a LoadedTarget.
        prompts: each a list of token ids; or a chat, a list of {"role", "content"} messages (roles system, user,
            assistant, tool), rendered by the target's chat template; or a string, which is a chat of one user message.
        drafter: a LoadedDrafter, or None for plain autoregressive decoding.
        max_new_tokens: at most this many new tokens a row; 0 gives empty results.
        temperature: 0 is greedy. Above 0 the target's distribution is sampled, exactly. This, top_k, top_p and seed are
            one value for all prompts, or a list of one a prompt.
        top_k: only so many of the likeliest tokens may be drawn; None or 0: all.
        top_p: only the likeliest tokens that together have this probability (after temperature and top_k) may be drawn;
            None or 1: all. Neither matters to greedy rows.
        seed: one integer (row i then draws from seed and i), or one integer a row.
        width: block width, the anchor counted; at most the trained width, which is the default. "adaptive" chooses it
            while it runs, from what rounds cost and what they accept, down to 1, which is plain decoding: see
            decoding/adaptive.py. Each width is compiled when it is first tried, and costs are remembered.
        proposals: "argmax" proposes the drafter's likeliest tokens. "sampled" draws them from the drafter's own
            distribution under the row's settings; the text then depends on drafter and width, its distribution does
            not. Greedy rows are the same under both.
        logits_processor: a pure function (logits_BV, tokens_BS, lengths_B) → logits_BV on the target's logits, before
            temperature; decoding/processing.py says what it is given. Compiled in: define it once, not once a call.
        stop_token_ids: ids below the target's vocab_size; default: those of the target. An empty list never stops.
            Compiled in: another set is another compilation.
        batch_size: rows decoded together; default: all. Of a longer list, a prompt starts as soon as a row ends.
        progress: True shows a bar of finished prompts, text shows one with that label; or a function that is called as
            prompts finish, with how many did since its last call. What it raises ends the call.

    Returns:
        One Generation a prompt, in the order of the prompts.

    Raises:
        ValueError: names the argument that is wrong: an empty prompt, a prompt that leaves no room in the target's
            context, an unknown role, ids outside the vocabulary, a width above the trained one, a setting out of its
            range, an adaptive width with sampled proposals (the text would depend on timing) or on several processes'
            devices (they would part).

    Warns:
        UserWarning: rows may grow past the drafter's max_position_embeddings.
    """
    clock = Clock()
    options = Options(
        drafter=drafter,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        width=width,
        proposals=proposals,
        logits_processor=logits_processor,
        stop_token_ids=stop_token_ids,
    )
    request = checked_request(target, prompts, options)
    if batch_size is not None and not (isinstance(batch_size, (int, np.integer)) and batch_size >= 1):
        raise ValueError(f"batch_size={batch_size!r} must be an integer of at least 1, or None")
    if not (isinstance(progress, (bool, str)) or callable(progress)):
        raise ValueError(f"progress={progress!r} must be True, False, a label or a function")
    if max_new_tokens == 0 or not request.prompts:
        idle = clock.stats(0.0, {}, [])
        return [Generation([], "", len(prompt), [], [], "length", idle) for prompt in request.prompts]
    size = min(batch_size or len(request.prompts), len(request.prompts))
    label = progress if isinstance(progress, str) else None
    shown = progress is True or label is not None
    with tqdm(total=len(request.prompts), desc=label, unit="prompt", disable=not shown) as bar:
        rows, stats = decode_all(request, size, clock, progress if callable(progress) else bar.update)
    return [
        Generation(
            row.tokens,
            "" if target.tokenizer is None else target.tokenizer.decode(row.tokens, skip_special_tokens=True),
            len(prompt),
            row.acceptance_lengths,
            row.verified_lengths,
            "stop" if row.stopped else "length",
            stats,
        )
        for prompt, row in zip(request.prompts, rows, strict=True)
    ]


def stream(target, prompt: Prompt, **options) -> Stream:
    """The text of one prompt as rounds commit it; options as in `generate`, batch_size and progress aside.

    Returns:
        An iterator of pieces that never split a character, and join to the text that `generate` gives; but for bytes
        that are no characters, where the tokenizer spells unknown ones byte by byte (SentencePiece's byte fallback).
        When it has ended, its `stats` are those of the call.

    Raises:
        ValueError: as `generate`, and when the target has no tokenizer.
    """
    names = [option.name for option in dataclasses.fields(Options)]
    unknown = set(options) - set(names)
    if unknown:
        raise ValueError(f"stream takes no {', '.join(sorted(unknown))}; it takes {', '.join(names)}")
    _check_one_prompt(prompt)
    clock = Clock()
    request = checked_request(target, [prompt], Options(**options))
    if target.tokenizer is None:
        raise ValueError(f"target {target.source} has no tokenizer to stream text with; use generate")
    return Stream(request, target.tokenizer, clock)


def _check_one_prompt(prompt) -> None:
    """Raises ValueError where `prompt` is a list of prompts."""
    parts = [] if isinstance(prompt, str | bytes) or not isinstance(prompt, Sequence) else prompt
    kind = next((type(part).__name__ for part in parts if isinstance(part, Sequence)), None)
    if kind is not None:
        raise ValueError(f"prompt is a list with a {kind} in it: stream takes one prompt; for several, use generate")

"""Public decoding: `generate` for lists of prompts, `stream` for one prompt piece by piece."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.decoding.loop import LoopSettings, LoopState, prefill, run_rounds
from dflash_jax.decoding.sampling import row_keys
from dflash_jax.models.proposal import NoDrafter

SHORTEST_PROMPT_BUCKET = 32
SHORTEST_CACHE = 256


@dataclass(frozen=True)
class Timings:
    """Wall-clock seconds of the batch a row was decoded in. The first call with new shapes includes compilation."""

    prefill_seconds: float
    decode_seconds: float
    batch_rounds: int


@dataclass(frozen=True)
class Generation:
    """What came out for one prompt.

    Attributes:
        tokens: new token ids; a stop token that ended the text is kept as the last.
        text: the decoded text without special tokens, "" where the target has no tokenizer.
        prompt_length: tokens of the prompt.
        acceptance_lengths: tokens each round gave, the target's own token counted. The first token comes from
            prefill and belongs to no round, so they sum to len(tokens) − 1.
        finish_reason: "stop" or "length".
        timings: of its batch.
    """

    tokens: list[int]
    text: str
    prompt_length: int
    acceptance_lengths: list[int]
    finish_reason: str
    timings: Timings = field(compare=False)

    @property
    def acceptance_length(self) -> float:
        """Mean tokens a round, the target's token counted; NaN when there was no round."""
        return float(np.mean(self.acceptance_lengths)) if self.acceptance_lengths else float("nan")


@dataclass(frozen=True)
class _Request:
    """The settings of one call, checked, as the loop wants them."""

    target: object
    drafter: object
    settings: LoopSettings
    temperature: jax.Array
    prompts: list[list[int]]
    limits: list[int]
    keys: jax.Array
    cache_length: int


def generate(
    target,
    prompts: Sequence[str] | Sequence[Sequence[int]],
    *,
    drafter=None,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    seed: int | Sequence[int] = 0,
    width: int | None = None,
    stop_token_ids: Sequence[int] | None = None,
    batch_size: int | None = None,
) -> list[Generation]:
    """Decodes every prompt, speculatively when a drafter is given; the tokens are the same either way.

    Args:
        target: a LoadedTarget.
        prompts: token-id lists, or strings: each string is one user message, rendered by the target's chat template.
        drafter: a LoadedDrafter, or None for plain autoregressive decoding.
        max_new_tokens: at most this many new tokens a row; 0 gives empty results.
        temperature: 0 is greedy. Above 0 the target's distribution is sampled, exactly.
        seed: one integer (row i then draws from seed and i), or one integer a row.
        width: block width, the anchor counted; at most the trained width, which is the default.
        stop_token_ids: default: those of the target. An empty list never stops.
        batch_size: rows decoded together; default: all. Longer lists run batch after batch.

    Returns:
        One Generation a prompt, in the order of the prompts.

    Raises:
        ValueError: names the argument that is wrong: an empty prompt, a prompt that leaves no room in the target's
            context, ids outside the vocabulary, a width above the trained one, a negative budget or temperature.
    """
    request = _prepare(target, prompts, drafter, max_new_tokens, temperature, seed, width, stop_token_ids)
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"batch_size={batch_size} must be at least 1")
    if max_new_tokens == 0 or not request.prompts:
        idle = Timings(0.0, 0.0, 0)
        return [Generation([], "", len(prompt), [], "length", idle) for prompt in request.prompts]
    size = min(batch_size or len(request.prompts), len(request.prompts))
    results: list[Generation] = []
    for first in range(0, len(request.prompts), size):
        rows = range(first, min(first + size, len(request.prompts)))
        results += _decode_batch(request, rows, size, target.tokenizer)
    return results


def stream(target, prompt: str | Sequence[int], **options) -> Iterator[str]:
    """Yields the text of one prompt as rounds commit it; options as in `generate`, batch_size aside.

    Pieces never split a character: bytes of an unfinished one wait for the next round.

    Raises:
        ValueError: as `generate`, and when the target has no tokenizer. Raised by the first `next`.
    """
    if target.tokenizer is None:
        raise ValueError(f"target {target.source} has no tokenizer to stream text with; use generate")
    arguments = dict(drafter=None, max_new_tokens=256, temperature=0.0, seed=0, width=None, stop_token_ids=None)
    unknown = set(options) - set(arguments)
    if unknown:
        raise ValueError(f"stream takes no {', '.join(sorted(unknown))}; it takes {', '.join(arguments)}")
    arguments |= options
    request = _prepare(target, [prompt], **arguments)
    if arguments["max_new_tokens"] == 0:
        return
    state, shown = _start(request, range(1), 1), ""
    start = len(request.prompts[0])
    while True:
        length, done, row = int(state.lengths[0]), bool(state.done[0]), np.asarray(state.tokens[0])
        text = target.tokenizer.decode(row[start:length].tolist(), skip_special_tokens=True)
        whole = text if done else text.rstrip("�")
        if len(whole) > len(shown):
            yield whole[len(shown) :]
            shown = whole
        if done:
            return
        state = _advance(request, state, 1)


def _prepare(target, prompts, drafter, max_new_tokens, temperature, seed, width, stop_token_ids) -> _Request:
    if isinstance(prompts, str):
        raise ValueError("prompts is one string; pass a list of prompts")
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens={max_new_tokens} must be 0 or more")
    if not temperature >= 0:
        raise ValueError(f"temperature={temperature} must be 0 or more")
    draft_model = NoDrafter() if drafter is None else drafter.model
    if width is None:
        width = draft_model.max_width
    if not 1 <= width <= draft_model.max_width:
        raise ValueError(f"width={width} must be between 1 and {draft_model.max_width}, the drafter's trained width")
    ids = [_token_ids(target, prompt, index) for index, prompt in enumerate(prompts)]
    context = target.config.max_position_embeddings
    for index, prompt in enumerate(ids):
        if len(prompt) >= context:
            raise ValueError(
                f"prompts[{index}] has {len(prompt)} tokens; the target's context is {context} and one must be free"
            )
    if not isinstance(seed, (int, np.integer)) and len(seed) != len(ids):
        raise ValueError(f"seed lists {len(seed)} integers for {len(ids)} prompts; give one a prompt, or one integer")
    limits = [min(len(prompt) + max_new_tokens, context) for prompt in ids]
    stops = target.stop_token_ids if stop_token_ids is None else tuple(stop_token_ids)
    return _Request(
        target=target.model,
        drafter=draft_model,
        settings=LoopSettings(width, tuple(sorted(stops))),
        temperature=jnp.float32(temperature),
        prompts=ids,
        limits=limits,
        keys=row_keys(seed, len(ids)),
        cache_length=cache_bucket(max(limits, default=0) + width),
    )


def _token_ids(target, prompt, index: int) -> list[int]:
    if isinstance(prompt, str):
        if target.tokenizer is None:
            raise ValueError(f"prompts[{index}] is text, and target {target.source} has no tokenizer; pass token ids")
        from dflash_jax.data.chat import render

        prompt = render(target.tokenizer, [{"role": "user", "content": prompt}], add_generation_prompt=True)
    ids = [int(token) for token in prompt]
    if not ids:
        raise ValueError(f"prompts[{index}] is empty; decoding needs at least one token to start from")
    worst = max(ids, key=lambda token: abs(token - target.config.vocab_size // 2))
    if not 0 <= worst < target.config.vocab_size:
        raise ValueError(f"prompts[{index}] holds token id {worst}; the target has {target.config.vocab_size} rows")
    return ids


def _decode_batch(request: _Request, rows: range, size: int, tokenizer) -> list[Generation]:
    clock = time.perf_counter()
    state = jax.block_until_ready(_start(request, rows, size))
    prefilled = time.perf_counter()
    state = jax.block_until_ready(_advance(request, state, request.cache_length))
    rounds_B = np.asarray(state.rounds)
    timings = Timings(prefilled - clock, time.perf_counter() - prefilled, int(rounds_B.max()))
    tokens_BS, acceptance_BS = np.asarray(state.tokens), np.asarray(state.acceptance)
    lengths_B, stopped_B = np.asarray(state.lengths), np.asarray(state.stopped)
    results = []
    for slot, row in enumerate(rows):
        start = len(request.prompts[row])
        tokens = tokens_BS[slot, start : lengths_B[slot]].tolist()
        text = "" if tokenizer is None else tokenizer.decode(tokens, skip_special_tokens=True)
        accepted = acceptance_BS[slot, : rounds_B[slot]].tolist()
        results.append(Generation(tokens, text, start, accepted, "stop" if stopped_B[slot] else "length", timings))
    return results


def _start(request: _Request, rows: range, size: int) -> LoopState:
    """Prefills the given rows; a batch that is not full is filled with one-token rows that end at once."""
    prompts = [request.prompts[row] for row in rows] + [[0]] * (size - len(rows))
    limits = [request.limits[row] for row in rows] + [2] * (size - len(rows))
    padded_BP = np.zeros((size, prompt_bucket(max(map(len, prompts)))), np.int32)
    for slot, prompt in enumerate(prompts):
        padded_BP[slot, : len(prompt)] = prompt
    filler = [rows[0]] * (size - len(rows))
    return prefill(
        *(request.target, request.drafter, jnp.asarray(padded_BP)),
        jnp.asarray([len(prompt) for prompt in prompts], jnp.int32),
        jnp.asarray(limits, jnp.int32),
        request.keys[jnp.asarray([*rows, *filler])],
        request.temperature,
        stop_tokens=request.settings.stop_tokens,
        cache_length=max(request.cache_length, cache_bucket(padded_BP.shape[1])),
    )


def _advance(request: _Request, state: LoopState, max_rounds: int) -> LoopState:
    return run_rounds(
        request.target, request.drafter, state, request.temperature, jnp.int32(max_rounds), settings=request.settings
    )


def prompt_bucket(length: int) -> int:
    """The padded prompt length: the next power of two, so that few prefills are compiled."""
    return max(SHORTEST_PROMPT_BUCKET, 1 << (length - 1).bit_length())


def cache_bucket(length: int) -> int:
    """The allocated cache length: the next of 256, 384, 512, 768, 1024, 1536 …"""
    size = SHORTEST_CACHE
    while size < length:
        size = size + size // 2 if size & (size - 1) == 0 else size // 3 * 4
    return size

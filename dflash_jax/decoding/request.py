"""What a call of `generate` or `stream` asks for, checked, in the form that the loop takes."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from dflash_jax.decoding.loop import LoopSettings
from dflash_jax.decoding.processing import LogitsProcessor
from dflash_jax.decoding.sampling import Sampling, row_keys
from dflash_jax.models.drafter_config import check_drafter_matches_target
from dflash_jax.models.proposal import NoDrafter
from dflash_jax.sharding import mesh_of

SHORTEST_PROMPT_BUCKET = 32
SHORTEST_CACHE = 256

Proposals = Literal["argmax", "sampled"]
Width = int | Literal["adaptive"] | None
Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Request:
    """One call: models, prompts as token ids, the total length each may reach, and how each row draws.

    settings.width is the widest that rounds may be; adaptive: they may be narrower. mesh: what the models are divided
    over, if they are.
    """

    target: Any
    drafter: Any
    settings: LoopSettings
    adaptive: bool
    prompts: list[list[int]]
    limits: list[int]
    sampling: Sampling
    cache_length: int
    mesh: Mesh | None


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options that `generate` and `stream` share, as they were given; `generate` says what they mean."""

    drafter: Any = None
    max_new_tokens: int = 256
    temperature: float | Sequence[float] = 0.0
    top_k: int | Sequence[int | None] | None = None
    top_p: float | Sequence[float | None] | None = None
    seed: int | Sequence[int] = 0
    width: Width = None
    proposals: Proposals = "argmax"
    logits_processor: LogitsProcessor | None = None
    stop_token_ids: Sequence[int] | None = None


def checked_request(target, prompts, options: Options) -> Request:
    """The request for these prompts.

    Raises:
        ValueError: names the argument that is wrong and the value seen.
    """
    if isinstance(prompts, str):
        raise ValueError("prompts is one string; pass a list of prompts")
    if not hasattr(prompts, "__len__") or getattr(prompts, "ndim", 1) == 0:
        raise ValueError(f"prompts is a {type(prompts).__name__}; pass a list of prompts")
    if len(prompts) and all(isinstance(prompt, Mapping) for prompt in prompts):
        raise ValueError("prompts is one chat; pass a list of chats, [chat]")
    for name, given in (("target", target), ("drafter", options.drafter)):
        if isinstance(given, str | PathLike):
            raise ValueError(f"{name}={str(given)!r} is a name; pass what load_{name} makes of it")
    if not hasattr(target, "tokenizer"):
        raise ValueError(f"target is a {type(target).__name__}; pass what load_target returns")
    if options.drafter is not None and not hasattr(getattr(options.drafter, "model", None), "max_width"):
        raise ValueError(f"drafter is a {type(options.drafter).__name__}; pass what load_drafter returns, or None")
    if options.drafter is None and options.width not in (None, 1, "adaptive"):
        raise ValueError(f"width={options.width!r} needs a drafter; without one nothing is proposed")
    if options.drafter is None and options.proposals == "sampled":
        raise ValueError("proposals='sampled' needs a drafter; without one nothing is proposed")
    drafter_config = getattr(options.drafter, "config", None)
    if drafter_config is not None:
        check_drafter_matches_target(drafter_config, target.config)
    drafter = NoDrafter() if options.drafter is None else options.drafter.model
    width, sampling = checked_options(options, len(prompts), drafter.max_width)
    mesh = mesh_of(target.model)
    if options.width == "adaptive" and mesh is not None and mesh.is_multi_process:
        raise ValueError(
            "width='adaptive' works on the devices of one process: each would choose widths by its own clock, and all "
            "have to run the same programs; give a number"
        )
    ids = [_token_ids(target, prompt, index) for index, prompt in enumerate(prompts)]
    context = target.config.max_position_embeddings
    for index, prompt in enumerate(ids):
        if len(prompt) >= context:
            raise ValueError(
                f"prompts[{index}] has {len(prompt)} tokens; the target's context is {context} and one must be free"
            )
    limits = [min(len(prompt) + int(options.max_new_tokens), context) for prompt in ids]
    _warn_past_training(options.drafter, max(limits, default=0))
    drawn_B = np.asarray(sampling.temperature) > 0
    truncated_B = (np.asarray(sampling.top_k) > 0) | (np.asarray(sampling.top_p) < 1)
    stops = target.stop_token_ids
    if options.stop_token_ids is not None:
        stops = _stop_tokens(options.stop_token_ids, target.config.vocab_size)
    longest_prompt = max(map(len, ids), default=1)
    return Request(
        target=target.model,
        drafter=drafter,
        settings=LoopSettings(
            width=width,
            stop_tokens=tuple(sorted(set(stops))),
            truncate=bool((drawn_B & truncated_B).any()),
            # A greedy row's distribution is its argmax: where all are greedy, the simpler rule does the same.
            sampled_proposals=options.proposals == "sampled" and options.drafter is not None and bool(drawn_B.any()),
            logits_processor=options.logits_processor,
        ),
        adaptive=options.width == "adaptive",
        prompts=ids,
        limits=limits,
        sampling=sampling,
        cache_length=cache_bucket(max(max(limits, default=0) + width, prompt_bucket(longest_prompt))),
        mesh=mesh,
    )


def checked_options(options: Options, rows: int, trained: int) -> tuple[int, Sampling]:
    """Checks what can be checked without models and prompts.

    Args:
        rows: the number of prompts.
        trained: the drafter's trained width; 1 without a drafter.

    Returns:
        The widest that rounds may be, and how each row draws.

    Raises:
        ValueError: names the argument that is wrong and the value seen.
    """
    if not isinstance(options.max_new_tokens, (int, np.integer)) or options.max_new_tokens < 0:
        raise ValueError(f"max_new_tokens={options.max_new_tokens!r} must be an integer of 0 or more")
    if options.proposals not in ("argmax", "sampled"):
        raise ValueError(f"proposals={options.proposals!r} must be 'argmax' or 'sampled'")
    if options.logits_processor is not None:
        _check_processor(options.logits_processor)
    return _widest(options, trained), _sampling(options, rows)


def prompt_bucket(length: int) -> int:
    """The padded prompt length: the next power of two, so that few prefills are compiled."""
    return max(SHORTEST_PROMPT_BUCKET, 1 << (length - 1).bit_length())


def cache_bucket(length: int) -> int:
    """The allocated cache length: the next of 256, 384, 512, 768, 1024, 1536 …"""
    size = SHORTEST_CACHE
    while size < length:
        size = size + size // 2 if size & (size - 1) == 0 else size // 3 * 4
    return size


def width_from_flag(text: str | None, *, drafted: bool = True) -> Width:
    """The width that a command's --width asks for.

    Args:
        drafted: whether the command has a drafter; as in `generate`, only widths that plain decoding has go without.

    Raises:
        ValueError: it is neither a number nor "adaptive", or needs a drafter.
    """
    if text is None or text == "adaptive":
        return text
    try:
        width = int(text)
    except ValueError:
        raise ValueError(f"--width={text}: give a number of slots, or adaptive") from None
    if not drafted and width != 1:
        raise ValueError(f"--width={text} needs --drafter; without one nothing is proposed")
    return width


def _widest(options: Options, trained: int) -> int:
    """The width that rounds may have at most."""
    width = trained if options.width in (None, "adaptive") else options.width
    if isinstance(width, bool) or not isinstance(width, (int, np.integer)) or not 1 <= width <= trained:
        raise ValueError(f"width={width!r} must be 'adaptive' or between 1 and {trained}, the drafter's trained width")
    if options.width == "adaptive" and options.proposals == "sampled":
        raise ValueError(
            "width='adaptive' needs proposals='argmax': with sampled proposals the text depends on the widths, and "
            "these on timing"
        )
    return width


def _check_processor(processor: Any) -> None:
    """Raises ValueError where it can't be called, or not be known again: programs hold it."""
    try:
        known_again = callable(processor) and isinstance(hash(processor), int)
    except TypeError:
        known_again = False
    if not known_again:
        raise ValueError(f"logits_processor={processor!r} must be None, or a function or callable that has a hash")


def _sampling(options: Options, count: int) -> Sampling:
    """How each row draws."""
    temperatures = _per_row("temperature", options.temperature, count)
    top_k = [0 if value is None else value for value in _per_row("top_k", options.top_k, count)]
    top_p = [1.0 if value is None else value for value in _per_row("top_p", options.top_p, count)]
    for value in temperatures:
        if not (_is_finite(value) and value >= 0):
            raise ValueError(f"temperature={value!r} must be a number, 0 or more, and finite")
    for value in top_k:
        if not isinstance(value, (int, np.integer)) or value < 0:
            raise ValueError(f"top_k={value!r} must be an integer of 0 or more; 0 or None keeps all tokens")
    for value in top_p:
        if not (_is_finite(value) and 0 < value <= 1):
            raise ValueError(f"top_p={value!r} must be a number above 0 and at most 1; 1 or None keeps all tokens")
    for value in _per_row("seed", options.seed, count):
        if not isinstance(value, (int, np.integer)) or not 0 <= value < 2**32:
            raise ValueError(f"seed={value!r} must be an integer from 0 to 2³² − 1")
    return Sampling(
        keys=row_keys(options.seed, count),
        temperature=jnp.asarray(temperatures, jnp.float32),
        # More than there are tokens keeps all of them, so a limit that int32 can hold loses nothing.
        top_k=jnp.asarray([min(value, np.iinfo(np.int32).max) for value in top_k], jnp.int32),
        top_p=jnp.asarray(top_p, jnp.float32),
    )


def _stop_tokens(given, vocab_size: int) -> list[int]:
    """Stop tokens of the call. Those of a target may lie beyond its rows, as released configs have them: never drawn,
    they do no harm, while one that a caller gives is a mistake."""
    try:
        if isinstance(given, str | bytes):
            raise TypeError("text is not a list of ids")
        tokens = [operator.index(token) for token in given]
    except TypeError as error:
        raise ValueError(f"stop_token_ids={given!r} must be a list of token ids: {error}") from error
    for token in tokens:
        if not 0 <= token < vocab_size:
            raise ValueError(f"stop_token_ids holds {token}; the target has {vocab_size} tokens, from 0")
    return tokens


def _is_finite(value: Any) -> bool:
    """Whether it is a real number of any library, and one that float32 holds."""
    try:
        number = float("nan") if isinstance(value, str | bytes) or np.iscomplexobj(value) else float(value)
    except (TypeError, ValueError, OverflowError):
        return False
    return abs(number) <= float(np.finfo(np.float32).max)


def _per_row(name: str, value, count: int) -> list:
    """One value a row, from one for all or from a list of as many."""
    listed = value.ndim > 0 if hasattr(value, "ndim") else isinstance(value, Sequence) and not isinstance(value, str)
    if not listed:
        return [value] * count
    values = list(value)
    if len(values) != count:
        raise ValueError(f"{name} lists {len(values)} values for {count} prompts; give one a prompt, or one for all")
    return values


def _token_ids(target, prompt, index: int) -> list[int]:
    chat: Any = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if isinstance(chat, Sequence) and any(isinstance(part, Mapping) for part in chat):
        if target.tokenizer is None:
            raise ValueError(f"prompts[{index}] is text, and target {target.source} has no tokenizer; pass token ids")
        ids = _rendered(target.tokenizer, chat, index)
    else:
        try:
            ids = [operator.index(token) for token in chat]
        except TypeError as error:
            raise ValueError(
                f"prompts[{index}] must be a string, a list of token ids, or a list of messages: {error}"
            ) from error
    if not ids:
        raise ValueError(f"prompts[{index}] is empty; decoding needs at least one token to start from")
    for token in ids:
        if not 0 <= token < target.config.vocab_size:
            raise ValueError(f"prompts[{index}] holds token id {token}; the target has {target.config.vocab_size} rows")
    return ids


def _rendered(tokenizer, messages: Sequence, index: int) -> list[int]:
    from dflash_jax.data.chat import render
    from dflash_jax.data.formats import PROMPT_ROLES, check_role, check_text

    for place, message in enumerate(messages):
        if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
            raise ValueError(f"prompts[{index}][{place}]={message!r} must be a message with a role and a content")
        if not isinstance(message["content"], str):
            raise ValueError(f"prompts[{index}][{place}]: content={message['content']!r} must be a string")
        check_role(message["role"], f"prompts[{index}][{place}]", PROMPT_ROLES)
        check_text(message["content"], f"prompts[{index}][{place}]")
    return render(tokenizer, messages, add_generation_prompt=True)


def _warn_past_training(drafter, length: int) -> None:
    trained = getattr(getattr(drafter, "config", None), "max_position_embeddings", None)
    if trained is not None and length > trained:
        warnings.warn(
            f"rows may reach {length} tokens, and drafter {drafter.source} is made for {trained} "
            "(max_position_embeddings): past those its proposals may be refused more often; the text stays the "
            "target's own. Lower max_new_tokens or shorten the prompts to stay inside.",
            stacklevel=4,
        )

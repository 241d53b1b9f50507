"""Chats to the token ids that serving sees, and where in a rendered chat its answer stands.

Finding the answer needs no generation markers in the template. A conversation is rendered with two different
placeholders in the place of an answer; where the two texts begin and cease to differ is where answers stand.
"""

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from dflash_jax.data.chat_template import ChatTemplateError, describe, render_text

Messages = Sequence[Mapping[str, Any]]


def render(
    tokenizer,
    messages: Messages,
    *,
    add_generation_prompt: bool,
    template_arguments: Mapping[str, Any] | None = None,
    embedding_rows: int | None = None,
) -> list[int]:
    """Renders a chat to the token ids that the target reads.

    Args:
      tokenizer: a fast transformers tokenizer with a chat template.
      messages: {"role", "content"} of each turn.
      add_generation_prompt: whether to end with the header of the answer that is to be generated.
      template_arguments: further variables of the template, such as {"enable_thinking": False}.
      embedding_rows: rows of the target's embedding; ids are checked against it.

    Returns:
      Token ids with exactly one beginning-of-sequence token if the tokenizer uses one, whoever writes it.

    Raises:
      ChatTemplateError: the template is missing, unsafe, or fails on these messages.
      ValueError: a token id lies beyond the embedding.
    """
    text = render_text(
        tokenizer, messages, add_generation_prompt=add_generation_prompt, template_arguments=template_arguments
    )
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    ids = with_one_bos(ids, tokenizer.bos_token_id, adds_bos(tokenizer))
    _check_ids(tokenizer, ids, embedding_rows)
    return ids


def answer_span(
    tokenizer, messages: Messages, text: str, prompt: str, template_arguments: Mapping[str, Any] | None
) -> tuple[int, int]:
    """Where in a rendered chat its last answer stands, the end-of-turn token included.

    Args:
      tokenizer: a fast transformers tokenizer with a chat template.
      messages: the chat; the last message is the assistant's.
      text: what the template makes of it.
      prompt: what the template makes of the messages before, with the header of the answer.
      template_arguments: as for `render`.

    Returns:
      (start, end) in characters.

    Raises:
      ChatTemplateError: the template renders no assistant text, or differently by its content.
    """
    content = messages[-1]["content"]
    for shown in (content, content.strip()):
        end = len(prompt) + len(shown)
        if text.startswith(prompt) and text.startswith(shown, len(prompt)) and "reasoning_content" not in messages[-1]:
            end_of_turn = leading_special(tokenizer, text, end)
            if end_of_turn:
                return len(prompt), end + len(end_of_turn)
    start, end = _content_span(tokenizer, messages, text, prompt, template_arguments)
    return start, end + len(leading_special(tokenizer, text, end))


def _content_span(
    tokenizer, messages: Messages, text: str, prompt: str, template_arguments: Mapping[str, Any] | None
) -> tuple[int, int]:
    """Character span in `text` of the last message, found by putting placeholders in its place."""

    def with_content(placeholder: str) -> str:
        return render_text(
            tokenizer,
            [*messages[:-1], {"role": "assistant", "content": placeholder}],
            add_generation_prompt=False,
            template_arguments=template_arguments,
        )

    one, other = with_content("X"), with_content("Y")
    if one == other:
        raise ChatTemplateError(
            f"{describe(tokenizer)} renders no assistant text, so there is nothing to train on: an answer leaves no "
            "trace in the output"
        )
    start = _common_length(one, other)
    suffix = one[start + 1 :]
    end = len(text) - len(suffix)
    content = messages[-1]["content"].strip()
    # A think block that the assistant wrote itself stands before the place where the placeholder went.
    if text[:end].rstrip() == prompt + content or not text.startswith(one[:start]):
        start = _common_length(text, prompt)
    if not (text.endswith(suffix) and start <= end):
        raise ChatTemplateError(f"{describe(tokenizer)} renders what follows an answer depending on its content")
    return start, end


def _common_length(one: str, other: str) -> int:
    """Length of the longest common prefix."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def leading_special(tokenizer, text: str, start: int = 0) -> str:
    """The special token that stands in `text` at `start`, together with white space before it; "" if there is none."""
    pattern = _special_tokens(tokenizer)
    match = pattern.match(text, start) if pattern else None
    return match.group() if match else ""


@functools.lru_cache(maxsize=8)
def _special_tokens(tokenizer) -> re.Pattern[str] | None:
    """Matches any special token; kept for a tokenizer, since listing its tokens takes longer than all else."""
    specials = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    alternatives = "|".join(re.escape(token) for token in sorted(specials, key=len, reverse=True))
    return re.compile(rf"\s*(?:{alternatives})") if specials else None


def seams(tokenizer) -> re.Pattern[str] | None:
    """Matches the tokens that stand for themselves: a text may be cut before and behind them (with `split`) and its
    pieces tokenised apart. None where that is not sure to give the ids of the whole."""
    added, inner = tokenizer.added_tokens_decoder.values(), tokenizer.backend_tokenizer
    if any(token.lstrip or token.rstrip or token.single_word or token.normalized for token in added):
        return None  # these look at what surrounds them
    if not added or inner.encode_special_tokens:  # as if they were any text
        return None
    if "Metaspace" in str(inner.pre_tokenizer):
        return None  # that treats the beginning of a text otherwise
    longest_first = sorted((token.content for token in added), key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, longest_first))})")


def adds_bos(tokenizer) -> bool:
    """Whether the tokenizer itself begins a text with its BOS."""
    return tokenizer.bos_token_id is not None and tokenizer("x")["input_ids"][:1] == [tokenizer.bos_token_id]


def with_one_bos(ids: list[int], bos: int | None, wanted: bool) -> list[int]:
    """Ids that open a sequence with one BOS, whether the template, the tokenizer, both or one of them adds it."""
    if bos is None:
        return ids
    while ids[:2] == [bos, bos]:
        ids = ids[1:]
    return [bos, *ids] if wanted and ids[:1] != [bos] else ids


def _check_ids(tokenizer, ids: list[int], embedding_rows: int | None) -> None:
    if embedding_rows is None or not ids or max(ids) < embedding_rows:
        return
    beyond = max(ids)
    raise ValueError(
        f"token id {beyond} ({tokenizer.convert_ids_to_tokens(beyond)!r}) lies beyond the target's embedding of "
        f"{embedding_rows} rows; the tokenizer of {tokenizer.name_or_path!r} belongs to another target"
    )

"""Chats to token ids: the prompt that serving sees, and a training row with its loss mask.

The loss mask needs no generation markers in the template. A conversation is rendered with two different placeholders
in the place of an answer; where the two texts begin and cease to differ is where answers stand.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

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
    ids, _ = _encode_opening(tokenizer, text)
    _check_ids(tokenizer, ids, embedding_rows)
    return ids


def render_training(
    tokenizer,
    messages: Messages,
    *,
    template_arguments: Mapping[str, Any] | None = None,
    embedding_rows: int | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Renders a chat that ends with an answer to a training row.

    Supervised are the tokens that serving generates: of every assistant turn its content and the end-of-turn token.
    What the template adds around them is not: role headers, an empty think block, the newline after the end of turn.
    The last answer is tokenised apart from what precedes it, as in serving, so that no token straddles the two.

    Args:
      tokenizer: a fast transformers tokenizer with a chat template.
      messages: {"role", "content"} of each turn; the last is the assistant's.
      template_arguments: as for `render`; use those of serving.
      embedding_rows: rows of the target's embedding; ids are checked against it.

    Returns:
      (tokens_T int32, loss_mask_T bool).

    Raises:
      ChatTemplateError: the template is missing, unsafe, fails on these messages, or renders no assistant text.
      ValueError: the chat doesn't end with an answer, or a token id lies beyond the embedding.
    """
    if not messages or messages[-1]["role"] != "assistant":
        role = messages[-1]["role"] if messages else None
        raise ValueError(f"a chat to train on must end with an assistant message, not with role {role!r}")
    text = render_text(tokenizer, messages, add_generation_prompt=False, template_arguments=template_arguments)
    spans = _supervised_spans(tokenizer, messages, text, template_arguments)

    last_start = spans[-1][0]
    ids, offsets = _encode_opening(tokenizer, text[:last_start])
    answer_ids, answer_offsets = _encode(tokenizer, text[last_start:])
    ids += answer_ids
    offsets += [(start + last_start, end + last_start) for start, end in answer_offsets]
    _check_ids(tokenizer, ids, embedding_rows)
    mask = [any(lo <= start < end <= hi for lo, hi in spans) for start, end in offsets]
    return np.asarray(ids, np.int32), np.asarray(mask, bool)


def _supervised_spans(
    tokenizer, messages: Messages, text: str, template_arguments: Mapping[str, Any] | None
) -> list[tuple[int, int]]:
    """Character spans in `text` of every answer with its end of turn, in order."""
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    contents = [_content_span(tokenizer, messages, text, turn, template_arguments) for turn in turns]
    end_of_turn = _leading_special(tokenizer, text[contents[-1][1] :])
    return [(start, end + len(end_of_turn) if text.startswith(end_of_turn, end) else end) for start, end in contents]


def _content_span(
    tokenizer, messages: Messages, text: str, turn: int, template_arguments: Mapping[str, Any] | None
) -> tuple[int, int]:
    """Character span in `text` of what the assistant says in messages[turn]."""

    def rendered(conversation: Messages, add_generation_prompt: bool = False) -> str:
        return render_text(
            tokenizer,
            conversation,
            add_generation_prompt=add_generation_prompt,
            template_arguments=template_arguments,
        )

    def with_content(placeholder: str) -> str:
        replaced = {"role": "assistant", "content": placeholder}
        return rendered([*messages[:turn], replaced, *messages[turn + 1 :]])

    one, other = with_content("X"), with_content("Y")
    if one == other:
        raise ChatTemplateError(
            f"{describe(tokenizer)} renders no assistant text, so there is nothing to train on: messages[{turn}] "
            "leaves no trace in the output"
        )
    start = _common_length(one, other)
    suffix = one[start + 1 :]
    end = len(text) - len(suffix)
    prompt = rendered(messages[:turn], add_generation_prompt=True)
    content = messages[turn]["content"].strip()
    # A think block that the assistant wrote itself stands before the place where the placeholder went.
    if text[:end].rstrip() == prompt + content or not text.startswith(one[:start]):
        start = _common_length(text, prompt)
    if not (text.endswith(suffix) and start <= end):
        raise ChatTemplateError(f"{describe(tokenizer)} renders what follows messages[{turn}] depending on its content")
    return start, end


def _common_length(one: str, other: str) -> int:
    """Length of the longest common prefix."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _leading_special(tokenizer, text: str) -> str:
    """The special token that `text` begins with, together with white space before it; "" if there is none."""
    specials = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    alternatives = "|".join(re.escape(token) for token in sorted(specials, key=len, reverse=True))
    match = re.match(rf"\s*(?:{alternatives})", text) if specials else None
    return match.group() if match else ""


def _encode(tokenizer, text: str) -> tuple[list[int], list[tuple[int, int]]]:
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    return list(encoding["input_ids"]), list(encoding["offset_mapping"])


def _encode_opening(tokenizer, text: str) -> tuple[list[int], list[tuple[int, int]]]:
    """Encodes text that opens a sequence: one BOS, whether the template, the tokenizer, both or one of them adds it."""
    ids, offsets = _encode(tokenizer, text)
    bos = tokenizer.bos_token_id
    if bos is None:
        return ids, offsets
    while ids[:2] == [bos, bos]:
        ids, offsets = ids[1:], offsets[1:]
    if ids[:1] != [bos] and tokenizer("x")["input_ids"][0] == bos:
        ids, offsets = [bos, *ids], [(0, 0), *offsets]
    return ids, offsets


def _check_ids(tokenizer, ids: list[int], embedding_rows: int | None) -> None:
    if embedding_rows is None or not ids or max(ids) < embedding_rows:
        return
    beyond = max(ids)
    raise ValueError(
        f"token id {beyond} ({tokenizer.convert_ids_to_tokens(beyond)!r}) lies beyond the target's embedding of "
        f"{embedding_rows} rows; the tokenizer of {tokenizer.name_or_path!r} belongs to another target"
    )

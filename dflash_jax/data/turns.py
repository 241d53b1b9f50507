"""Chats with answers to training rows that are what serving sees and generates, token for token.

Each answer of a chat is one act of serving: a prompt of everything before it, and tokens that the target generates
behind. A chat becomes one row with all its answers, as long as the prompt of each earlier answer and the answer itself
open that row unchanged. Where they don't, because the template rewrites what is past (Qwen3 drops earlier reasoning)
or tokens straddle a seam, the earlier answer gets a row of its own.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dflash_jax.data import chat
from dflash_jax.data.chat_template import check_safe, render_text


@dataclasses.dataclass(frozen=True)
class RenderedTurn:
    """Text of one answer and what surrounds it; concatenated without `serving`, the chat up to its answer.

    serving: the prompt that serving sees. prompt: what precedes the answer here; not the same where the template puts
    something between, as Qwen3 does with an empty think block. answer: what serving generates, with its end of turn.
    rest: what the template adds behind.
    """

    serving: str
    prompt: str
    answer: str
    rest: str


@dataclasses.dataclass(frozen=True)
class ChatRow:
    """tokens_T int32 and loss_mask_T bool; as_served: whether each answer directly follows its serving prompt."""

    tokens: np.ndarray
    loss_mask: np.ndarray
    as_served: bool


class TurnRenderer:
    """Renders chats by a tokenizer's chat template, and tokenises many of them together."""

    def __init__(self, tokenizer, *, template_arguments: Mapping[str, Any] | None = None):
        """Prepares rendering.

        Args:
          tokenizer: a fast transformers tokenizer with a chat template.
          template_arguments: further variables of the template, such as {"enable_thinking": False}; those of serving.

        Raises:
          ChatTemplateError: the template is missing or unsafe.
        """
        check_safe(tokenizer)
        self.tokenizer = tokenizer
        self._arguments = template_arguments
        self._adds_bos = chat.adds_bos(tokenizer)
        self._seams = chat.seams(tokenizer)
        # Files of tokenizers may ask for both, which `tokenizer(text)` overrules and the tokeniser inside does not.
        tokenizer.backend_tokenizer.no_truncation()
        tokenizer.backend_tokenizer.no_padding()

    def render(self, messages: chat.Messages) -> list[RenderedTurn]:
        """Renders every answer of a chat with what precedes it.

        Raises:
          ChatTemplateError: the template fails on these messages, or renders no assistant text.
          ValueError: the chat doesn't end with an answer.
        """
        if not messages or messages[-1]["role"] != "assistant":
            role = messages[-1]["role"] if messages else None
            raise ValueError(f"a chat to train on must end with an assistant message, not with role {role!r}")
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        return [self._render_turn(messages[: turn + 1]) for turn in turns]

    def tokenise(self, chats: Sequence[Sequence[RenderedTurn]]) -> list[list[ChatRow]]:
        """Training rows of rendered chats: one of all answers, preceded by those of answers that don't fit into it.

        Prompt and answer are tokenised apart, as in serving, so that no token straddles the two.
        """
        ids = self._encode([text for turns in chats for turn in turns for text in _texts(turn)])
        return [_chat_rows([self._tokenised(turn, ids) for turn in turns]) for turns in chats]

    def _render_turn(self, messages: chat.Messages) -> RenderedTurn:
        serving = self._text(messages[:-1], add_generation_prompt=True)
        text = self._text(messages, add_generation_prompt=False)
        start, end = chat.answer_span(self.tokenizer, messages, text, serving, self._arguments)
        return RenderedTurn(serving, text[:start], text[start:end], text[end:])

    def _text(self, messages: chat.Messages, *, add_generation_prompt: bool) -> str:
        return render_text(
            self.tokenizer,
            messages,
            add_generation_prompt=add_generation_prompt,
            template_arguments=self._arguments,
        )

    def _encode(self, texts: list[str]) -> Iterator[list[int]]:
        """Token ids of each text. Pieces that texts share, such as the turns that every later prompt repeats, are
        tokenised once."""
        pieces = [self._seams.split(text) if self._seams else [text] for text in texts]
        different = list(dict.fromkeys(itertools.chain.from_iterable(pieces)))
        encodings = self.tokenizer.backend_tokenizer.encode_batch_fast(different, add_special_tokens=False)
        ids = {piece: encoding.ids for piece, encoding in zip(different, encodings, strict=True)}
        return (list(itertools.chain.from_iterable(ids[piece] for piece in several)) for several in pieces)

    def _tokenised(self, turn: RenderedTurn, ids: Iterator[list[int]]) -> "_TokenisedTurn":
        prompt, answer, rest = (next(ids) for _ in range(3))
        prompt = chat.with_one_bos(self.tokenizer, prompt, self._adds_bos)
        if turn.serving == turn.prompt:
            return _TokenisedTurn(prompt, prompt, answer, rest)
        return _TokenisedTurn(chat.with_one_bos(self.tokenizer, next(ids), self._adds_bos), prompt, answer, rest)


def training_rows(
    tokenizer, messages: chat.Messages, *, template_arguments: Mapping[str, Any] | None = None
) -> list[ChatRow]:
    """Training rows of one chat that ends with an answer; see TurnRenderer, which does many at once.

    Supervised are the tokens that serving generates: of an answer its content and the end-of-turn token. What the
    template adds around them is not: role headers, an empty think block, the newline after the end of turn.

    Raises:
      ChatTemplateError: the template is missing, unsafe, fails on these messages, or renders no assistant text.
      ValueError: the chat doesn't end with an answer.
    """
    renderer = TurnRenderer(tokenizer, template_arguments=template_arguments)
    return renderer.tokenise([renderer.render(messages)])[0]


@dataclasses.dataclass(frozen=True)
class _TokenisedTurn:
    serving: list[int]
    prompt: list[int]
    answer: list[int]
    rest: list[int]


def _texts(turn: RenderedTurn) -> list[str]:
    texts = [turn.prompt, turn.answer, turn.rest]
    return texts if turn.serving == turn.prompt else [*texts, turn.serving]


def _chat_rows(turns: Sequence[_TokenisedTurn]) -> list[ChatRow]:
    *earlier, last = turns
    ids = last.prompt + last.answer + last.rest
    mask = np.zeros(len(ids), bool)
    mask[len(last.prompt) : len(last.prompt) + len(last.answer)] = True
    rows = []
    for turn in earlier:
        start, end = len(turn.serving), len(turn.serving) + len(turn.answer)
        if ids[:start] == turn.serving and ids[start:end] == turn.answer and end <= len(last.prompt):
            mask[start:end] = True
        else:
            rows += _chat_rows([turn])
    return [*rows, ChatRow(np.asarray(ids, np.int32), mask, last.serving == last.prompt)]

"""Chats with answers to training rows that are what serving sees and generates, token for token.

Each answer of a chat is one act of serving: a prompt of everything before it, and tokens that the target generates
behind. A chat becomes one row with all its answers, as long as the prompt of each earlier answer and the answer itself
open that row unchanged. Where they don't, because the template rewrites what is past (Qwen3 drops earlier reasoning)
or tokens straddle a seam, the earlier answer gets a row of its own.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dflash_jax.data import chat
from dflash_jax.data.chat_template import check_safe, render_texts


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
        self._bos, self._adds_bos = tokenizer.bos_token_id, chat.adds_bos(tokenizer)
        self._seams = chat.seams(tokenizer)
        self._dated = "strftime_now" in str(tokenizer.chat_template)
        # Files of tokenizers may ask for both, which `tokenizer(text)` overrules and the tokeniser inside does not.
        tokenizer.backend_tokenizer.no_truncation()
        tokenizer.backend_tokenizer.no_padding()

    def rows_of(self, chats: Sequence[chat.Messages]) -> list[list[ChatRow] | ValueError]:
        """Training rows of many chats, or the error that `render` raises for one of them."""
        rendered = self._render_all(chats)
        tokenised = iter(self.tokenise([turns for turns in rendered if not isinstance(turns, ValueError)]))
        return [turns if isinstance(turns, ValueError) else next(tokenised) for turns in rendered]

    def render(self, messages: chat.Messages) -> list[RenderedTurn]:
        """Renders every answer of a chat with what precedes it.

        Raises:
          ChatTemplateError: the template fails on these messages, or renders no assistant text.
          ValueError: the chat doesn't end with an answer.
        """
        return [turn for until in _until_each_answer(messages) for turn in self._render_turns([until])]

    def tokenise(self, chats: Sequence[Sequence[RenderedTurn]]) -> list[list[ChatRow]]:
        """Training rows of rendered chats: one of all answers, preceded by those of answers that don't fit into it.

        Prompt and answer are tokenised apart, as in serving, so that no token straddles the two.
        """
        ids = self._encode([text for turns in chats for turn in turns for text in _texts(turn)])
        return [_chat_rows([self._tokenised(turn, ids) for turn in turns]) for turns in chats]

    def _render_all(self, chats: Sequence[chat.Messages]) -> list[list[RenderedTurn] | ValueError]:
        """What `render` gives of each chat, or its error; many together, which takes half the time, where none fails.

        A template that asks for the time has to render prompt and answer of a chat at nearly the same one.
        """
        if len(chats) < 2 or self._dated:
            return [self._render_or_error(messages) for messages in chats]
        with contextlib.suppress(ValueError):
            untils = [_until_each_answer(messages) for messages in chats]
            turns = iter(self._render_turns([until for several in untils for until in several]))
            return [[next(turns) for _ in several] for several in untils]
        half = len(chats) // 2
        return self._render_all(chats[:half]) + self._render_all(chats[half:])

    def _render_or_error(self, messages: chat.Messages) -> list[RenderedTurn] | ValueError:
        try:
            return self.render(messages)
        except ValueError as error:
            return error

    def _render_turns(self, chats: Sequence[chat.Messages]) -> list[RenderedTurn]:
        """The last answer of each chat, with what precedes it."""
        servings = self._texts([messages[:-1] for messages in chats], add_generation_prompt=True)
        texts = self._texts(chats, add_generation_prompt=False)
        turns = []
        for messages, serving, text in zip(chats, servings, texts, strict=True):
            start, end = chat.answer_span(self.tokenizer, messages, text, serving, self._arguments)
            prompt = serving if text[:start] == serving else text[:start]  # rarely two texts, and then kept once
            turns.append(RenderedTurn(serving, prompt, text[start:end], text[end:]))
        return turns

    def _texts(self, chats: Sequence[chat.Messages], *, add_generation_prompt: bool) -> list[str]:
        return render_texts(
            self.tokenizer, chats, add_generation_prompt=add_generation_prompt, template_arguments=self._arguments
        )

    def _encode(self, texts: list[str]) -> Iterator[list[int]]:
        """Token ids of each text. Pieces that texts share, such as the turns that every later prompt repeats, are
        tokenised once."""
        pieces = [self._seams.split(text) if self._seams else [text] for text in texts]
        different = list(dict.fromkeys(itertools.chain.from_iterable(pieces)))
        encodings = self.tokenizer.backend_tokenizer.encode_batch_fast(different, add_special_tokens=False)
        ids = {piece: encoding.ids for piece, encoding in zip(different, encodings, strict=True)}
        return (_joined([ids[piece] for piece in several]) for several in pieces)

    def _tokenised(self, turn: RenderedTurn, ids: Iterator[list[int]]) -> "_TokenisedTurn":
        prompt, answer, rest = (next(ids) for _ in range(3))
        prompt = chat.with_one_bos(prompt, self._bos, self._adds_bos)
        if turn.serving == turn.prompt:
            return _TokenisedTurn(prompt, prompt, answer, rest)
        return _TokenisedTurn(chat.with_one_bos(next(ids), self._bos, self._adds_bos), prompt, answer, rest)


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


def _until_each_answer(messages: chat.Messages) -> list[chat.Messages]:
    """The chat up to each of its answers.

    Raises:
      ValueError: it doesn't end with an answer.
    """
    if not messages or messages[-1]["role"] != "assistant":
        role = messages[-1]["role"] if messages else None
        raise ValueError(f"a chat to train on must end with an assistant message, not with role {role!r}")
    return [messages[:end] for end, message in enumerate(messages, start=1) if message["role"] == "assistant"]


def _texts(turn: RenderedTurn) -> list[str]:
    texts = [turn.prompt, turn.answer, turn.rest]
    return texts if turn.serving == turn.prompt else [*texts, turn.serving]


def _joined(lists: Iterable[list[int]]) -> list[int]:
    joined = []
    for ids in lists:
        joined += ids  # sooner than element by element, as itertools.chain does it
    return joined


def _chat_rows(turns: Sequence[_TokenisedTurn]) -> list[ChatRow]:
    *earlier, last = turns
    ids = _joined([last.prompt, last.answer, last.rest])
    mask = np.zeros(len(ids), bool)
    mask[len(last.prompt) : len(last.prompt) + len(last.answer)] = True
    rows = []
    for turn in earlier:
        start, end = len(turn.serving), len(turn.serving) + len(turn.answer)
        if ids[:start] == turn.serving and ids[start:end] == turn.answer and end <= len(last.prompt):
            mask[start:end] = True
        else:
            rows += _chat_rows([turn])
    return [*rows, ChatRow(np.fromiter(ids, np.int32, len(ids)), mask, last.serving == last.prompt)]

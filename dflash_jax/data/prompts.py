"""Prompts as token ids: conversations rendered as serving does, and a seed for each."""

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from dflash_jax.data import chat, chat_template
from dflash_jax.data.records import Conversation
from dflash_jax.data.report import ReadReport, SkippedRow


@dataclasses.dataclass(frozen=True)
class EncodedPrompt:
    """A conversation and the token ids that the target reads."""

    conversation: Conversation
    ids: list[int]

    @property
    def name(self) -> str:
        """The conversation's id."""
        return self.conversation.id


def encode_prompts(
    tokenizer,
    conversations: Sequence[Conversation],
    report: ReadReport,
    *,
    max_prompt_length: int,
    embedding_rows: int | None = None,
    template_arguments: Mapping[str, Any] | None = None,
    system: str | None = None,
) -> list[EncodedPrompt]:
    """Renders prompts as serving does. What can't be rendered or is too long moves to the report's skipped rows.

    Args:
      tokenizer: the target's.
      conversations: as they were read, with their `report`, which is updated.
      max_prompt_length: in tokens.
      embedding_rows: rows of the target's embedding.
      template_arguments: further variables of the chat template.
      system: a system message for conversations that have none.

    Raises:
      ChatTemplateError: the template is missing or unsafe, which no row could survive.
    """
    chat_template.check_safe(tokenizer)
    encoded = []
    for conversation in conversations:
        if system and conversation.messages[0]["role"] != "system":
            messages = [{"role": "system", "content": system}, *conversation.messages]
            conversation = dataclasses.replace(conversation, messages=messages)
        try:
            ids = chat.render(
                tokenizer,
                conversation.messages,
                add_generation_prompt=True,
                template_arguments=template_arguments,
                embedding_rows=embedding_rows,
            )
            if len(ids) > max_prompt_length:
                raise ValueError(f"a prompt longer than {max_prompt_length} tokens")
            encoded.append(EncodedPrompt(conversation, ids))
        except ValueError as error:
            report.skipped.append(SkippedRow(conversation.line, conversation.id, str(error)))
    report.rows_out = len(encoded)
    return encoded


def longest_prompt(context: int, max_new_tokens: int) -> int:
    """Tokens that a context leaves to the prompt.

    Raises:
      ValueError: it leaves none.
    """
    if max_new_tokens >= context:
        raise ValueError(
            f"--max_new_tokens={max_new_tokens}: must be below {context}, the context that prompt and answer share"
        )
    return context - max_new_tokens


def row_seed(seed: int, name: str) -> int:
    """A seed of 31 bits for the prompt of that id, the same whenever and beside whatever it is answered."""
    return int.from_bytes(hashlib.sha256(f"{seed}\x1f{name}".encode()).digest()[:4], "big") >> 1

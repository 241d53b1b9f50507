"""What rows of chats look like in the wild, and the one form that everything behind works with.

| Known by                         | Form                                                                        |
| -------------------------------- | --------------------------------------------------------------------------- |
| `messages`                       | OpenAI: {"role", "content"}; content is text, or parts of type "text"       |
| `conversations`, `conversation`  | ShareGPT: {"from", "value"} or {"role", "content"}                          |
| `instruction`                    | Alpaca: optional `input` and `system`; the answer in `output` or `response` |
| `prompt`                         | a plain prompt; the answer, if any, in `response` or `completion`           |
| `input_ids`                      | tokens, with `loss_mask` (0, 1) or `labels` (−100: not supervised)          |

A row is what the first of these fields in it says.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

MESSAGE_FIELDS = ("messages", "conversations", "conversation")
TEXT_FIELDS = ("instruction", "prompt")
TOKEN_FIELD = "input_ids"

ROLES = ("system", "user", "assistant")  # of chats to train on
PROMPT_ROLES = (*ROLES, "tool")  # what templates know; nobody is trained to say it
_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bard": "assistant",
    "bing": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
}
IGNORED_LABEL = -100


class RowError(ValueError):
    """What is wrong with one row."""


def messages_of(row: Mapping[str, Any]) -> list[dict[str, str]]:
    """The messages of a row in any of the forms with text, checked.

    A system message without text at the beginning is left out: some sets write one into every row.

    Raises:
      RowError: says what is wrong.
    """
    field = next((name for name in (*MESSAGE_FIELDS, *TEXT_FIELDS) if row.get(name) is not None), None)
    if field is None:
        names = [f'"{name}"' for name in (*MESSAGE_FIELDS[:2], *TEXT_FIELDS, TOKEN_FIELD)]
        raise RowError(f"none of the fields {', '.join(names)} is there")
    if field in MESSAGE_FIELDS:
        messages = _turns(row[field], field)
    elif field == "instruction":
        messages = _single_turn(_instruction(row), row, ("output", "response"))
    else:
        messages = _single_turn(row["prompt"], row, ("response", "completion"))
    if len(messages) > 1 and messages[0]["role"] == "system" and not str(messages[0]["content"] or "").strip():
        messages = messages[1:]
    check_messages(messages)
    return messages


def check_messages(messages: Any) -> None:
    """Checks that messages are: a system message or none, then user and assistant in turn, all with text.

    Raises:
      RowError: says what is wrong.
    """
    if not isinstance(messages, list):
        raise RowError('"messages" is not a list')
    if not messages:
        raise RowError('"messages" is empty')
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise RowError(f"messages[{i}] has no role")
        check_role(message["role"], f"messages[{i}]")
        if not isinstance(message.get("content"), str) or not message["content"].strip():
            raise RowError(f"messages[{i}] has no text content")
        check_text(f"{message['content']}{message.get('reasoning_content', '')}", f"messages[{i}]")
    roles = [message["role"] for message in messages]
    first = int(roles[0] == "system")
    if first == len(roles):
        raise RowError("there is nothing but a system message")
    for i in range(first, len(roles)):
        expected = ("user", "assistant")[(i - first) % 2]
        if roles[i] != expected:
            raise RowError(f"messages[{i}] has role {roles[i]!r} where {expected!r} is due")


def check_role(role: Any, what: str, allowed: Sequence[str] = ROLES) -> None:
    """Checks that a role is an allowed one; `what` names the message in the error, a RowError."""
    if role not in allowed:
        shown = repr(role[:40] if isinstance(role, str) else role)
        raise RowError(f"{what} has role {shown}; allowed are {', '.join(allowed)}")


def check_text(text: str, what: str) -> None:
    """Checks that a text can be written: JSON knows halves of characters, which no tokenizer does.

    Raises:
      RowError: names `what` the text is of.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RowError(f"{what} holds half a character, {text[error.start]!r}") from error


def tokens_and_mask(row: Mapping[str, Any]) -> tuple[list[int], list[bool]]:
    """Tokens and loss mask of a row that is tokenised already.

    Raises:
      RowError: they are not lists of equal length, or say anything but what is supervised.
    """
    ids = token_ids(row, TOKEN_FIELD)
    if row.get("loss_mask") is not None:
        mask = _of_length(row, "loss_mask", len(ids))
        if not all(value in (0, 1) for value in mask):
            raise RowError('"loss_mask" holds something else than 0 and 1')
        return ids, [bool(value) for value in mask]
    if row.get("labels") is not None:
        labels = _of_length(row, "labels", len(ids))
        if not all(label in (IGNORED_LABEL, token) for label, token in zip(labels, ids, strict=True)):
            raise RowError(f'"labels" differ from "{TOKEN_FIELD}"; they are the same tokens, or {IGNORED_LABEL}')
        return ids, [label != IGNORED_LABEL for label in labels]
    raise RowError(f'"{TOKEN_FIELD}" without "loss_mask" or "labels" doesn\'t say what the target wrote')


def token_ids(row: Mapping[str, Any], field: str) -> list[int]:
    """The token ids in a field of a row.

    Raises:
      RowError: there are none, or they are no token ids.
    """
    ids = row.get(field)
    # One pass of NumPy over the types that JSON knows; bool is not an id, and an id beyond 31 bits is none either.
    if not isinstance(ids, list) or not ids or set(map(type, ids)) != {int} or min(ids) < 0 or max(ids) >= 2**31:
        raise RowError(f'"{field}" is not a list of token ids')
    return ids


def _of_length(row: Mapping[str, Any], field: str, length: int) -> list:
    values = row[field]
    if not isinstance(values, list) or len(values) != length:
        raise RowError(f'"{field}" is not a list as long as "{TOKEN_FIELD}"')
    return values


def _turns(turns: Any, field: str) -> list[dict[str, Any]]:
    if not isinstance(turns, list):
        raise RowError(f'"{field}" is not a list')
    return [_message(turn, i) for i, turn in enumerate(turns)]


def _message(turn: Any, place: int) -> dict[str, Any]:
    """One turn with its role by our name; a role that is not known stays, to be named by check_messages."""
    if not isinstance(turn, dict):
        raise RowError(f"messages[{place}] has no role")
    role = turn.get("role", turn.get("from"))
    content = turn.get("content", turn.get("value"))
    message = {"role": _ROLES.get(role, role) if isinstance(role, str) else role, "content": _text(content, place)}
    if isinstance(reasoning := turn.get("reasoning_content"), str) and reasoning:
        message["reasoning_content"] = reasoning
    return message


def _text(content: Any, place: int) -> Any:
    """Text of a content that is text or a list of text parts; what it is otherwise stays as it is."""
    if not isinstance(content, list) or not content or not all(isinstance(part, dict) for part in content):
        return content
    for part in content:
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise RowError(f"messages[{place}] has a part of type {str(part.get('type'))[:40]!r}; only text is read")
    return "".join(part["text"] for part in content)


def _instruction(row: Mapping[str, Any]) -> Any:
    instruction, further = row["instruction"], row.get("input")
    if isinstance(instruction, str) and isinstance(further, str) and further.strip():
        return f"{instruction}\n\n{further}"
    return instruction


def _single_turn(prompt: Any, row: Mapping[str, Any], answers: tuple[str, ...]) -> list[dict[str, Any]]:
    messages = [{"role": "user", "content": prompt}]
    if isinstance(system := row.get("system"), str) and system.strip():
        messages.insert(0, {"role": "system", "content": system})
    answer = next((row[name] for name in answers if row.get(name) is not None), None)
    return messages if answer is None else [*messages, {"role": "assistant", "content": answer}]


def supervised_ids(prompt_ids: list[int], answer_ids: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """(tokens_T int64, loss_mask_T bool) of a prompt and the answer that follows it."""
    tokens_T = np.asarray(prompt_ids + answer_ids, np.int64)
    return tokens_T, np.arange(len(tokens_T)) >= len(prompt_ids)

"""Values of configuration fields against their type hints: bool, int, float, str, Literal, tuple, unions, None."""

from __future__ import annotations

import contextlib
import math
import types
import typing
from typing import Any, Literal

_WORDS = {bool: "True or False", int: "a whole number", float: "a finite number", str: "text", type(None): "None"}
_BOOLS = {"true": True, "false": False}


def typed(value: Any, hint: Any) -> Any:
    """The value as the hint wants it (a float for an int, a tuple for a list); TypeError when it is something else."""
    for option in _options(hint):
        origin, arguments = typing.get_origin(option), typing.get_args(option)
        if origin is Literal:
            if isinstance(value, str) and value in arguments:
                return value
        elif origin is tuple:
            if isinstance(value, (list, tuple)):
                return tuple(typed(item, arguments[0]) for item in value)
        elif isinstance(value, bool):  # which is an int to Python, and to nobody else
            if option is bool:
                return value
        elif option is float:
            if isinstance(value, (int, float)) and math.isfinite(value):
                return float(value)
        elif isinstance(value, option):
            return value
    raise TypeError


def parsed(text: str, hint: Any) -> Any:
    """The value that a text stands for; ValueError when it fits no type of the hint.

    "none" is None where the hint allows it. A tuple is written (1, 2), [1, 2] or 1,2.
    """
    text = text.strip()
    for option in _options(hint):
        origin, arguments = typing.get_origin(option), typing.get_args(option)
        if option is type(None):
            if text.lower() == "none":
                return None
        elif option is bool:
            if text.lower() in _BOOLS:
                return _BOOLS[text.lower()]
        elif origin is Literal:
            if text in arguments:
                return text
        elif origin is tuple:
            items = [item for item in text.strip("()[] ").split(",") if item.strip()]
            return tuple(parsed(item, arguments[0]) for item in items)
        else:
            with contextlib.suppress(ValueError):
                return option(text)
    raise ValueError


def described(hint: Any) -> str:
    """What a hint allows, in words for a message."""
    if len(_options(hint)) > 1:
        return " or ".join(described(option) for option in typing.get_args(hint))
    if typing.get_origin(hint) is Literal:
        return " or ".join(map(repr, typing.get_args(hint)))
    if typing.get_origin(hint) is tuple:
        return f"a list, each item {described(typing.get_args(hint)[0])}"
    return _WORDS[hint]


def _options(hint: Any) -> tuple:
    """The alternatives of a hint, None first: text would otherwise take "none" for itself."""
    if typing.get_origin(hint) not in (typing.Union, types.UnionType):
        return (hint,)
    return tuple(sorted(typing.get_args(hint), key=lambda option: option is not type(None)))

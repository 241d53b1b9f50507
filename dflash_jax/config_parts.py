"""Settings in parts: frozen dataclasses of fields, read from a config file and flags, checked, wrong ones named."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from dflash_jax.config_types import described, parsed, typed
from dflash_jax.models.config_fields import ConfigError

# Name → dataclass of its fields, all with defaults.
Parts = Mapping[str, type]

# (field, whether its value is fine, what is allowed)
Rule = tuple[str, bool, str]


@contextlib.contextmanager
def naming(field: str, value: Any) -> Iterator[None]:
    """Inside, a ValueError becomes a ConfigError that names the field."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(f"{field}={value!r}: {error}") from error


def defaults(parts: Parts) -> ConfigDict:
    """All fields with their defaults, to be changed by a config file. Unknown fields can't be set by mistake.

    Values are checked by `checked_parts`, which knows more than the type of a default.
    """
    values = {name: {field.name: field.default for field in dataclasses.fields(part)} for name, part in parts.items()}
    return ConfigDict(values, type_safe=False).lock()


def from_text(parts: Parts, part: str, field: str, text: str) -> Any:
    """What a flag's text means for a field.

    Text that fits no type of the field, or belongs to no field, stays text: `checked_parts` then reports it together
    with everything else that is wrong.
    """
    hint = typing.get_type_hints(parts[part]).get(field, str) if part in parts else str
    try:
        return parsed(text, hint)
    except ValueError:
        return text


def checked_parts(config: Mapping[str, Any], parts: Parts) -> dict[str, Any]:
    """The parts with the values of `config`, whose types are checked.

    Raises:
        ConfigError: once, with every unknown field and every value of a wrong type.
    """
    problems = [f"{name}: no such part; {_nearest(name, parts)}" for name in sorted(set(config) - set(parts))]
    checked = {name: _part(name, config.get(name, {}), parts, problems) for name in parts}
    _raise(problems)
    return checked


def check_rules(parts: Mapping[str, Any], at_least: Mapping[str, float], rules: Sequence[Rule]) -> None:
    """Checks the ranges of fields whose types are right.

    Args:
        parts: as `checked_parts` gives them.
        at_least: "part.field" → least value; None is fine where the type allows it.
        rules: whatever else must hold.

    Raises:
        ConfigError: once, with all that is wrong, each as «field=value: what is allowed».
    """
    values = {f"{name}.{field}": value for name, part in parts.items() for field, value in vars(part).items()}
    counts = [(field, values[field] is None or values[field] >= least, least) for field, least in at_least.items()]
    every = [*((field, fine, f"at least {least}") for field, fine, least in counts), *rules]
    _raise([f"{field}={values[field]!r}: must be {allowed}" for field, fine, allowed in every if not fine])


def _raise(problems: Sequence[str]) -> None:
    if problems:
        raise ConfigError("wrong settings:\n  " + "\n  ".join(problems))


def _part(name: str, values: Any, parts: Parts, problems: list[str]):
    part = parts[name]
    if not isinstance(values, Mapping):
        problems.append(
            f"{name}={values!r}: is a part; set its fields, such as {name}.{dataclasses.fields(part)[0].name}"
        )
        return None
    hints = typing.get_type_hints(part)
    checked = {}
    for field, value in values.items():
        if field not in hints:
            problems.append(f"{name}.{field}: no such field; {_nearest(f'{name}.{field}', _every_field(parts))}")
            continue
        try:
            checked[field] = typed(value, hints[field])
        except TypeError:
            problems.append(f"{name}.{field}={value!r}: must be {described(hints[field])}")
    return None if problems else part(**checked)


def _every_field(parts: Parts) -> list[str]:
    return [f"{name}.{field.name}" for name, part in parts.items() for field in dataclasses.fields(part)]


def _nearest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.4)
    return f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"

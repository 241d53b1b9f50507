"""Typed reading of config.json fields: every error names the field, the value seen and what is allowed."""

from collections.abc import Iterator, Mapping
from typing import Any


class ConfigError(ValueError):
    """A config.json, or a config built from it, holds a value that can't be used."""


class Fields:
    """Reads typed fields from one config.json, looking through several sections in order.

    Args:
        sections: (prefix for messages, mapping) pairs; the first section in which a field is present wins. A field
            that is null counts as absent, as Hugging Face configs write null for "not set".
    """

    def __init__(self, *sections: tuple[str, Mapping[str, Any]]):
        for prefix, section in sections:
            if not isinstance(section, Mapping):
                raise ConfigError(f"{prefix.rstrip('.') or 'config.json'} must be a JSON object, got {section!r}")
        self._sections = sections

    def find(self, name: str) -> tuple[str, Any] | None:
        """The (full name, value) of the first section that sets the field, or None."""
        return next(self._occurrences(name), None)

    def get(self, name: str, default: Any = None) -> Any:
        """The raw value, or default when no section sets it."""
        found = self.find(name)
        return default if found is None else found[1]

    def require(self, name: str) -> tuple[str, Any]:
        """Like find, but a field that is absent everywhere is an error."""
        found = self.find(name)
        if found is None:
            places = " or ".join(f"{prefix}{name}" for prefix, _ in self._sections)
            raise ConfigError(f"config.json does not set {places}, which is needed")
        return found

    def integer(self, name: str, *, minimum: int = 1, default: int | None = None) -> int:
        """An int of at least minimum. Booleans and fractional numbers are refused."""
        full_name, value = self._value(name, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise ConfigError(f"{full_name} must be an integer of at least {minimum}, got {value!r}")
        return value

    def optional_integer(self, name: str, *, minimum: int = 1) -> int | None:
        """Like integer, but None when the field is absent or null."""
        return None if self.find(name) is None else self.integer(name, minimum=minimum)

    def number(self, name: str, *, default: float | None = None) -> float:
        """A finite positive number."""
        full_name, value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
            raise ConfigError(f"{full_name} must be a positive number, got {value!r}")
        return float(value)

    def optional_number(self, name: str) -> float | None:
        """Like number, but None when the field is absent or null."""
        return None if self.find(name) is None else self.number(name)

    def boolean(self, name: str, *, default: bool) -> bool:
        """true or false; nothing that merely looks like it."""
        full_name, value = self._value(name, default)
        if not isinstance(value, bool):
            raise ConfigError(f"{full_name} must be true or false, got {value!r}")
        return value

    def integers(self, name: str) -> tuple[int, ...]:
        """A non-empty list of integers, in the order written."""
        full_name, value = self.require(name)
        is_list = isinstance(value, (list, tuple)) and len(value) > 0
        if not is_list or any(isinstance(item, bool) or not isinstance(item, int) for item in value):
            raise ConfigError(f"{full_name} must be a non-empty list of integers, got {value!r}")
        return tuple(value)

    def optional_strings(self, name: str) -> tuple[str, ...] | None:
        """A list of strings, or None when the field is absent or null."""
        found = self.find(name)
        if found is None:
            return None
        full_name, value = found
        if not isinstance(value, (list, tuple)) or any(not isinstance(item, str) for item in value):
            raise ConfigError(f"{full_name} must be a list of strings, got {value!r}")
        return tuple(value)

    def _value(self, name: str, default: Any) -> tuple[str, Any]:
        found = self.find(name)
        if found is None and default is not None:
            return name, default
        return self.require(name)

    def _occurrences(self, name: str) -> Iterator[tuple[str, Any]]:
        for prefix, section in self._sections:
            if section.get(name) is not None:
                yield prefix + name, section[name]


def check_attention_shape(hidden_size: int, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    """Checks what grouped-query attention with rotary positions needs of its sizes.

    Raises:
        ConfigError: a size below one, query heads that can't be grouped, or an odd head size.
    """
    sizes = {"hidden_size": hidden_size, "num_attention_heads": num_heads, "num_key_value_heads": num_kv_heads}
    for name, value in {**sizes, "head_dim": head_dim}.items():
        if value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}")
    if num_heads % num_kv_heads:
        raise ConfigError(
            f"num_attention_heads ({num_heads}) must be a multiple of num_key_value_heads ({num_kv_heads})"
        )
    if head_dim % 2:
        raise ConfigError(f"head_dim must be even for rotary positions, got {head_dim}")

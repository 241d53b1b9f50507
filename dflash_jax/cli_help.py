"""What --help says: of commands that take a config file, every field of it."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import textwrap
import typing
from collections.abc import Sequence
from typing import Any

from dflash_jax.config_parts import Parts
from dflash_jax.config_types import described


def asks_for_help(argv: Sequence[str]) -> bool:
    """Whether -h or --help, or absl's -help or --helpshort, is among the arguments behind the program."""
    return bool({"-h", "-help", "--help", "-helpshort", "--helpshort"} & set(argv[1:]))


def help_on_fields(parts: Parts) -> str:
    """The flags of a config file: fields with their defaults and values, parts with what their docstrings say."""
    paragraphs = ["--config FILE sets fields, --config.part.field=value changes one:"]
    for name, part in parts.items():
        hints = typing.get_type_hints(part)
        fields = "\n".join(
            f"  --config.{name}.{field.name}={_as_flag(field.default)}  {described(hints[field.name])}"
            for field in dataclasses.fields(part)
        )
        paragraphs.append(f"{fields}\n\n{textwrap.indent(inspect.cleandoc(part.__doc__ or ''), '    ')}")
    return "\n\n".join(paragraphs)


def _as_flag(value: Any) -> str:
    """A value as a flag takes it."""
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def config_parser(module: str, description: str | None) -> argparse.ArgumentParser:
    """A parser of what `python -m module` takes besides the flags of a training config, which its help points to."""
    return argparse.ArgumentParser(
        prog=f"python -m {module}",
        usage="%(prog)s --config FILE [--config.part.field=value …] [options]",
        description=description,
        epilog="--config and --config.part.field are those of train.py: python train.py --help lists them",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )

"""Flags of the training command: `--config FILE` and `--config.part.field=value`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from absl import flags
from ml_collections import config_flags

from dflash_jax.config import PARTS, ConfigError, ExperimentConfig, to_experiment, unknown_field


def experiment_from_flags(argv: Sequence[str]) -> ExperimentConfig:
    """The checked experiment that a command line asks for.

    Args:
        argv: sys.argv; argv[0] is the program.

    Raises:
        ConfigError: an unknown flag or field, a value of the wrong type or out of range, a config file that can't be
            found or has no get_config. The message names the field.
    """
    _check_fields(argv[1:])
    values = flags.FlagValues()
    config_flags.DEFINE_config_file(
        "config", None, "Python file with get_config().", flag_values=values, sys_argv=list(argv)
    )
    try:
        left_over = values(list(argv))[1:]
    except flags.Error as error:
        raise ConfigError(str(error)) from error
    except FileNotFoundError as error:
        raise ConfigError(f"--config: no such file: {error.filename or error}") from error
    if left_over:
        raise ConfigError(f"unknown arguments: {' '.join(left_over)}; use --config FILE --config.part.field=value")
    if values.config is None:
        raise ConfigError("--config is missing: name a config file, such as --config configs/smollm2_quickstart.py")
    return to_experiment(values.config)


def exit_with(error: Exception) -> None:
    """Ends the program with status 2 and the message, without a traceback: the user's input was wrong."""
    print(f"error: {error}", file=sys.stderr)
    raise SystemExit(2)


def _check_fields(arguments: Sequence[str]) -> None:
    """The flag library reports an unknown field by a traceback; this names it and the nearest that exists."""
    for argument in arguments:
        if not argument.startswith("--config."):
            continue
        dotted = argument.removeprefix("--config.").split("=")[0]
        part, _, field = dotted.partition(".")
        if part not in PARTS or field not in PARTS[part].__dataclass_fields__:
            raise ConfigError(unknown_field(dotted))

"""What the commands share: flags of those that take a config file, and how wrong input ends all of them.

`--config FILE` and `--config.part.field=value` are read here. ml_collections has flags for this, but they stop at the
first wrong value with a traceback, and know no None.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import os
import re
import runpy
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from absl import app, flags, logging
from ml_collections import ConfigDict

from dflash_jax.cli_help import asks_for_help
from dflash_jax.config import PARTS, ExperimentConfig, to_experiment
from dflash_jax.config_parts import ConfigError, Parts, from_text

AGAIN_SECONDS = 0.05
INTERRUPTED = 130  # the status of a program that Ctrl-C ended, as shells have it
NO_ADVICE = ("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # to install PyTorch; read when transformers is imported


def experiment_from_flags(argv: Sequence[str]) -> ExperimentConfig:
    """The checked experiment that a command line asks for.

    Args:
        argv: sys.argv; argv[0] is the program. A value follows its flag behind = or as the next argument.

    Raises:
        ConfigError: an unknown flag or field, values of the wrong type or out of range, a config file that can't be
            found or run. The message names file or field, and all wrong fields at once.
    """
    return to_experiment(settings_from_flags(argv, PARTS, example="configs/smollm2_quickstart.py"))


def settings_from_flags(argv: Sequence[str], parts: Parts, *, example: str) -> dict[str, Any]:
    """The settings that a command line asks for, not checked yet; arguments and errors as `experiment_from_flags`.

    It is the first that such a command does, so it silences transformers, too.

    Args:
        parts: that a config file of this command has.
        example: a config file of it, for messages.
    """
    os.environ.setdefault(*NO_ADVICE)
    file, overrides = _read_arguments(list(argv[1:]), example)
    settings = load_config_file(file)
    if unknown := sorted(set(settings) - set(parts)):
        raise ConfigError(
            f"--config={file}: it sets {', '.join(unknown)}, and this command knows {', '.join(parts)}; is it a config "
            "file of another command?"
        )
    for dotted, text in overrides:
        part, _, field = dotted.partition(".")
        if not field:
            raise ConfigError(f"--config.{dotted}: name a field of it, as in --config.part.field=value")
        values = settings.setdefault(part, {})
        if isinstance(values, dict):
            values[field] = from_text(parts, part, field, text)
    return settings


def load_config_file(path: str | Path) -> dict[str, Any]:
    """Runs a config file's get_config() and returns its settings as plain dictionaries.

    Raises:
        ConfigError: there is no such file, it has no get_config, or it fails; the message names the line.
    """
    if not Path(path).is_file():
        raise ConfigError(f"--config={path}: there is no such file")
    try:
        get_config = runpy.run_path(str(path)).get("get_config")
        config = get_config() if callable(get_config) else None
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"--config={path}: {type(error).__name__}{_line_of(error, path)}: {reason}") from error
    if not callable(get_config):
        raise ConfigError(f"--config={path}: it must define get_config(), which returns the settings")
    if not isinstance(config, ConfigDict):
        kind = type(config).__name__
        raise ConfigError(f"--config={path}: get_config() must return what default_config() gave it, not {kind}")
    return config.to_dict()


def run_command(main: Callable[[], object], *, goes_on: bool = False) -> None:
    """Runs a command whose flags absl has been told of. Flags that are wrong, and arguments that are none, end it as
    `exit_with` does, Ctrl-C as `ending_when_interrupted` does, and so does a reader of the output who goes. Libraries
    keep to themselves what is no warning."""

    def parsed(argv: Sequence[str]) -> list[str]:
        rest = parsed_flags(argv)
        quieten_libraries()
        return rest

    def interruptible(argv: list[str]) -> None:
        with ending_when_interrupted(goes_on=goes_on), _ending_with_its_reader():
            main()

    app.run(interruptible, flags_parser=parsed)


@contextlib.contextmanager
def _ending_with_its_reader() -> Iterator[None]:
    """Where whoever reads the output has gone, as `head` does, the program ends with status 1 and without a word."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the rest of it fails at the exit
        raise SystemExit(1) from None


def quieten_libraries() -> None:
    """Leaves out what libraries tell at INFO, unless --verbosity asks for it: JAX of accelerators that it did not find,
    tensorflow-datasets and Orbax of all that they do. And transformers' advice to install PyTorch, which is not needed.

    For when flags have been read: behind that absl chooses INFO itself, where nothing else is chosen.
    """
    if flags.FLAGS["verbosity"].using_default_value:
        logging.set_verbosity(logging.WARNING)
    os.environ.setdefault(*NO_ADVICE)


@contextlib.contextmanager
def ending_when_interrupted(*, goes_on: bool = False) -> Iterator[None]:
    """Ctrl-C in here ends the program with one line and status INTERRUPTED, without a traceback.

    Args:
        goes_on: whether the same command, given again, goes on where this one stopped.
    """
    try:
        with _losing_no_interrupt():
            yield
    except KeyboardInterrupt:
        print("interrupted" + "; the same command goes on where it stopped" * goes_on, file=sys.stderr)
        _interrupted.set()
        raise SystemExit(INTERRUPTED) from None


_interrupted = threading.Event()


@atexit.register
def _end_before_teardown() -> None:
    """Ends an interrupted program before the interpreter and its libraries are taken down.

    JAX lets Ctrl-C in while XLA compiles, and XLA goes on in threads of its own, which would crash then. Of what else
    happens at exit, all that was registered after this has happened; before it, in some commands, only JAX.
    """
    if _interrupted.is_set():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(INTERRUPTED)


@contextlib.contextmanager
def _losing_no_interrupt() -> Iterator[None]:
    """Python drops what is raised in a callback of its garbage collector, where JAX has one, Ctrl-C too: it is sent
    again a moment later."""
    before = sys.unraisablehook

    def again(unraisable) -> None:
        if not issubclass(unraisable.exc_type, KeyboardInterrupt):
            return before(unraisable)
        timer = threading.Timer(AGAIN_SECONDS, _thread.interrupt_main)
        timer.daemon = True
        timer.start()

    sys.unraisablehook = again
    try:
        yield
    finally:
        sys.unraisablehook = before


def parsed_flags(argv: Sequence[str]) -> list[str]:
    """The program alone, once absl's flags have been read from the rest of argv; for help it ends the program."""
    full = bool({"-helpfull", "--helpfull"} & set(argv[1:]))  # absl itself ends with status 1 for it
    if full or asks_for_help(argv):
        app.usage(shorthelp=not full, writeto_stdout=True, exitcode=0)
    try:
        rest = flags.FLAGS(argv)
    except flags.Error as error:
        missing = re.findall(r"Flag --(\w+) must have a value other than None", str(error))
        exit_with(ValueError(f"missing: --{', --'.join(missing)}") if missing else error)
    if len(rest) > 1:
        exit_with(ValueError(f"unknown arguments: {' '.join(rest[1:])}; every setting is a --flag=value"))
    return rest


@contextlib.contextmanager
def writing(flag: str, path: str | Path) -> Iterator[None]:
    """Inside, a file that can't be written is a ValueError that names the flag or field it was asked for with."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"{flag}={str(path)!r}: can't be written: {error}") from error


def exit_with(error: Exception) -> NoReturn:
    """Ends the program with status 2 and the message, without a traceback: the user's input was wrong."""
    print(f"error: {error}", file=sys.stderr)
    raise SystemExit(2)


def _read_arguments(arguments: list[str], example: str) -> tuple[str, list[tuple[str, str]]]:
    """The config file, and (part.field, text) of every override, in order: the last one counts."""
    file, overrides, unknown = None, [], []
    while arguments:
        flag, equals, text = arguments.pop(0).partition("=")
        if flag != "--config" and not flag.startswith("--config."):
            unknown.append(flag + equals + text)
            continue
        if not equals:
            if not arguments:
                raise ConfigError(f"{flag}: its value is missing")
            text = arguments.pop(0)
        if flag == "--config":
            file = text
        else:
            overrides.append((flag.removeprefix("--config."), text))
    if unknown:
        raise ConfigError(f"unknown arguments: {' '.join(unknown)}; use --config FILE --config.part.field=value")
    if file is None:
        raise ConfigError(f"--config is missing: name a config file, such as --config {example}")
    return file, overrides


def _line_of(error: Exception, path: str | Path) -> str:
    """Where in the config file an error arose, " in line N", or nothing when it did not."""
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return f" in line {error.lineno}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return f" in line {lines[-1]}" if lines else ""

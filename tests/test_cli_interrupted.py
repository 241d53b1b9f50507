"""Ctrl-C, and a reader of the output who goes, end every command with no more than a line."""

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from absl import flags

import train
from dflash_jax import cli
from dflash_jax.data import features
from dflash_jax.evaluation import benchmark

# XLA needs seconds for it, and is interrupted in the first of them.
INTERRUPTED_COMPILATION = """
import atexit, os, signal, threading
from dflash_jax.cli import ending_when_interrupted
import jax, jax.numpy as jnp

def chain(x):
    for i in range(300):
        x = jnp.tanh(x @ x.T + i * jnp.sin(x))
    return x

atexit.register(print, "left in order", end="")
with ending_when_interrupted():
    lowered = jax.jit(chain).lower(jnp.ones((64, 64)))
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    lowered.compile()
    print("compiled")
"""


@pytest.fixture(autouse=True)
def no_interrupt_outlives_a_test(monkeypatch):
    monkeypatch.setattr(cli, "_interrupted", threading.Event())


def interrupted(*_, **__):
    raise KeyboardInterrupt


@contextlib.contextmanager
def ending_with(said: str, capsys):
    with pytest.raises(SystemExit) as left:
        yield
    assert left.value.code == 130
    assert capsys.readouterr().err == said + "\n"


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_command_of_flags(monkeypatch, capsys, goes_on):
    monkeypatch.setattr(sys, "argv", ["command"])

    def parsed(argv):  # nothing: other tests define flags that are required
        flags.FLAGS.mark_as_parsed()
        return argv

    monkeypatch.setattr(cli, "parsed_flags", parsed)
    with ending_with("interrupted" + "; the same command goes on where it stopped" * goes_on, capsys):
        cli.run_command(interrupted, goes_on=goes_on)


@pytest.mark.parametrize(
    ("main", "read", "said"),
    [
        (train.main, "dflash_jax.cli.experiment_from_flags", "interrupted"),
        (
            features.main,
            "dflash_jax.cli.experiment_from_flags",
            "interrupted; the same command goes on where it stopped",
        ),
        (benchmark.main, "dflash_jax.evaluation.benchmark.settings_from_flags", "interrupted"),
    ],
)
def test_a_command_of_a_config(monkeypatch, capsys, main, read, said):
    monkeypatch.setattr(read, interrupted)
    monkeypatch.setattr("logging.basicConfig", lambda **_: None)  # it would close what pytest reads
    monkeypatch.setattr(train, "experiment_from_flags", interrupted)
    with ending_with(said, capsys):
        main(["command", "--config=x.py", "--out=x"] if main is features.main else ["command", "--config=x.py"])


def test_ctrl_c_in_the_garbage_collector_is_not_lost(capsys):
    """Where JAX has a callback, and Python only reports what is raised."""

    def interrupt(phase, info):
        gc.callbacks.remove(interrupt)
        signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with ending_with("interrupted", capsys), cli.ending_when_interrupted():
            gc.callbacks.append(interrupt)
            gc.collect()
            time.sleep(10)
            pytest.fail("went on")
    finally:
        signal.signal(signal.SIGINT, before)


def test_ctrl_c_while_xla_compiles_is_no_crash():
    slow = {name: text for name, text in os.environ.items() if name not in ("XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR")}
    ended = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_COMPILATION], env=slow, capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "left in order", "interrupted\n")


def test_a_reader_that_goes_ends_a_command_quietly():
    command = "from dflash_jax.cli import run_command; run_command(lambda: print('word ' * 99999))"
    with subprocess.Popen([sys.executable, "-c", command], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as ended:
        assert ended.stdout.read(5) == b"word "
        ended.stdout.close()
        assert (ended.stderr.read(), ended.wait()) == (b"", 1)

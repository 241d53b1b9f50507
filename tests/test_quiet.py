"""Commands keep what libraries tell at INFO to themselves, and transformers' advice to install PyTorch."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_jax.cli import settings_from_flags
from dflash_jax.config import PARTS

ROOT = Path(__file__).parents[1]
COMMAND = """
from absl import logging
from dflash_jax.cli import run_command

def main():
    logging.info("of no interest")
    logging.warning("of interest")
    import importlib.util
    real = importlib.util.find_spec
    importlib.util.find_spec = lambda name, *rest: None if name == "torch" else real(name, *rest)
    import transformers
    assert not transformers.is_torch_available()

run_command(main)
"""


@pytest.mark.parametrize(("flags", "told"), [([], False), (["--verbosity=0"], True)])
def test_only_warnings_of_libraries_are_shown(flags, told):
    environment = {name: value for name, value in os.environ.items() if name != "TRANSFORMERS_NO_ADVISORY_WARNINGS"}
    command = [sys.executable, "-c", COMMAND, *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment, check=True)
    lines = [line.rpartition("] ")[2] for line in done.stderr.splitlines()]
    assert lines == ["of no interest"] * told + ["of interest"]


def test_commands_import_transformers_only_once_they_have_silenced_it():
    modules = ("evaluation.benchmark", "evaluation.training_run", "evaluation.lossless", "checkpoints.export")
    imports = ", ".join(f"dflash_jax.{name}" for name in modules)
    script = f"import sys, {imports}; sys.exit('transformers' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True)


def test_commands_of_a_config_silence_it_too(monkeypatch):
    monkeypatch.setenv("TRANSFORMERS_NO_ADVISORY_WARNINGS", "")
    monkeypatch.delenv("TRANSFORMERS_NO_ADVISORY_WARNINGS")
    settings_from_flags(["train.py", f"--config={ROOT}/configs/smollm2_quickstart.py"], PARTS, example="x.py")
    assert os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] == "1"

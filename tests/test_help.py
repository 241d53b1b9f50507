"""--help of every command: status 0, what it is for, and every flag and field."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest

import train
from dflash_jax import compile_check
from dflash_jax.cli import parsed_flags
from dflash_jax.config import PARTS
from dflash_jax.config_parts import from_text
from dflash_jax.data import features
from dflash_jax.evaluation import benchmark, benchmark_config

ROOT = Path(__file__).parents[1]


def helped(main, capsys, asked: str) -> str:
    status = 0
    try:
        main(["program", asked])
    except SystemExit as left:
        status = left.code
    assert status in (None, 0)
    return capsys.readouterr().out


@pytest.mark.parametrize(("main", "parts"), [(train.main, PARTS), (benchmark.main, benchmark_config.PARTS)])
@pytest.mark.parametrize("asked", ["-h", "--help"])
def test_commands_of_a_config_list_every_field_with_its_default(main, parts, asked, capsys):
    said = helped(main, capsys, asked)
    assert "--config FILE" in said
    for name, part in parts.items():
        for field in dataclasses.fields(part):
            [shown] = re.findall(rf"--config\.{name}\.{field.name}=(\S*)  ", said)
            assert from_text(parts, name, field.name, shown) == field.default
        assert part.__doc__.splitlines()[0] in said


@pytest.mark.parametrize(
    ("main", "flags"),
    [(compile_check.main, ["--hardware", "--programs", "--dump"]), (features.main, ["--out", "--shard_gb"])],
)
def test_commands_beside_a_config_point_to_its_fields(main, flags, capsys):
    said = helped(main, capsys, "--help")
    for part in ("--config FILE", "train.py --help", *flags):
        assert part in said


@pytest.mark.parametrize("asked", ["-h", "--help"])
def test_commands_of_flags_list_them_with_status_0(asked):
    command = [sys.executable, "-m", "dflash_jax.data.prepare", asked]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Prepares chats for training" in done.stdout and "--max_length" in done.stdout


@pytest.mark.parametrize(("asked", "full"), [("-help", False), ("--helpshort", False), ("-helpfull", True)])
def test_absls_other_ways_to_ask_end_with_status_0_too(asked, full, capsys):
    said = helped(parsed_flags, capsys, asked)
    assert said and ("absl.app:" in said) is full  # flags of other modules, too

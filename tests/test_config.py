"""Settings through the flags of train.py: what is wrong is named, with the value seen and what is allowed."""

import subprocess
import sys
from pathlib import Path

import pytest

from dflash_jax.cli import experiment_from_flags, load_config_file
from dflash_jax.config import ConfigError, default_config, to_experiment
from dflash_jax.config_types import described, parsed, typed
from dflash_jax.evaluation.benchmark_config import to_benchmark

ROOT = Path(__file__).parents[1]
COMPLETE = """\
from dflash_jax.config import default_config


def get_config():
    config = default_config()
    config.model.target = "folder"
    config.data.train_file = "chats.jsonl"
    config.checkpoint.directory = "runs/x"
    {line}
    return config
"""


def write_config(folder: Path, line: str = "pass") -> Path:
    path = folder / "experiment.py"
    path.write_text(COMPLETE.format(line=line))
    return path


def experiment(folder: Path, *overrides: str, line: str = "pass"):
    arguments = [f"--config={write_config(folder, line)}", *(f"--config.{text}" for text in overrides)]
    return experiment_from_flags(["train.py", *arguments])


def value(checked, dotted: str):
    part, field = dotted.split(".")
    return getattr(getattr(checked, part), field)


# field, the value as it is written in a config file, what the message must say is allowed
WRONG = [
    ("optimizer.learning_rate", "0.0", "between 0 and 1"),
    ("optimizer.learning_rate", "float('nan')", "a finite number"),
    ("training.steps", "-1", "at least 0"),
    ("training.rows_per_step", "2.5", "a whole number"),
    ("training.rows_per_step", "True", "a whole number"),
    ("training.accumulation", "3", "a divisor of training.rows_per_step=64"),
    ("training.accumulation", "0", "a divisor of"),
    ("training.epochs", "float('inf')", "a finite number"),
    ("training.loss_decay_gamma", "0.0", "more than 0, 'auto', or None"),
    ("training.loss_decay_gamma", "'fast'", "a finite number or 'auto' or None"),
    ("training.compute_dtype", "'float64'", "'auto' or 'float32' or 'bfloat16'"),
    ("training.feature_cache", "'disk'", "'none' or 'memory'"),
    ("training.seed", "2**32", "from 0 to 2³²−1"),
    ("training.time_limit_minutes", "-0.5", "at least 0"),
    ("model.block_size", "1", "at least 2"),
    ("model.block_size", "'16'", "a whole number"),
    ("model.initialisation", "'zeros'", "'random' or 'target' or 'regression'"),
    ("model.mask_token_id", "-3", "at least 0"),
    ("model.target_layer_ids", "(1, 2.5)", "a list, each item a whole number"),
    ("model.target", "''", "a folder, a hub id"),
    ("model.warm_start", "''", "a folder or a hub id, or None"),
    ("data.train_file", "None", "text"),
    ("data.length_buckets", "(1024, 512)", "rising lengths, the last at least data.max_length=3072"),
    ("data.length_buckets", "(1024, 2048)", "rising lengths, the last at least data.max_length=3072"),
    ("data.length_buckets", "(0, 4096)", "rising lengths"),
    ("data.length_buckets", "()", "rising lengths"),
    ("data.length_buckets", "4096", "a list, each item a whole number"),
    ("data.max_rows", "0", "at least 1"),
    ("checkpoint.directory", "''", "the directory of the run"),
    ("checkpoint.keep", "0", "at least 1"),
    ("checkpoint.export_dtype", "'float16'", "'float32' or 'bfloat16'"),
    ("evaluation.decode_width", "17", "from 1 to model.block_size=16, or None"),
    ("evaluation.decode_every_steps", "250", "0 or a multiple of evaluation.every_steps=500"),
    ("evaluation.decode_max_new_tokens", "1", "at least 2"),
    ("logging.every_steps", "0", "at least 1"),
]


@pytest.mark.parametrize(("field", "written", "allowed"), WRONG)
def test_a_wrong_value_is_refused_with_what_is_allowed(tmp_path, field, written, allowed):
    with pytest.raises(ConfigError) as error:
        experiment(tmp_path, line=f"config.{field} = {written}")
    message = str(error.value)
    assert f"{field}={eval(written)!r}: must be " in message
    assert allowed in message
    assert message.count("must be") == 1  # nothing else is blamed


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.steps=abc", "training.steps='abc': must be a whole number or None"),
        ("training.steps=1.5", "training.steps='1.5': must be a whole number or None"),
        ("optimizer.learning_rate=fast", "optimizer.learning_rate='fast': must be a finite number"),
        ("optimizer.learning_rate=nan", "optimizer.learning_rate=nan: must be a finite number"),
        ("training.loss_decay_gamma=fast", "training.loss_decay_gamma='fast': must be a finite number or 'auto'"),
        ("data.length_buckets=(a,b)", "data.length_buckets='(a,b)': must be a list, each item a whole number"),
        ("model.target=", "model.target='': must be a folder, a hub id"),
        ("optimizer.learning_rat=1", "optimizer.learning_rat: no such field; did you mean optimizer.learning_rate?"),
        ("training.acumulation=2", "training.acumulation: no such field; did you mean training.accumulation?"),
        ("optimiser.learning_rate=1", "optimiser: no such part; did you mean optimizer?"),
        (
            "qqq.x=1",
            "qqq: no such part; there are model, data, training, mesh, optimizer, checkpoint, evaluation, logging",
        ),
        ("training=5", "--config.training: name a field of it"),
    ],
)
def test_a_wrong_flag_is_refused_by_name(tmp_path, override, message):
    with pytest.raises(ConfigError) as error:
        experiment(tmp_path, override)
    assert message in str(error.value)


def test_all_that_is_wrong_is_reported_at_once(tmp_path):
    with pytest.raises(ConfigError) as error:
        experiment(tmp_path, "training.stepz=3", "checkpoint.keep=many", line="config.model.num_layers = 'five'")
    for part in (
        "training.stepz: no such field; did you mean training.steps?",
        "checkpoint.keep='many': must be a whole number",
        "model.num_layers='five': must be a whole number",
    ):
        assert part in str(error.value)
    with pytest.raises(ConfigError) as error:
        experiment(tmp_path, "training.seed=-1", "model.block_size=8", "evaluation.decode_width=9")
    assert "training.seed=-1: must be from 0" in str(error.value)
    assert "evaluation.decode_width=9: must be from 1 to model.block_size=8" in str(error.value)


@pytest.mark.parametrize(
    ("override", "wanted"),
    [
        ("optimizer.learning_rate=1e-3", 1e-3),
        ("training.epochs=3", 3.0),
        ("training.steps=20", 20),
        ("training.steps=none", None),
        ("model.mask_token_id=7", 7),
        ("model.mask_token_id=None", None),
        ("model.warm_start=runs/x/drafter", "runs/x/drafter"),
        ("model.warm_start=none", None),
        ("training.time_limit_minutes=1.5", 1.5),
        ("training.loss_decay_gamma=3", 3.0),
        ("training.loss_decay_gamma=none", None),
        ("training.loss_decay_gamma=auto", "auto"),
        ("data.length_buckets=(1024, 4096)", (1024, 4096)),
        ("data.length_buckets=[3072]", (3072,)),
        ("data.length_buckets=1024,2048,3072", (1024, 2048, 3072)),
        ("model.target_layer_ids=()", ()),
        ("model.target_layer_ids=5", (5,)),
        ("training.feature_cache=memory", "memory"),
    ],
)
def test_a_flag_sets_a_field_of_any_type(tmp_path, override, wanted):
    found = value(experiment(tmp_path, override), override.split("=")[0])
    assert (found, type(found)) == (wanted, type(wanted))


@pytest.mark.parametrize("written", ["3", "3.5", "None", "'auto'"])
def test_a_config_file_may_set_every_type_that_a_field_has(tmp_path, written):
    found = experiment(tmp_path, line=f"config.training.loss_decay_gamma = {written}").training.loss_decay_gamma
    assert found == eval(written)


@pytest.mark.parametrize(
    ("hint", "text", "wanted"),
    [
        (bool, "true", True),
        (bool, "False", False),
        (bool | None, "none", None),
        (tuple[bool, ...], "True,false", (True, False)),
    ],
)
def test_switches_are_true_or_false(hint, text, wanted):
    assert parsed(text, hint) == wanted
    assert typed(wanted, hint) == wanted


@pytest.mark.parametrize("value", [1, 0, "true", None, 1.0])
def test_nothing_else_is_a_switch(value):
    with pytest.raises(TypeError):
        typed(value, bool)
    with pytest.raises(ValueError):  # noqa: PT011  (it says no more than that)
        parsed("yes", bool)
    assert described(bool) == "True or False"


def test_flags_come_after_the_file_and_the_last_one_counts(tmp_path):
    path = write_config(tmp_path, "config.training.steps = 5")
    arguments = ["--config.training.steps", "6", "--config", str(path), "--config.training.steps=7"]
    assert experiment_from_flags(["train.py", *arguments]).training.steps == 7
    assert experiment(tmp_path).training.steps is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--config is missing"),
        (["--config"], "--config: its value is missing"),
        (["--config=absent.py"], "--config=absent.py: there is no such file"),
        (["--config=configs"], "--config=configs: there is no such file"),
        (["--config={file}", "--config.training.steps"], "--config.training.steps: its value is missing"),
        (["--config={file}", "--learning_rate=1"], "unknown arguments: --learning_rate=1"),
        (["--config={file}", "--learning_rate", "1"], "unknown arguments: --learning_rate 1"),
    ],
)
def test_a_wrong_command_line_is_refused(tmp_path, arguments, message):
    path = write_config(tmp_path)
    with pytest.raises(ConfigError) as error:
        experiment_from_flags(["train.py", *(argument.format(file=path) for argument in arguments)])
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("x = 1\n", "it must define get_config()"),
        ("get_config = 3\n", "it must define get_config()"),
        ("def get_config():\n    pass\n", "must return what default_config() gave it, not NoneType"),
        ("def get_config():\n    return {'model': {}}\n", "must return what default_config() gave it, not dict"),
        ("def get_config()\n    return 1\n", "SyntaxError in line 1: expected ':'"),
        ("import os\nimport no_such_module\n", "ModuleNotFoundError in line 2: No module named 'no_such_module'"),
        (COMPLETE.format(line="config.training.stps = 3"), "AttributeError in line 9"),
        (COMPLETE.format(line="config.training.stps = 3"), 'Did you mean "steps" instead of "stps"?'),
        (COMPLETE.format(line="1 / 0"), "ZeroDivisionError in line 9: division by zero"),
        (COMPLETE.format(line="config.training = 3"), "training=3: is a part; set its fields, such as training.steps"),
    ],
)
def test_a_broken_config_file_is_one_message(tmp_path, content, message):
    path = tmp_path / "broken.py"
    path.write_text(content)
    with pytest.raises(ConfigError) as error:
        experiment_from_flags(["train.py", f"--config={path}"])
    assert message in str(error.value)


def test_default_config_is_complete_but_for_what_only_the_user_knows():
    with pytest.raises(ConfigError) as error:
        to_experiment(default_config().to_dict())
    lines = str(error.value).splitlines()[1:]
    assert [line.split("=")[0].strip() for line in lines] == ["model.target", "data.train_file", "checkpoint.directory"]


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.py")), ids=lambda path: path.stem)
def test_every_shipped_config_is_valid(path):
    if path.stem.endswith("_benchmark"):
        checked = to_benchmark(load_config_file(path)).output
    else:
        checked = experiment_from_flags(["train.py", f"--config={path}"]).checkpoint
    assert checked.directory == f"runs/{path.stem}"  # no two configs share a run


def run_train(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "train.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_command_exits_with_a_message_and_without_a_traceback(tmp_path):
    path = write_config(tmp_path)
    failed = run_train(f"--config={path}", "--config.model.block_size=1", "--config.training.seed=-4")
    assert failed.returncode == 2
    assert failed.stderr.startswith("error: wrong settings:")
    assert "model.block_size=1: must be at least 2" in failed.stderr
    assert "training.seed=-4: must be from 0 to" in failed.stderr
    assert "Traceback" not in failed.stderr


def test_the_command_explains_itself():
    helped = run_train("--help")
    assert helped.returncode == 0
    assert "--config.optimizer.learning_rate=1e-3" in helped.stdout

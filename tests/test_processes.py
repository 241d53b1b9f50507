"""Two processes train one drafter: as one process does, through stops, and without hanging when one dies."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from many_processes import ROOT, ended, free_port, start
from safetensors.numpy import load_file
from tiny_run import chat_row, own_rows, read_metrics, settings, write_config, write_rows, write_target

from dflash_jax.checkpoints.export import export_checkpoint
from dflash_jax.checkpoints.safetensors_io import CheckpointError
from dflash_jax.data import features
from dflash_jax.processes import HEARTBEAT_SECONDS, join

STEPS = 80


TWICE = """
import os, signal, sys, train
from dflash_jax.training.trainer import Trainer

def interrupt(self):
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGINT)
    print("went on")

Trainer._advance = interrupt
train.main(sys.argv)
"""


@pytest.fixture(autouse=True)
def ctrl_c():
    """SIGINT as a terminal's user has it: a shell's background jobs ignore it, and what they start does so too."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, compiled_programs) -> Path:
    """Holds target and chats. Half of these have no anchor, so with a row each, a process often has nothing to add."""
    folder = tmp_path_factory.mktemp("files")
    target = write_target(folder / "target")
    short = [chat_row(f"short-{i}", [i, 7, 3], [9]) for i in range(6)]
    write_rows(folder / "chats.jsonl", [*own_rows(target, 6), *short])
    return folder


def config(folder: Path, directory: Path, **fields) -> Path:
    fields = {
        "training__steps": STEPS,
        "training__rows_per_step": 2,
        "mesh__data": 1,
        "mesh__fsdp": -1,
        "checkpoint__every_steps": 5,
        "checkpoint__draft_vocab_size": 24,  # rows of a head that is divided over the processes
        "data__heldout_file": str(folder / "chats.jsonl"),
        "evaluation__decode_prompts": 2,
        "evaluation__decode_batch_size": 2,
        **fields,
    }
    experiment = settings(folder / "target", folder / "chats.jsonl", directory, **fields)
    return write_config(directory.with_suffix(".py"), experiment)


def saved_steps(directory: Path) -> list[int]:
    return sorted(int(path.name) for path in (directory / "checkpoints").glob("*") if path.name.isdigit())


def wait_for_a_checkpoint(directory: Path) -> None:
    for _ in range(12_000):
        if saved_steps(directory):
            return
        time.sleep(0.01)
    raise AssertionError(f"no checkpoint in {directory}")


def assert_same_drafter(directory: Path, other: Path) -> None:
    ours, theirs = (load_file(folder / "drafter" / "model.safetensors") for folder in (directory, other))
    for name, tensor in ours.items():
        # Adam's steps of 5e-3 on gradients that were summed in another order
        np.testing.assert_allclose(tensor, theirs[name], atol=2e-5, rtol=0, err_msg=name)


@pytest.fixture(scope="module")
def alone(folder):
    """The run of one process with one device."""
    directory = folder / "alone"
    ended(start(config(folder, directory), 1))
    return directory


@pytest.mark.long
def test_two_processes_train_the_drafter_of_one(folder, alone):
    directory = folder / "two"
    first, second = ended(start(config(folder, directory), 2))
    assert_same_drafter(directory, alone)
    vocabularies = [(run / "drafter" / "draft_vocabulary.json").read_text() for run in (directory, alone)]
    assert vocabularies[0] == vocabularies[1]
    assert f"({STEPS} steps" in first and "drafter:" not in second
    ours, wanted = read_metrics(directory), read_metrics(alone)
    assert [line["step"] for line in ours] == [line["step"] for line in wanted]
    # counts and sums of all rows, not of one process
    assert ours[0]["blocks"] == wanted[0]["blocks"] and ours[0]["loss"] == pytest.approx(wanted[0]["loss"], rel=1e-5)
    assert ours[-1]["acceptance_length"] == wanted[-1]["acceptance_length"]


@pytest.mark.long
def test_two_processes_train_on_stored_features_as_one_does_online(folder, alone):
    heldout = str(folder / "chats.jsonl")
    run = settings(folder / "target", folder / "chats.jsonl", folder, data__heldout_file=heldout)
    features.run(run, folder / "features", say=lambda text: None)
    directory = folder / "two_on_stored"
    ended(start(config(folder, directory, data__features=str(folder / "features")), 2))
    assert_same_drafter(directory, alone)


@pytest.mark.long
def test_what_two_processes_saved_is_exported_by_one(folder, alone, caplog):
    directory = folder / "two"
    out = export_checkpoint(directory, folder / "exported", dtype="float32")
    for name in ("model.safetensors", "config.json", "training.json"):
        assert (out / name).read_bytes() == (directory / "drafter" / name).read_bytes()
    card = (out / "README.md").read_text()
    reached = read_metrics(directory)[-1]["acceptance_length"]
    assert f"| step | {STEPS} |" in card and str(folder) not in card
    assert f"| acceptance length | {reached:.2f} (held-out chats" in card
    earlier = export_checkpoint(directory, folder / "earlier", step=STEPS - 5)
    assert "| acceptance length | not measured |" in (earlier / "README.md").read_text()
    named = export_checkpoint(directory, folder / "named", layout="speculators", verifier="some/target")
    assert json.loads((named / "config.json").read_text())["speculators_config"]["verifier"]["name_or_path"] == (
        "some/target"
    )
    assert not caplog.text
    export_checkpoint(directory, folder / "unnamed", layout="speculators")
    assert "target' is no hub id" in caplog.text
    with pytest.raises(CheckpointError, match="verifier='some/target': the layout z-lab names no target"):
        export_checkpoint(directory, folder / "other", verifier="some/target")
    with pytest.raises(CheckpointError, match="already has"):
        export_checkpoint(directory, out)
    (folder / "repository").mkdir()
    (folder / "repository" / "README.md").write_text("mine")
    with pytest.raises(CheckpointError, match="already has README.md"):
        export_checkpoint(directory, folder / "repository")
    (folder / "repository" / "README.md").rename(folder / "repository" / "training.json")
    with pytest.raises(CheckpointError, match="already has training.json"):
        export_checkpoint(directory, folder / "repository")
    with pytest.raises(CheckpointError, match="chats.jsonl' is a file; choose another name"):
        export_checkpoint(directory, folder / "chats.jsonl")
    with pytest.raises(CheckpointError, match=r"checkpoints/\d+ holds no training checkpoint.*which by step"):
        export_checkpoint(directory / "checkpoints" / str(STEPS), folder / "other")
    with pytest.raises(CheckpointError, match="no checkpoint of step 7; there are"):
        export_checkpoint(directory, folder / "other", step=7)
    with pytest.raises(CheckpointError, match="holds no training checkpoint"):
        export_checkpoint(folder / "target", folder / "other")


@pytest.mark.long
@pytest.mark.parametrize(
    ("sent", "before", "after"),
    [
        (signal.SIGTERM, 2, 1),
        pytest.param(signal.SIGTERM, 1, 2, marks=pytest.mark.slow),
        (signal.SIGINT, 1, 1),
        pytest.param(signal.SIGINT, 2, 1, marks=pytest.mark.slow),
    ],
)
def test_asked_to_stop_all_save_one_step_and_any_number_goes_on(folder, alone, sent, before, after):
    directory = folder / f"{sent.name}_from_{before}_to_{after}"
    file = config(folder, directory)
    running = start(file, before)
    wait_for_a_checkpoint(directory)
    for process in running:
        process.send_signal(sent)
    said = ended(running)
    assert "asked to stop" in said[0] and "Traceback" not in "".join(said)
    assert 0 < saved_steps(directory)[-1] < STEPS and not (directory / "drafter").exists()
    ended(start(file, after))
    assert_same_drafter(directory, alone)


def test_a_second_ctrl_c_ends_the_run_at_once(folder):
    directory = folder / "twice"
    (running,) = start(config(folder, directory), 1, program=["-c", TWICE])
    said, _ = running.communicate(timeout=200)
    assert running.returncode == -signal.SIGINT and "went on" not in said, said
    assert "Ctrl-C again ends at once" in said and "Traceback" not in said


@pytest.mark.slow
def test_when_one_process_is_killed_the_other_ends_with_an_error(folder):
    directory = folder / "killed"
    running = start(config(folder, directory, training__steps=100_000), 2)
    wait_for_a_checkpoint(directory)
    running[1].kill()
    assert running[0].wait(timeout=200) != 0
    running[1].wait()


FAILING = """
import jax, sys, train
from dflash_jax.training.trainer import Trainer

log = Trainer._log

def fail(self, *arguments):
    if jax.process_index() == {process} and self.step == 10:
        raise {error}
    log(self, *arguments)

Trainer._log = fail
train.main(sys.argv)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("process", "error", "status"),
    [
        (1, "RuntimeError('a bug on one host')", 1),
        pytest.param(0, "ValueError('wrong on one host')", 2, marks=pytest.mark.slow),
    ],
)
def test_when_one_process_fails_the_other_ends_soon(folder, process, error, status):
    file = config(folder, folder / f"failing_{process}", training__steps=100_000)
    running = start(file, 2, program=["-c", FAILING.format(process=process, error=error)])
    failed, other = running[process], running[1 - process]
    said = failed.communicate(timeout=240)[0]
    begun = time.monotonic()
    heard = other.communicate(timeout=240)[0]
    assert time.monotonic() - begun < HEARTBEAT_SECONDS + 10
    assert failed.returncode == status and "on one host" in said
    assert other.returncode != 0 and heard.strip()


OTHERWISE = """
import os, sys, train
from dflash_jax.evaluation import training_run

if os.environ["JAX_PROCESS_ID"] == "1":
    {change}
train.main(sys.argv)
"""


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("sys.argv += ['--config.optimizer.learning_rate=0.1']", "optimizer.learning_rate: 0.005 in process 0, 0.1 in"),
        ("training_run.rows_fingerprint = lambda rows: 'others'", "data.heldout_file: "),
    ],
)
def test_processes_with_other_settings_or_rows_are_refused_before_the_first_step(folder, change, named):
    directory = folder / f"otherwise_{len(named)}"
    running = start(config(folder, directory), 2, program=["-c", OTHERWISE.format(change=change)])
    for process in running:
        said = process.communicate(timeout=240)[0]
        assert process.returncode == 2 and named in said and "Traceback" not in said, said
    assert not saved_steps(directory)


WAITING = """
import time, jax
from dflash_jax import processes

processes.HEARTBEAT_SECONDS = 10
processes.join()
jax.devices()
with processes.ending_at_once():
    if jax.process_index() == 1:
        raise RuntimeError("a bug on one host")
    time.sleep(200)  # in the place of a collective that no broken connection ends
"""


@pytest.mark.long
def test_one_that_hears_nothing_of_a_failed_process_ends_by_the_heartbeats(folder):
    other, failed = start(folder / "unread.py", 2, program=["-c", WAITING])
    assert "a bug on one host" in failed.communicate(timeout=60)[0] and failed.returncode == 1
    heard = other.communicate(timeout=40)[0]
    assert other.returncode != 0 and "another task died" in heard


APART = """
import sys
from pathlib import Path
from dflash_jax import agreement, processes

processes.join()
agreement.SHARED_SECONDS = 0.5
import jax
agreement.check_shared(Path(sys.argv[2]).parent)
with processes.ending_at_once():
    agreement.check_shared(Path(sys.argv[2]).parent / str(jax.process_index()))
"""


def test_a_directory_that_is_not_the_same_for_all_is_found(tmp_path):
    (tmp_path / "0").mkdir()
    (tmp_path / "1").mkdir()
    for process in start(tmp_path / "file", 2, program=["-c", APART]):
        said = process.communicate(timeout=100)[0]
        assert process.returncode == 1 and "1 did not see in 0.5 s what process 0 wrote there" in said
        assert "this process ends here, by its own error or another's end; the cause is above" in said
    assert not [*tmp_path.glob("*/.*"), *tmp_path.glob(".*")]


def test_a_part_of_the_variables_is_refused():
    with pytest.raises(ValueError, match="JAX_NUM_PROCESSES, JAX_PROCESS_ID: not set"):
        join({"JAX_COORDINATOR_ADDRESS": "host:1"})
    with pytest.raises(ValueError, match="JAX_PROCESS_ID=2 must be from 0 to below JAX_NUM_PROCESSES=2"):
        join({"JAX_COORDINATOR_ADDRESS": "host:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "2"})
    with pytest.raises(ValueError, match="JAX_COORDINATOR_ADDRESS='host': must be host:port"):
        join({"JAX_COORDINATOR_ADDRESS": "host", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0"})
    with pytest.raises(ValueError, match="SLURM_STEP_NUM_TASKS='two': must be a whole number"):
        join({"SLURM_STEP_NUM_TASKS": "two"})
    assert not join({})


@pytest.mark.parametrize(("hosts", "shown"), [(2, ["all", "all"]), (1, ["0", "1"])])
def test_a_task_of_slurm_takes_the_gpus_of_its_host_where_it_is_alone(hosts, shown):
    program = "import jax; from dflash_jax import processes; "
    program += "print(processes.join(), jax.config.read('jax_cuda_visible_devices'))"
    tasks = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": str(hosts)}
    tasks |= {"SLURM_STEP_NODELIST": "localhost", "JAX_COORDINATOR_PORT": str(free_port()), "JAX_PLATFORMS": "cpu"}
    running = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            cwd=ROOT,
            env=os.environ | tasks | {"SLURM_PROCID": str(i), "SLURM_LOCALID": str(i if hosts == 1 else 0)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    texts = [process.communicate(timeout=120) for process in running]
    assert [text for text, _ in texts] == [f"True {devices}\n" for devices in shown], texts


@pytest.mark.slow
def test_two_processes_start_from_the_target_and_learn_its_distributions(folder):
    fields = {"model__initialisation": "target", "training__loss": "teacher", "training__loss_tokens": 32}
    fields |= {"training__steps": 10, "training__rows_per_step": 4, "training__accumulation": 2}
    directories = [folder / f"copied_by_{count}" for count in (1, 2)]
    for count, directory in enumerate(directories, start=1):
        ended(start(config(folder, directory, **fields), count))
    assert_same_drafter(*directories)

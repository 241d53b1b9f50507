"""Several processes store features: each its share, to the bits of any other number, and none waits for a dead one."""

import signal
import subprocess
import time
from pathlib import Path

import jax
import pytest
from many_processes import ended, start
from tiny_run import own_rows, settings, write_config, write_rows, write_target

from dflash_jax.config import ConfigError
from dflash_jax.data import features
from dflash_jax.data.feature_store import StoredSplit

SHARD_BYTES = 10_000
DEVICES = 2  # of each process, which divides the target over them


@pytest.fixture(scope="module")
def files(tmp_path_factory, compiled_programs) -> Path:
    """Holds target and chats."""
    folder = tmp_path_factory.mktemp("files")
    write_rows(folder / "chats.jsonl", own_rows(write_target(folder / "target"), 24))
    return folder


def experiment(files: Path, **fields):
    return settings(files / "target", files / "chats.jsonl", files, **{"mesh__data": 1, "mesh__fsdp": -1} | fields)


def store(files: Path, out: Path, processes: int, *, program: str = "") -> list[subprocess.Popen]:
    """The command, after what `program` does in each process."""
    config = write_config(files / f"{out.name}.py", experiment(files))
    call = f"import sys; from dflash_jax.data import features\n{program}\nfeatures.main([*sys.argv, *{flags(out)!r}])"
    return start(config, processes, devices=DEVICES, program=["-c", call])


def flags(out: Path) -> list[str]:
    return [f"--out={out}", f"--shard_gb={SHARD_BYTES / 1e9}"]


def shards(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


# Process 1 waits before its second shard, the others go on as they are.
SLOW = """
import time
import dflash_jax.processes, jax
from dflash_jax.data import feature_store

dflash_jax.processes.HEARTBEAT_SECONDS = 5
write = feature_store.write_shard

def slow(*arguments):
    write(*arguments)
    if jax.process_index() == 1:
        time.sleep(1000)

feature_store.write_shard = slow
"""


@pytest.mark.long
def test_two_processes_store_what_one_does_and_go_on_for_each_other(files):
    whole = files / "whole"
    first, second = ended(store(files, whole, 2))
    assert "bytes a token" in first and "features → " in first and "shards written" in first
    assert "features" not in second
    count = StoredSplit(whole, "train").schema.splits["train"].shards
    assert count == len(shards(whole)) == 6

    out = files / "killed"
    running = store(files, out, 2, program=SLOW)
    while len(shards(out)) < 4:  # all three of process 0, and one of process 1
        assert all(process.poll() is None for process in running)
        time.sleep(0.05)
    running[1].send_signal(signal.SIGTERM)  # which JAX's service would only note
    running[1].communicate(timeout=5)
    said, _ = running[0].communicate(timeout=30)
    assert running[1].returncode == -signal.SIGTERM and running[0].returncode != 0
    # Which of the two JAX says depends on where process 0 waits when it is told.
    assert "another task died" in said or "Task 1 heartbeat timeout" in said, said
    assert "this process ends here" in said and "features → " not in said, said
    there = shards(out)
    assert [int(name[6:11]) for name in sorted(there)] == [0, 1, 2, 4]
    (out / "train-00003-of-00006.safetensors.0123abcd.tmp").touch()  # as a kill in the middle of a shard leaves it

    (said,) = ended(store(files, out, 1))
    assert {"shards written 2", "shards from before 4"} <= {" ".join(line.split()) for line in said.splitlines()}
    assert shards(out) == shards(whole) and not list(out.glob("*.tmp"))


def test_a_target_for_several_hosts_is_refused(files, tmp_path, monkeypatch):
    wide = experiment(files, mesh__fsdp=2)
    with pytest.raises(ConfigError, match=r"mesh data=1, fsdp=2.* the 1 devices there are; −1 is what is left$"):
        features.run(wide, tmp_path / "out")
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match="this is one of 2 processes, and they have not joined; set JAX_COORD"):
        features.run(wide, tmp_path / "out")
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    with pytest.raises(ConfigError, match=r"the 1 devices .* one of 2 processes: .* over several hosts can't be used"):
        features.run(wide, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_not_shared_is_told(files, tmp_path, monkeypatch):
    """Each process with a disk of its own, and one that looks for what the others wrote."""
    waited = []
    monkeypatch.setattr("dflash_jax.processes.check_joined", lambda: None)
    monkeypatch.setattr("dflash_jax.processes.wait_for_all", waited.append)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    messages = [r"3 shards \(train-00001-of-00006.* others wrote are not there", r"schema\.json is there for the first"]
    for index, message in enumerate(messages):
        monkeypatch.setattr(jax, "process_index", lambda index=index: index)
        with pytest.raises(ValueError, match=rf"--out=.*{message}.*; it must be one folder for all of them"):
            features.run(experiment(files, mesh__fsdp=1), tmp_path / str(index), shard_bytes=SHARD_BYTES)
    assert waited == ["features begun", "features computed", "features begun"]

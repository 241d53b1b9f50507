"""Prepared sets: what was written is read again, streamed in order, without TensorFlow; and the loader over them."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from tensorflow_datasets.core.example_serializer import ExampleSerializer
from tensorflow_datasets.proto import tf_example_pb2

from dflash_jax.data import prepared
from dflash_jax.data.loader import PreparedBatches
from dflash_jax.data.pipeline import Batches
from dflash_jax.data.prepared import PreparedChats, PreparedRow, PreparedSplit, write_prepared
from dflash_jax.data.rows import TrainingRow

BUCKETS = (8, 16, 40)
PROVENANCE = {"target": "t", "target_fingerprint": "f" * 16, "template_arguments": {"enable_thinking": False}}


def rows_of(count):
    """Rows with ids up to 2³¹−1, zeros at their ends, and lengths all over the buckets."""
    rng = np.random.default_rng(0)
    for i in range(count):
        tokens = rng.integers(0, 2**31, 2 + (i * 29) % 39).astype(np.int32)
        tokens[-1] = i % 2 and 70_000  # beyond 16 bits, or a zero byte at the very end
        yield TrainingRow(f"r{i}", tokens, rng.random(len(tokens)) < 0.5)


def write(folder, count=103):
    rows = (
        PreparedRow(row, "heldout" if i % 10 == 0 else "train", "a.jsonl", i + 1)
        for i, row in enumerate(rows_of(count))
    )
    return write_prepared(folder, rows, dict(PROVENANCE))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("set")
    write(out)
    return out


def same(one, other):
    assert one.keys() == other.keys()
    for key in one:
        np.testing.assert_array_equal(one[key], other[key])
        assert one[key].dtype == other[key].dtype


def test_records_are_those_of_tensorflow_datasets():
    info: Any = PreparedChats(data_dir="unused", rows=[], provenance={}).info.features
    serializer = ExampleSerializer(info.get_serialized_info())
    for row in rows_of(3):
        example = {"ids": row.tokens, "mask": row.loss_mask, "id": row.id, "file": "ä.jsonl", "line": 2**40}
        theirs = serializer.serialize_example(info.encode_example(example))
        ours = prepared.record_of(PreparedRow(row, "train", "ä.jsonl", 2**40))
        parse = tf_example_pb2.Example.FromString
        assert parse(ours) == parse(theirs)
        # In one order of fields, so that another process writes the same bytes.
        assert ours == parse(theirs).SerializeToString(deterministic=True)


def test_rows_come_back_in_order_with_their_origin(folder):
    expected = list(rows_of(103))
    for split, indices in {"train": [i for i in range(103) if i % 10], "heldout": range(0, 103, 10)}.items():
        rows = PreparedSplit(folder, split)
        assert len(rows) == len(indices)
        for i, index in enumerate(indices):
            row = rows[i]
            assert (row.id, rows.origin(i)) == (f"r{index}", ("a.jsonl", index + 1))
            np.testing.assert_array_equal(row.tokens, expected[index].tokens)
            np.testing.assert_array_equal(row.loss_mask, expected[index].loss_mask)
            assert row.tokens.dtype == np.int32 and row.loss_mask.dtype == bool
            assert rows.lengths[i] == len(row.tokens)
    assert rows[-1].id == "r100" and [row.id for row in rows[1:3]] == ["r10", "r20"]
    with pytest.raises(IndexError):
        rows[len(rows)]
    assert {name: rows.provenance[name] for name in PROVENANCE} == PROVENANCE


def test_the_same_rows_give_the_same_bytes(folder, tmp_path):
    again = write(tmp_path)
    files = sorted(path.name for path in again.iterdir())
    assert files == sorted(path.name for path in prepared.find_folder(folder).iterdir())
    for name in files:
        assert (again / name).read_bytes() == (prepared.find_folder(folder) / name).read_bytes(), name


def test_large_sets_are_cut_into_shards(tmp_path, monkeypatch):
    monkeypatch.setattr(prepared, "SHARD_BYTES", 2000)
    path = write(tmp_path)
    shards = sorted(path.glob("*-train.array_record-*"))
    assert len(shards) > 3 and shards[-1].name.endswith(f"{len(shards) - 1:05}-of-{len(shards):05}")
    assert [row.id for row in PreparedSplit(path, "train")] == [f"r{i}" for i in range(103) if i % 10]


def test_duplicate_rows_are_kept(tmp_path):
    (row,) = rows_of(1)
    write_prepared(tmp_path, [PreparedRow(row, "train", "a", 1)] * 3, {})
    assert [found.id for found in PreparedSplit(tmp_path, "train")] == ["r0"] * 3


def test_a_set_is_written_whole_or_not_at_all(folder, tmp_path):
    def failing():
        yield PreparedRow(next(rows_of(1)), "train", "a", 1)
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        write_prepared(tmp_path, failing(), {})
    assert not prepared.is_prepared(tmp_path)
    (tmp_path / prepared.NAME / "incomplete.X_1.0.0").mkdir(parents=True)  # as kill −9 leaves it
    write(tmp_path)
    assert [path.name for path in (tmp_path / prepared.NAME).iterdir()] == [prepared.VERSION]
    with pytest.raises(ValueError, match="already holds a prepared set"):
        write(tmp_path)
    with pytest.raises(ValueError, match="no row to write"):
        write_prepared(tmp_path / "empty", [], {})
    with pytest.raises(ValueError, match=r"has no split 'test'; there are (heldout, train|train, heldout)"):
        PreparedSplit(folder, "test")
    with pytest.raises(ValueError, match="holds no prepared set"):
        PreparedSplit(tmp_path / "absent", "train")


def test_neither_writing_nor_reading_imports_tensorflow(tmp_path):
    code = f"""
import sys, numpy as np
from dflash_jax.data import prepared, loader, rows
row = rows.TrainingRow("a", np.arange(5, dtype=np.int32), np.arange(5) > 2)
prepared.write_prepared({str(tmp_path)!r}, [prepared.PreparedRow(row, "train", "a", 1)], {{}})
batches = loader.PreparedBatches(prepared.PreparedSplit({str(tmp_path)!r}, "train"), 1, (8,))
print(next(batches)["tokens_BT"].tolist(), sorted(name for name in sys.modules if name.split(".")[0] == "tensorflow"))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[[0, 1, 2, 3, 4, 0, 0, 0]] []", done.stderr


def test_batches_are_those_of_the_rows_in_memory(folder):
    rows = PreparedSplit(folder, "train")
    ours, memory = PreparedBatches(rows, 4, BUCKETS, seed=3), Batches(list(rows), 4, BUCKETS, seed=3)
    assert ours.steps_per_epoch == memory.steps_per_epoch == 23
    for _ in range(50):
        assert ours.state() == memory.state()
        same(next(ours), next(memory))


@pytest.mark.parametrize(("stop_after", "workers"), [(0, 0), (22, 0), (23, 0), (30, 0), (23, 1)])
def test_resuming_continues_exactly(folder, stop_after, workers):
    batches = PreparedBatches(PreparedSplit(folder, "train"), 4, BUCKETS, seed=3)
    for _ in range(stop_after):
        next(batches)
    resumed = PreparedBatches(PreparedSplit(folder, "train"), 4, BUCKETS, seed=3, workers=workers)
    resumed.set_state(json.loads(json.dumps(batches.state())))
    for _ in range(30):
        same(next(batches), next(resumed))
    assert batches.state() == resumed.state()


def test_ctrl_c_which_a_terminal_sends_to_all_does_not_end_workers(folder):
    others = set(multiprocessing.active_children())
    batches = PreparedBatches(PreparedSplit(folder, "train"), 4, BUCKETS, seed=3, workers=1)
    next(batches)
    workers = set(multiprocessing.active_children()) - others
    assert workers
    for worker in workers:
        os.kill(worker.pid, signal.SIGINT)
    for _ in range(200):  # more than is read ahead
        next(batches)
    assert all(worker.is_alive() for worker in workers)


def test_processes_share_each_batch_and_their_number_may_change(folder):
    rows = PreparedSplit(folder, "train")
    whole = PreparedBatches(rows, 4, BUCKETS, seed=3)
    for count in (2, 4, 1):  # the run goes on with another number of processes
        shares = [PreparedBatches(rows, 4, BUCKETS, seed=3, process_index=i, process_count=count) for i in range(count)]
        for share in shares:
            share.set_state(whole.state())
        for _ in range(10):
            parts = [next(share) for share in shares]
            same(next(whole), {key: np.concatenate([part[key] for part in parts]) for key in parts[0]})
        assert {tuple(share.state().items()) for share in shares} == {tuple(whole.state().items())}


def test_wrong_shares_and_states_are_named(folder):
    rows = PreparedSplit(folder, "train")
    with pytest.raises(ValueError, match="rows_per_step=4 is not a multiple of the 3 processes"):
        PreparedBatches(rows, 4, BUCKETS, process_count=3)
    with pytest.raises(ValueError, match="process_index=2 must be from 0 to below process_count=2"):
        PreparedBatches(rows, 4, BUCKETS, process_index=2, process_count=2)
    with pytest.raises(ValueError, match="outside the 23 steps"):
        PreparedBatches(rows, 4, BUCKETS).set_state({"epoch": 0, "position": 23})
    with pytest.raises(ValueError, match=r"has 40 tokens, and the last of data\.length_buckets"):
        PreparedBatches(rows, 4, (8,))
    assert PreparedBatches(rows, 4, BUCKETS, max_rows=9).steps_per_epoch == 2

"""Features of training rows: the same whoever asks first, and not kept longer than the step that they are for."""

from pathlib import Path

import jax
import numpy as np
import pytest
from tiny_run import own_rows, settings, write_rows, write_target

from dflash_jax.checkpoints.huggingface import load_target
from dflash_jax.data.pipeline import collate
from dflash_jax.data.rows import TrainingRow
from dflash_jax.evaluation.training_run import prepare
from dflash_jax.training.features import OnlineFeatures, RememberedFeatures


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Holds target and chats."""
    folder = tmp_path_factory.mktemp("files")
    write_rows(folder / "chats.jsonl", own_rows(write_target(folder / "target"), 12))
    return folder


def test_a_batch_is_let_go_before_the_next_features_are_made(folder, tmp_path):
    trainer = prepare(settings(folder / "target", folder / "chats.jsonl", tmp_path, training__steps=3))
    features, held = trainer.features, []

    def watched(batch):
        held.append([array.shape for array in jax.live_arrays() if array.ndim == 5])  # taps in micro-batches
        return features(batch)

    trainer.features = watched
    trainer.run()
    assert held == [[], [], []]


def test_remembered_features_are_those_of_each_row_whoever_asks_first_and_however_it_is_padded(folder):
    target, rng = load_target(folder / "target").model, np.random.default_rng(0)
    lengths = [5, 40, 12, 33, 17, 8]  # two groups, the second not full
    rows = [TrainingRow("", rng.integers(1, 32, n).astype(np.int32), np.ones(n, bool)) for n in lengths]

    def features(order: list[int], T: int):
        remembered = RememberedFeatures(target, (0, 2), rows, lengths, with_hidden=True)
        found = {}
        for row in order:
            batch = collate(rows, [row], T)
            found[row] = jax.tree.map(lambda leaf: np.asarray(leaf[0]), remembered(batch))
        return found

    first, second = features([0, 1, 2, 3, 4, 5], 48), features([5, 3, 1, 0, 4, 2], 64)
    online = OnlineFeatures(target, (0, 2), with_hidden=True)
    for row, length in enumerate(lengths):
        alone = online(collate(rows, [row], length))
        for mine, other, its_own in zip(first[row], second[row], alone, strict=True):
            assert mine.shape[0] == 48
            np.testing.assert_array_equal(mine[:length], other[:length])
            np.testing.assert_allclose(mine[:length], its_own[0], atol=1e-5)
            assert not mine[length:].any()

"""The fitted start: least squares finds a map, the drafter computes it, and a run starts and resumes from it."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from small_models import drafter_config, random_target
from tiny_run import bits, own_rows, settings, write_rows, write_target

from dflash_jax.config import ConfigError
from dflash_jax.evaluation.training_run import prepare
from dflash_jax.training.regression import solve
from dflash_jax.training.regression_start import CONSTANT, drafter_by_regression, row_moments

SHAPE = {"num_heads": 3, "num_kv_heads": 1, "head_dim": 32}  # room for the three kinds of heads
TARGET = random_target(factor=1.0, **SHAPE)
CONFIG = drafter_config(TARGET.config, **SHAPE)
V, D, M, T, ROWS = TARGET.config.vocab_size, 32, 2, 40, 150


def normal(*shape, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def data():
    """Rows whose next final hidden state is a linear map of the last taps and of the anchor's embedding.

    As in a real residual stream one tap coordinate is large and hardly varies.
    """
    taps_RTMD = normal(ROWS, T, M, D, seed=0)
    taps_RTMD[..., 0, 3] = 50 + 0.1 * taps_RTMD[..., 0, 3]
    tokens_RT = np.random.default_rng(1).integers(0, V - 1, (ROWS, T)).astype(np.int32)
    table_VD = np.asarray(TARGET.model.embedding[...])
    anchors_RTD = table_VD[tokens_RT] / np.sqrt(np.mean(table_VD[tokens_RT] ** 2, axis=-1, keepdims=True))
    centred = taps_RTMD.reshape(ROWS, T, -1) - taps_RTMD.reshape(-1, M * D).mean(axis=0)
    hidden_RTD = anchors_RTD @ normal(D, D, seed=2) / 6
    hidden_RTD[:, 1:] += centred[:, :-1] @ normal(M * D, D, seed=3) / 6
    return tokens_RT, taps_RTMD, hidden_RTD + normal(D, seed=4)


TOKENS, TAPS, HIDDEN = data()


def features(batch):
    rows_B = batch["row_index_B"]
    return SimpleNamespace(taps=jnp.asarray(TAPS[rows_B]), hidden=jnp.asarray(HIDDEN[rows_B]))


@pytest.fixture(scope="module")
def moments():
    batches = [
        {"tokens_BT": TOKENS[[r]], "loss_mask_BT": np.arange(T)[None] >= 4, "row_index_B": np.array([r])}
        for r in range(ROWS)
    ]
    return row_moments(batches, features, TARGET.model.embedding[...])


def explained(predicted, wanted) -> float:
    """The share of the variance that is predicted."""
    return 1 - np.mean((predicted - wanted) ** 2) / np.mean((wanted - wanted.mean(axis=0)) ** 2)


def test_least_squares_finds_a_linear_map(moments):
    solution = solve(moments[0], D, CONSTANT)
    at = np.arange(6, T - 4)
    z = TAPS[:, at - 1].reshape(-1, M * D) @ solution.fusion
    np.testing.assert_allclose(z[:, 0].mean(), CONSTANT, rtol=0.01)
    assert z[:, 0].std() < 0.05 * CONSTANT
    np.testing.assert_allclose(z[:, 1:].mean(axis=0), 0, atol=0.1)
    np.testing.assert_allclose(z[:, 1:].std(axis=0), 1, atol=0.1)
    z /= np.sqrt(np.mean(z**2, axis=1, keepdims=True))
    table_VD = np.asarray(TARGET.model.embedding[...], np.float64)
    anchors = table_VD[TOKENS[:, at]].reshape(-1, D)
    anchors /= np.sqrt(np.mean(anchors**2, axis=1, keepdims=True))
    predicted = z @ solution.from_context + (anchors @ solution.anchor_basis) @ solution.from_anchor
    # D − 1 components of M·D taps carry all of it; what is missing is the norm, which varies by row
    assert explained(predicted, HIDDEN[:, at].reshape(-1, D)) > 0.9


def test_the_untrained_drafter_predicts_its_first_slot(moments):
    drafter = drafter_by_regression(CONFIG, TARGET.model, *moments, 0)
    anchors_A = np.arange(8, 30)
    tokens_AW = np.stack([TOKENS[7, anchors_A], *[np.full(len(anchors_A), CONFIG.mask_token_id)] * 3], axis=1)
    embedded_1AWD = jnp.take(TARGET.model.embedding[...], jnp.asarray(tokens_AW)[None], axis=0)
    context_1TD = drafter.fuse(jnp.asarray(TAPS[[7]]))
    starts_1A = jnp.zeros((1, len(anchors_A)), jnp.int32)
    hidden_AD = np.asarray(drafter.packed(embedded_1AWD, context_1TD, starts_1A, jnp.asarray(anchors_A)[None])[0, :, 1])

    def cosine(x_AD, y_AD):
        return np.sum(x_AD * y_AD, -1) / np.linalg.norm(x_AD, axis=-1) / np.linalg.norm(y_AD, axis=-1)

    assert np.median(cosine(hidden_AD, HIDDEN[7, anchors_A])) > 0.9
    assert np.median(cosine(hidden_AD, HIDDEN[7, anchors_A - 1])) < 0.5  # and not just what all of them share


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    sizes = {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 32}
    target = write_target(folder / "target", **sizes)
    write_rows(folder / "chats.jsonl", own_rows(target, 30))
    return folder


def run(folder, directory, **fields):
    fields = {"model__initialisation": "regression", "training__loss": "teacher", **fields}
    fields |= {"training__feature_cache": "memory", "checkpoint__every_steps": 10, "checkpoint__keep": 5}
    trainer = prepare(settings(folder / "target", folder / "chats.jsonl", directory, **fields))
    return trainer, trainer.run()


def test_a_fitted_run_resumes_bit_for_bit(folder, tmp_path):
    whole, _ = run(folder, tmp_path / "whole")
    first, _ = run(folder, tmp_path / "cut")
    assert bits(first.state) == bits(whole.state)
    newest = tmp_path / "cut" / "checkpoints" / "20"
    newest.rename(tmp_path / "gone")
    resumed, outcome = run(folder, tmp_path / "cut")
    assert outcome.steps == 20
    assert bits(resumed.state) == bits(whole.state)


def test_a_drafter_without_room_for_the_heads_is_refused(folder, tmp_path):
    target = write_target(tmp_path / "target")
    with pytest.raises(ConfigError, match="model.initialisation='regression' needs 3 query heads"):
        prepare(settings(target, folder / "chats.jsonl", tmp_path / "run", model__initialisation="regression"))


def test_without_hidden_states_there_is_no_regression():
    def without(batch):
        return SimpleNamespace(taps=features(batch).taps, hidden=None)

    batch = {"tokens_BT": TOKENS[[0]], "loss_mask_BT": np.ones((1, T), bool), "row_index_B": np.array([0])}
    with pytest.raises(ValueError, match="final hidden states"):
        row_moments([batch], without, TARGET.model.embedding[...])


def test_rows_too_short_to_learn_from_are_refused_by_field():
    batch = {"tokens_BT": TOKENS[[0]], "loss_mask_BT": np.arange(T)[None] < 3, "row_index_B": np.array([0])}
    with pytest.raises(ConfigError, match=r"data\.train_file: no row has 4 supervised tokens"):
        row_moments([batch], features, TARGET.model.embedding[...])


def test_a_mask_token_without_an_embedding_is_refused_by_field(moments):
    target = random_target(factor=1.0, **SHAPE).model
    target.embedding[...] = target.embedding[...].at[CONFIG.mask_token_id].set(0)
    with pytest.raises(ConfigError, match=r"model\.mask_token_id=60"):
        drafter_by_regression(CONFIG, target, *moments, 0)


def test_a_fit_without_a_cache_or_a_teacher_trains_on_labels(folder, tmp_path):
    fields = {"model__initialisation": "regression", "training__feature_cache": "none"}
    trainer = prepare(settings(folder / "target", folder / "chats.jsonl", tmp_path / "run", **fields))
    batch = {"tokens_BT": np.zeros((1, 32), np.int32)}
    assert trainer.features(batch).hidden is None  # no step pays for what only the fit needs
    assert trainer.run().steps == 20

"""Documents of one sequence are trained as each would be alone: features, loss, gradients, and whole runs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny_run
from small_models import random_drafter, random_target

from dflash_jax.data.packing import PackedPlan
from dflash_jax.data.pipeline import collate
from dflash_jax.data.prepared import PreparedRow, write_prepared
from dflash_jax.data.records import read_chats
from dflash_jax.data.rows import TrainingRow, rows_from_regenerated
from dflash_jax.evaluation.training_run import train
from dflash_jax.models.rope_config import RopeConfig
from dflash_jax.training.anchors import Blocks, draw_anchors, make_blocks, step_keys
from dflash_jax.training.losses import decay_weights
from dflash_jax.training.step import Batch, StepSettings, VocabularyTables, blocks_loss, hidden_and_taps, micro_batches

ROPE = RopeConfig(theta=10_000.0, kind="yarn", factor=4.0, original_max_position=16)
TARGET = random_target(rope=ROPE, factor=3.0)
V, T, W = TARGET.config.vocab_size, 48, 4
SETTINGS = StepSettings(anchors=15, width=W, mask_id=V - 1, gamma=4.0, loss_chunk=32, compute_dtype="float32", seed=0)
TABLES = VocabularyTables(TARGET.model.embedding[...], TARGET.model.head_VD, TARGET.model.head_VD[:20])
# One layer reads everything before and its whole block, the other, causal, no more than four positions back.
LAYERS = {"layer_types": ("full_attention", "sliding_attention"), "sliding_window": 5}
OTHERS = [{}, {"is_causal": True}, LAYERS | {"is_causal": False}]
LENGTHS = (19, 14, 11)


def rows() -> list[TrainingRow]:
    rng = np.random.default_rng(0)
    return [TrainingRow("", rng.integers(0, V - 1, n).astype(np.int32), np.arange(n) >= 4) for n in LENGTHS]


@functools.cache
def pack() -> dict:
    return PackedPlan(LENGTHS, 1, (T,)).collate(rows(), [[0, 1, 2]], T)


def with_features(tokens_BT, mask_BT, starts_BT=None, *, scan: bool = False) -> Batch:
    hidden_BTD, taps_BTMD = hidden_and_taps(TARGET.model, tokens_BT, starts_BT, layers=(0, 2), scan=scan)
    return Batch(tokens_BT, mask_BT, jnp.arange(len(tokens_BT)), taps_BTMD, hidden_BTD, starts_BT)


def packed_batch(*, scan: bool = False, **changed) -> Batch:
    arrays = pack() | changed
    return with_features(*(jnp.asarray(arrays[name]) for name in ("tokens_BT", "loss_mask_BT", "starts_BT")), scan=scan)


def documents() -> Batch:
    """Each row alone, padded to the same length."""
    batch = collate(rows(), [0, 1, 2], T)
    return with_features(jnp.asarray(batch["tokens_BT"]), jnp.asarray(batch["loss_mask_BT"]))


def edges() -> list[tuple[int, int]]:
    ends = np.cumsum(LENGTHS)
    return list(zip((ends - LENGTHS).tolist(), ends.tolist(), strict=True))


def blocks_of(batch: Batch, anchors_BA: np.ndarray) -> Blocks:
    """Blocks at these anchors; 0 is padding."""
    anchors = jnp.asarray(anchors_BA)
    return make_blocks(batch.tokens, batch.loss_mask, anchors, anchors > 0, W, V - 1)


@functools.partial(jax.jit, static_argnames="settings")
def loss_and_gradients(drafter, batch: Batch, blocks: Blocks, *, settings: StepSettings):
    def loss(drafter, taps):
        return blocks_loss(drafter, TABLES, batch._replace(taps=taps), blocks, decay_weights(W, 4.0), settings)

    return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(drafter, batch.taps)


def anchors_of_pack() -> np.ndarray:
    keys_B = step_keys(0, jnp.int32(0), jnp.arange(1))
    anchors_1A, valid_1A = draw_anchors(keys_B, jnp.asarray(pack()["loss_mask_BT"]), SETTINGS.anchors)
    assert valid_1A.all()
    return np.asarray(anchors_1A)


def test_features_are_those_of_each_document_alone():
    alone = documents()
    for scan in (False, True):
        batch = packed_batch(scan=scan)
        for document, (start, end) in enumerate(edges()):
            for ours, its_own in ((batch.taps, alone.taps), (batch.hidden, alone.hidden)):
                wanted = np.asarray(its_own[document, : end - start])
                # the same sums with zeros elsewhere among them, so in another order
                np.testing.assert_allclose(ours[0, start:end], wanted, rtol=0, atol=1e-6 * np.abs(wanted).max())


def test_loss_and_gradients_are_the_sums_over_documents_alone():
    assert_sums_over_documents(LAYERS, SETTINGS)


@pytest.mark.long
@pytest.mark.parametrize("layers", OTHERS)
def test_of_other_layers_too(layers):
    assert_sums_over_documents(layers, SETTINGS)


@pytest.mark.long
def test_of_the_teacher_loss_too():
    assert_sums_over_documents(LAYERS, SETTINGS._replace(teacher=True))


def assert_sums_over_documents(layers: dict, settings: StepSettings) -> None:
    drafter, anchors_1A = random_drafter(TARGET.config, rope=ROPE, factor=2.0, **layers).model, anchors_of_pack()
    batch, alone = packed_batch(), documents()
    anchors_BA = np.zeros((3, SETTINGS.anchors), np.int32)
    for document, (start, end) in enumerate(edges()):
        inside = anchors_1A[(anchors_1A > start) & (anchors_1A < end)]
        assert len(inside) > 1
        anchors_BA[document, : len(inside)] = inside - start
    (ours, _), (gradient, _) = loss_and_gradients(drafter, batch, blocks_of(batch, anchors_1A), settings=settings)
    (wanted, _), (its_own, _) = loss_and_gradients(drafter, alone, blocks_of(alone, anchors_BA), settings=settings)
    np.testing.assert_allclose(ours, wanted, rtol=1e-6)
    difference = jax.tree.map(jnp.subtract, gradient, its_own)
    assert optax.tree.norm(difference) < 1e-6 * optax.tree.norm(its_own)


def test_micro_batches_keep_all_of_a_packed_batch():
    batch = packed_batch()
    twice = Batch(*(jnp.concatenate([array, array + (array.dtype != bool)]) for array in batch))
    dealt = micro_batches(twice, 2)
    for ours, whole in zip(dealt, twice, strict=True):
        np.testing.assert_array_equal(ours[:, 0], whole)


def test_what_another_document_says_changes_nothing_at_all():
    drafter = random_drafter(TARGET.config, rope=ROPE, factor=2.0, **LAYERS).model
    tokens_BT, (start, end) = pack()["tokens_BT"].copy(), edges()[1]
    tokens_BT[:, :start] = (tokens_BT[:, :start] + 7) % (V - 1)
    tokens_BT[:, end:] = (tokens_BT[:, end:] + 11) % (V - 1)
    one, other = packed_batch(), packed_batch(tokens_BT=tokens_BT)
    assert (one.taps[:, :start] != other.taps[:, :start]).any()
    np.testing.assert_array_equal(one.taps[:, start:end], other.taps[:, start:end])
    np.testing.assert_array_equal(one.hidden[:, start:end], other.hidden[:, start:end])
    anchors_1A = anchors_of_pack()
    anchors_1A = np.where((anchors_1A > start) & (anchors_1A < end), anchors_1A, 0)  # of the second document alone
    results = [
        loss_and_gradients(drafter, batch, blocks_of(batch, anchors_1A), settings=SETTINGS) for batch in (one, other)
    ]
    (loss, _), gradients = results[0]
    (same_loss, _), same_gradients = results[1]
    assert loss == same_loss > 0
    for mine, theirs in zip(*map(jax.tree.leaves, (gradients, same_gradients)), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    _, d_taps_BTMD = gradients
    assert d_taps_BTMD[:, start:end].any()
    assert not d_taps_BTMD[:, :start].any() and not d_taps_BTMD[:, end:].any()


@pytest.mark.long
def test_a_packed_run_is_the_same_whatever_its_rows_and_features_come_from(tmp_path):
    target = tiny_run.write_target(tmp_path / "target")
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, tiny_run.STOP, 22).tolist() for _ in range(26)]
    written = [tiny_run.chat_row(str(row), ids[:6], ids[6:]) for row, ids in enumerate(texts)]
    chats = tiny_run.write_rows(tmp_path / "chats.jsonl", written)
    made, _ = rows_from_regenerated(read_chats(chats)[0], max_length=32)
    write_prepared(tmp_path / "set", [PreparedRow(row, "train", "chats.jsonl", 1) for row in made], {})
    shared = {"data__packing": True, "data__length_buckets": (96,), "data__allow_other_target": True}
    shared |= {"data__heldout_file": "", "training__steps": 6, "logging__every_steps": 1, "training__accumulation": 2}

    def losses(train_file, name: str, **fields) -> list[float]:
        train(tiny_run.settings(target, train_file, tmp_path / name, **shared | fields))
        return [line["loss"] for line in tiny_run.read_metrics(tmp_path / name)]

    remembered = losses(chats, "memory", training__feature_cache="memory")
    computed = losses(tmp_path / "set", "online", training__scan_layers=True, training__remat=True)
    assert len(remembered) == 6 and len(set(remembered)) == 6
    # Features of each row alone or in its pack: sums in another order, and Adam between one step and the next.
    np.testing.assert_allclose(computed, remembered, rtol=1e-4)

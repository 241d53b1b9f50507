"""Whole training runs on a tiny target: what they measure, keep, export and refuse."""

import dataclasses
import math
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny_run
from event_files import event_scalars
from safetensors.numpy import load_file
from tiny_run import bits, chat_row, own_rows, placed, read_metrics, settings, write_rows, write_target

from dflash_jax.checkpoints.drafter_export import export_drafter
from dflash_jax.checkpoints.huggingface import LoadedDrafter, load_drafter, load_target
from dflash_jax.config import ConfigError, MeshConfig
from dflash_jax.decoding.generate import generate
from dflash_jax.evaluation.training_run import HeldOut, devices_for, prepare, train
from dflash_jax.processes import Stopped
from dflash_jax.training.initialise import drafter_from_target, random_drafter
from dflash_jax.training.setup import drafter_config

FIXTURES = Path(__file__).parent / "fixtures"


@dataclasses.dataclass(frozen=True)
class Files:
    target: Path
    chats: Path
    heldout: Path

    def settings(self, directory: Path, **fields):
        return settings(self.target, self.chats, directory, **fields)


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Files:
    folder = tmp_path_factory.mktemp("files")
    target = write_target(folder / "target")
    chats = write_rows(folder / "chats.jsonl", own_rows(target, 30))
    return Files(target, chats, write_rows(folder / "heldout.jsonl", own_rows(target, 10, seed=1)))


@pytest.fixture(scope="module")
def run(files, tmp_path_factory):
    """A finished run of 20 steps: (trainer, outcome, directory, the target's bits before it began)."""
    directory = tmp_path_factory.mktemp("run")
    fields = {"data__heldout_file": str(files.heldout), "evaluation__every_steps": 10, "logging__tensorboard": True}
    trainer = prepare(files.settings(directory, **fields))
    before = bits(trainer.target.model)
    return trainer, trainer.run(), directory, before


# What a run measures and leaves


def test_loss_falls_and_metrics_are_complete(run):
    _, outcome, directory, _ = run
    lines = read_metrics(directory)
    train_lines = [line for line in lines if line["kind"] == "train"]
    assert [line["step"] for line in train_lines] == [5, 10, 15, 20]
    for line in train_lines:
        assert math.isfinite(line["loss"])
        assert len(line["position_accuracy"]) == 3
        assert all(0 <= accuracy <= 1 for accuracy in [line["accuracy"], *line["position_accuracy"]])
        assert 1 <= line["accepted_prefix"] <= 4
        assert line["tokens_per_second"] > 0
        assert line["skipped_steps"] == 0
        assert line["blocks"] == 5 * 4 * 6  # steps, rows, anchors
    assert train_lines[-1]["loss"] < train_lines[0]["loss"] - 0.4
    assert train_lines[-1]["accepted_prefix"] > train_lines[0]["accepted_prefix"] + 0.2
    seconds = [line["seconds"] for line in lines]
    assert seconds == sorted(seconds)
    assert (outcome.steps, outcome.skipped) == (20, 0)


def test_evaluation_decodes_at_the_end_and_not_before(run):
    _, outcome, directory, _ = run
    middle, end = (line for line in read_metrics(directory) if line["kind"] == "evaluation")
    assert (middle["step"], end["step"]) == (10, 20)
    assert "acceptance_length" not in middle
    assert end["acceptance_length"] == outcome.acceptance_length
    assert end["acceptance_length"] > 1.1  # it learned from the target's own answers
    assert (end["prompts"], end["tokens"]) == (4, 4 * 12) or end["tokens"] < 4 * 12  # fewer where a row stopped
    assert end["accepted_share"] == pytest.approx((end["acceptance_length"] - 1) / 3)
    shares = end["position_acceptance"]
    assert len(shares) == 3
    # equal, but for rounds cut short: those say nothing of the slots that they did not verify
    assert end["acceptance_length"] <= 1 + sum(shares) + 1e-9
    assert end["blocks"] == 8 * 4  # rows, anchors


def test_event_files_hold_what_the_metrics_hold(run):
    directory = run[2]
    scalars = event_scalars(directory / "tensorboard")
    lines = read_metrics(directory)
    for line in lines:
        loss = scalars[f"{line['kind']}/loss", line["step"]]
        assert loss == pytest.approx(line["loss"], rel=1e-6)
        slots = [scalars[f"{line['kind']}/position_accuracy/{slot}", line["step"]] for slot in (1, 2, 3)]
        assert slots == pytest.approx(line["position_accuracy"], rel=1e-6)
    assert ("evaluation/acceptance_length", 20) in scalars and ("evaluation/acceptance_length", 10) not in scalars
    assert len({step for _, step in scalars}) == len({line["step"] for line in lines})


def test_an_evaluation_stops_between_batches_and_between_rows(run):
    trainer, calls = run[0], []

    def check():
        calls.append(None)
        if len(calls) == allowed + 1:
            raise Stopped

    loaded = LoadedDrafter(trainer.state.drafter, trainer.drafter_config, "trained")
    batches = len(trainer.evaluate.batches)
    for allowed in (1, batches):
        calls.clear()
        with pytest.raises(Stopped):
            trainer.evaluate(loaded, 20, True, check)
        assert len(calls) == allowed + 1 and batches == 2
    calls.clear()
    trainer.evaluate(loaded, 20, False, lambda: calls.append(None))
    assert len(calls) == batches  # so the call past these was one of decoding


def test_the_exported_drafter_decodes_the_targets_own_text_in_fewer_rounds(run, files):
    trainer, outcome, directory, _ = run
    assert outcome.drafter_dir == directory / "drafter"
    target = load_target(files.target)
    drafter = load_drafter(outcome.drafter_dir, target=target)
    assert bits(drafter.model) == bits(trainer.state.drafter)
    drafter = dataclasses.replace(drafter, model=placed(drafter.model))
    prompts = [row["prompt_ids"] for row in own_rows(files.target, 4, seed=2)]
    options = {"max_new_tokens": 12, "batch_size": 4}
    speculative, plain = (generate(target, prompts, drafter=d, **options) for d in (drafter, None))
    assert [row.tokens for row in speculative] == [row.tokens for row in plain]
    rounds = [sum(len(row.acceptance_lengths) for row in rows) for rows in (speculative, plain)]
    assert rounds[0] < rounds[1]


def test_the_target_is_frozen_bit_for_bit(run, files):
    trainer, _, _, before = run
    assert bits(trainer.target.model) == before == bits(load_target(files.target).model)


# Settings that change how a step is computed, and not what


def trained(files, directory, **fields):
    trainer = prepare(files.settings(directory, **fields))
    trainer.run()
    return trainer


@pytest.mark.parametrize("fields", [{"training__feature_cache": "memory"}, {"training__accumulation": 2}])
def test_remembered_features_and_accumulation_train_the_same_drafter(run, files, tmp_path, fields):
    """Sums in another order: a part in 10⁷ of each gradient, which Adam may blow up where a gradient is nearly zero."""
    trainer = trained(files, tmp_path, **fields)
    ours, theirs = read_metrics(tmp_path), [line for line in read_metrics(run[2]) if line["kind"] == "train"]
    for mine, other in zip(ours, theirs, strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert mine["blocks"] == other["blocks"]
    pairs = zip(jax.tree.leaves(trainer.state.drafter), jax.tree.leaves(run[0].state.drafter), strict=True)
    for mine, other in pairs:
        difference = np.abs(np.asarray(mine) - np.asarray(other))
        # 20 steps of at most 0.005 each; and typically nothing but rounding
        assert difference.max() < 1e-3
        assert np.median(difference) < 1e-6


# Where training starts


def untrained_loss(files, tmp_path, tied: bool):
    folder = write_target(tmp_path / "target", tied=tied)
    experiment = settings(folder, files.chats, tmp_path / "run", data__heldout_file=str(files.heldout))
    target = load_target(folder)
    config = drafter_config(experiment.model, target)
    heldout = HeldOut(experiment, target, config)
    # the drafter itself has no head: one program serves both kinds of targets
    drafter = random_drafter(dataclasses.replace(config, tie_word_embeddings=False), seed=0)
    loaded = LoadedDrafter(placed(drafter), config, "untrained")
    return heldout(loaded, 0, False)["loss"], heldout.tables, config


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_an_untrained_drafter_knows_nothing(files, tmp_path, tied):
    loss, tables, config = untrained_loss(files, tmp_path, tied)
    # logits of variance s² add s²/2 to ln V: hidden states of size 1 meet 32 head entries of 0.1, so s² = 0.32
    assert loss == pytest.approx(math.log(tiny_run.VOCABULARY), abs=0.32)
    assert config.tie_word_embeddings == tied
    assert (bits(tables.head) == bits(tables.embedding)) == tied


def test_a_drafter_started_from_the_target_copies_its_first_and_last_layers(files):
    target = load_target(files.target)
    experiment = files.settings(Path("unused"), model__num_layers=2, model__initialisation="target")
    drafter = drafter_from_target(drafter_config(experiment.model, target), target.model, seed=0)
    first, last = drafter.layers
    assert bits(first) == bits(target.model.layers[0])
    assert bits(last) == bits(target.model.layers[3])
    assert bits(drafter.norm) == bits(target.model.norm)
    last_tap_DD = np.asarray(drafter.fc.weight[...])[:, 32:]
    np.testing.assert_allclose(np.diag(last_tap_DD), 1, atol=0.1)  # identity, and noise of 0.02
    assert np.abs(last_tap_DD - np.diag(np.diag(last_tap_DD))).max() < 0.1
    theirs = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(target.model)}
    assert not theirs & {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(drafter)}


def test_without_qk_norm_a_copied_layer_keeps_the_scale_of_its_queries_and_keys(tmp_path):
    target = load_target(write_target(tmp_path / "llama", family="llama"))
    experiment = settings(tmp_path / "llama", tmp_path, tmp_path)
    drafter = drafter_from_target(drafter_config(experiment.model, target), target.model, seed=0)
    attention, source = drafter.layers[0].attention, target.model.layers[0]
    x_BD = np.random.default_rng(0).standard_normal((4096, 32), np.float32)
    normed_BD = source.input_norm(x_BD / np.sqrt(np.mean(x_BD**2, axis=1, keepdims=True)))
    for norm, projection in ((attention.q_norm, "q_proj"), (attention.k_norm, "k_proj")):
        plain_BNH = np.asarray(getattr(source.attention, projection)(normed_BD)).reshape(4096, -1, 8)
        sizes = [np.sqrt(np.mean(np.square(x), axis=0).mean()) for x in (plain_BNH, norm(plain_BNH))]
        assert sizes[1] == pytest.approx(sizes[0], rel=0.1)  # heads differ in size, and share one norm


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_warm_start_of_no_steps_exports_the_same_bytes(tmp_path, dtype):
    fixture = FIXTURES / "qwen3_b8"
    drafter = load_drafter(fixture / "drafter")
    released = export_drafter(drafter.model, drafter.config, tmp_path / "released", dtype=dtype)
    chats = write_rows(tmp_path / "c.jsonl", [chat_row(str(i), [1, 2, 3], [4, 5, 6]) for i in range(4)])
    experiment = settings(
        *(fixture / "target", chats, tmp_path / "run"),
        model__warm_start=str(released),
        model__block_size=drafter.config.block_size,
        model__mask_token_id=None,
        model__target_layer_ids=(),
        training__steps=0,
        checkpoint__export_dtype=dtype,
    )
    outcome = train(experiment)
    assert (outcome.steps, outcome.acceptance_length) == (0, None)
    for name in ("model.safetensors", "config.json"):
        assert (outcome.drafter_dir / name).read_bytes() == (released / name).read_bytes()


def test_a_warm_start_with_another_block_size_drafts_at_that_size(files, run, tmp_path):
    experiment = files.settings(tmp_path, model__warm_start=str(run[1].drafter_dir), model__block_size=7)
    trainer = prepare(experiment)
    assert (trainer.drafter_config.block_size, trainer.state.drafter.max_width, trainer.settings.width) == (7, 7, 7)
    assert bits(trainer.state.drafter) == bits(run[0].state.drafter)


# Which drafter is kept


def test_the_drafter_with_the_longest_acceptance_is_kept(files, tmp_path):
    scores, seen = {5: 1.5, 10: 3.0, 15: 2.9, 20: 1.0}, {}

    def evaluate(loaded, step, last, check):
        seen[step] = (bits(loaded.model), last)
        return {"acceptance_length": scores[step]}

    trainer = prepare(files.settings(tmp_path, evaluation__every_steps=5))
    trainer.evaluate = evaluate
    outcome = trainer.run()
    assert outcome.acceptance_length == 3.0
    assert [(step, last) for step, (_, last) in seen.items()] == [(5, False), (10, False), (15, False), (20, True)]
    assert bits(load_drafter(outcome.drafter_dir).model) == seen[10][0] != seen[20][0]


def test_the_export_has_the_dtype_asked_for(files, tmp_path):
    experiment = files.settings(tmp_path, training__time_limit_minutes=0.0, checkpoint__export_dtype="bfloat16")
    outcome = train(experiment)
    assert {str(t.dtype) for t in load_file(outcome.drafter_dir / "model.safetensors").values()} == {"bfloat16"}
    assert outcome.steps == 0


# What a run refuses


def refusal(files, tmp_path, rows=None, **fields) -> str:
    experiment = files.settings(tmp_path / "run", **fields)
    if rows is not None:
        path = write_rows(tmp_path / "rows.jsonl", rows)
        experiment = dataclasses.replace(experiment, data=dataclasses.replace(experiment.data, train_file=str(path)))
    with pytest.raises(ConfigError) as error:
        train(experiment)
    return str(error.value)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "the file is empty"),
        ([{"messages": []}] * 9, "no row of it can be trained on"),
        ([{"messages": chat_row("a", [], [])["messages"]}] * 9, "its chats are not rendered yet: run python -m"),
        ([{"messages": chat_row("a", [], [])["messages"][:1]}] * 9, "its chats are not rendered yet: run python -m"),
        ([chat_row(str(i), [1, 61], [2, 3]) for i in range(9)], "beyond the target's embedding of 61 rows"),
        (
            [chat_row(str(i), [1] * 31, [2, 3]) for i in range(9)],
            "fewer than 2 supervised tokens in a row in its first 32",
        ),
        ([chat_row(str(i), [1, 2], [2, 3]) for i in range(3)], "3 rows are too few for one batch of rows_per_step=4"),
    ],
)
def test_data_that_teaches_nothing_is_refused(files, tmp_path, rows, message):
    text = refusal(files, tmp_path, rows)
    assert message in text
    assert "data.train_file=" in text


@pytest.mark.parametrize(
    ("fields", "messages"),
    [
        ({"data__train_file": "absent.jsonl"}, ["data.train_file='absent.jsonl'", "there is no file"]),
        ({"data__train_file": "sets/nope"}, ["data.train_file='sets/nope'", "there is no file or folder sets/nope"]),
        ({"data__train_file": str(FIXTURES)}, ["data.train_file=", "fixtures holds no prepared set; make one with"]),
        ({"data__train_file": __file__}, ["data.train_file=", "is not a .jsonl"]),
        ({"data__heldout_file": "absent.jsonl"}, ["data.heldout_file='absent.jsonl'", "there is no file"]),
        ({"model__target": "no such folder"}, ["model.target='no such folder'", "neither an existing folder"]),
        ({"model__mask_token_id": None}, ["model.mask_token_id is not set"]),
        ({"model__mask_token_id": tiny_run.STOP}, ["model.mask_token_id=59 equals stop token 59"]),
        ({"model__mask_token_id": 61}, ["model.mask_token_id=61 lies outside", "0..60"]),
        ({"model__target_layer_ids": (0, 4)}, ["model.target_layer_ids=[0, 4]", "layers 0..3"]),
        ({"model__target_layer_ids": (2, 2)}, ["model.target_layer_ids=[2, 2] name a layer twice"]),
        ({"model__target_layer_ids": ()}, ["model.num_taps=5: 5 taps over a target of 4 layers"]),
        (
            {"model__initialisation": "target", "model__intermediate_size": 40},
            ["model.initialisation='target'", "intermediate_size is 40", "the target's 48"],
        ),
        ({"model__initialisation": "target", "model__num_layers": 5}, ["model.num_layers=5", "has only 4 to copy"]),
        ({"model__warm_start": "no such folder"}, ["model.warm_start='no such folder'"]),
        ({"model__warm_start": str(FIXTURES / "qwen3_b8" / "drafter")}, ["model.warm_start=", "hidden_size"]),
    ],
)
def test_settings_that_do_not_fit_the_target_are_refused_by_field(files, tmp_path, fields, messages):
    text = refusal(files, tmp_path, **fields)
    for message in messages:
        assert message in text


def test_a_mask_token_outside_the_vocabulary_is_told_before_the_target_is_loaded(files, tmp_path, monkeypatch):
    monkeypatch.setattr("dflash_jax.evaluation.training_run.load_target_for", lambda *_: pytest.fail("loaded"))
    assert "model.mask_token_id=61 lies outside" in refusal(files, tmp_path, model__mask_token_id=61)


@pytest.mark.parametrize("field", ["train_file", "heldout_file"])
def test_a_missing_file_is_told_before_the_target_is_loaded(files, tmp_path, monkeypatch, field):
    monkeypatch.setattr("dflash_jax.evaluation.training_run.load_target_for", lambda *_: pytest.fail("loaded"))
    text = refusal(files, tmp_path, **{f"data__{field}": "absent.jsonl"})
    assert f"data.{field}='absent.jsonl': there is no file or folder" in text


def test_a_warm_start_is_not_contradicted_silently(files, run, tmp_path):
    start = {"model__warm_start": str(run[1].drafter_dir)}
    assert "model.mask_token_id=3: model.warm_start=" in refusal(files, tmp_path, **start, model__mask_token_id=3)
    text = refusal(files, tmp_path, **start, model__target_layer_ids=(0, 1))
    assert "model.target_layer_ids=(0, 1): model.warm_start=" in text


def test_a_directory_that_is_a_file_is_refused(files, tmp_path):
    (tmp_path / "run").write_text("")
    assert "checkpoint.directory=" in refusal(files, tmp_path)


def test_a_directory_that_can_not_be_written_to_is_refused(files, tmp_path, monkeypatch):
    monkeypatch.setattr("os.access", lambda path, mode: False)  # whoever runs the tests may be allowed everything
    with pytest.raises(ConfigError, match="checkpoint.directory=.*: can't be written to"):
        train(files.settings(tmp_path / "run"))


def test_a_mesh_of_one_takes_one_device_of_many(monkeypatch):
    monkeypatch.setattr("jax.devices", lambda: [f"device {i}" for i in range(8)])
    assert devices_for(MeshConfig(1, 1, 1)) == ["device 0"]
    assert len(devices_for(MeshConfig(-1, 1, 1))) == len(devices_for(MeshConfig(1, 4, 1))) == 8


def test_bad_rows_among_good_ones_are_counted_and_left_out(files, tmp_path, caplog):
    caplog.set_level("INFO", logger="dflash_jax")
    rows = [chat_row(str(number), [1, 2, 3], [4, 5, 6]) for number in range(8)]
    bad = [{"messages": []}, chat_row("far", [1, 99], [2, 3]), chat_row("long", [1] * 40, [2, 3])]
    path = write_rows(tmp_path / "rows.jsonl", [rows[0], *bad, *rows[1:]])
    trainer = prepare(settings(files.target, path, tmp_path / "run"))
    assert trainer.batches.steps_per_epoch == 2
    for reason in ("row 2", "far", "long", "rows kept"):
        assert reason in caplog.text


# Narrow blocks first


def test_narrow_blocks_come_first_with_as_many_slots(files, tmp_path):
    narrow = {"training__narrow_steps": 10, "training__narrow_width": 2, "training__random_cut": True}
    outcome = train(files.settings(tmp_path, **narrow))
    lines = read_metrics(tmp_path)
    assert [len(line["position_accuracy"]) for line in lines] == [1, 1, 3, 3]
    assert [line["blocks"] for line in lines] == [5 * 4 * 12] * 2 + [5 * 4 * 6] * 2  # steps, rows, anchors
    assert lines[1]["loss"] < lines[0]["loss"]
    assert load_drafter(outcome.drafter_dir).config.block_size == 4

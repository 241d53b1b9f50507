"""A draft vocabulary changes what is proposed and nothing else: the target's text, its distribution, what files say."""

import dataclasses
import json
import re
import shutil
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact_sampling import DRAFTER, SMALLEST_P, TARGET, V, counted, draw_many, exact_joint, p_value
from small_models import random_drafter, random_prompts, random_target
from tiny_run import VOCABULARY, own_rows, settings, write_rows, write_target

from dflash_jax.checkpoints.draft_vocabulary import DRAFT_VOCABULARY, read_draft_vocabulary, write_draft_vocabulary
from dflash_jax.checkpoints.drafter_export import export_drafter
from dflash_jax.checkpoints.export import export_checkpoint
from dflash_jax.checkpoints.huggingface import load_drafter, load_target, outline_target
from dflash_jax.checkpoints.safetensors_io import CheckpointError
from dflash_jax.data import draft_vocabulary as command
from dflash_jax.data.provenance import meta_path
from dflash_jax.data.rows import TrainingRow
from dflash_jax.decoding.generate import generate
from dflash_jax.evaluation import heldout
from dflash_jax.evaluation.training_run import train
from dflash_jax.models.draft_vocabulary import RestrictedDrafter, unrestricted
from dflash_jax.models.proposal import Proposal

SOME = random_target()
ITS_DRAFTER = random_drafter(SOME.config)
PROMPTS = random_prompts([3, 7, 5])
THIRD = np.arange(1, 61, 3, dtype=np.int32)  # without the drafter's favourite, 12


def proposed(drafter, target=SOME, *, sampled: bool = False) -> Proposal:
    """What a drafter proposes behind one anchor, of a cache that holds four positions of noise."""
    model = drafter.model
    taps_BTMD = jax.random.normal(jax.random.key(0), (2, 4, len(model.tap_layers), target.config.hidden_size))
    positions_BT = jnp.broadcast_to(jnp.arange(4), (2, 4))
    cache = model.absorb(model.init_cache(2, 8), taps_BTMD, positions_BT, jnp.array([4, 4]))

    def draw(logits_BVU, positions_BV):
        log_probs_BVU = jax.nn.log_softmax(logits_BVU) if sampled else None
        return Proposal(jnp.argmax(logits_BVU, -1).astype(jnp.int32), log_probs_BVU)

    return model.propose(target.model, cache, jnp.array([1, 2]), jnp.array([4, 4]), draw, width=4)


def test_what_is_proposed_is_the_likeliest_token_of_the_vocabulary():
    log_probs_BVV = np.asarray(proposed(ITS_DRAFTER, sampled=True).log_probs)
    got = proposed(ITS_DRAFTER.restricted(SOME, THIRD))
    np.testing.assert_array_equal(got.tokens, THIRD[log_probs_BVV[..., THIRD].argmax(-1)])
    assert not np.isin(log_probs_BVV.argmax(-1), THIRD).all()  # there was something to leave out


def test_its_distribution_is_the_drafters_over_the_vocabulary_and_nothing_outside():
    whole, got = (proposed(d, sampled=True).log_probs for d in (ITS_DRAFTER, ITS_DRAFTER.restricted(SOME, THIRD)))
    assert got.shape == whole.shape
    outside = np.setdiff1d(np.arange(61), THIRD)
    assert np.isneginf(np.asarray(got)[..., outside]).all()
    expected = jax.nn.log_softmax(whole[..., THIRD])
    np.testing.assert_allclose(np.asarray(got)[..., THIRD], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_text_is_the_targets_own(temperature):
    options = {"max_new_tokens": 40, "temperature": temperature, "seed": 5}
    plain = generate(SOME, PROMPTS, **options)
    drafted = generate(SOME, PROMPTS, drafter=ITS_DRAFTER.restricted(SOME, THIRD), **options)
    assert [row.tokens for row in drafted] == [row.tokens for row in plain]


@pytest.mark.parametrize("proposals", ["argmax", "sampled"])
def test_with_all_tokens_it_is_the_drafter_itself(proposals):
    options = {"max_new_tokens": 30, "temperature": [0.0, 1.0, 0.7], "proposals": proposals}
    everything = ITS_DRAFTER.restricted(SOME, np.arange(61, dtype=np.int32))
    assert generate(SOME, PROMPTS, drafter=everything, **options) == generate(
        SOME, PROMPTS, drafter=ITS_DRAFTER, **options
    )


@pytest.mark.parametrize("proposals", ["argmax", "sampled"])
def test_drawn_texts_follow_the_targets_distribution(proposals):
    """Of five tokens two can be proposed: the others have to come from the target's own draws."""
    drafter = DRAFTER.restricted(TARGET, np.array([1, 3], np.int32))
    results = draw_many(4000, drafter, temperature=1.0, seed=3, proposals=proposals)
    counts = counted(results)
    assert (counts.sum((1, 2)) > 0).sum() > 2 and V == 5
    assert p_value(counts, exact_joint(1.0)) > SMALLEST_P
    assert min(len(result.acceptance_lengths) for result in results) == 1, "no proposal was accepted"


def test_the_rows_of_the_head_are_copied_once_and_not_in_every_round():
    drafter = ITS_DRAFTER.restricted(SOME, THIRD)
    assert isinstance(drafter.model, RestrictedDrafter)
    np.testing.assert_array_equal(drafter.model.head[...], SOME.model.head_VD[THIRD])
    text = str(jax.make_jaxpr(lambda model: proposed(dataclasses.replace(drafter, model=model)))(drafter.model))
    rows = re.escape(f"f32[{len(THIRD)},{SOME.config.hidden_size}]")
    made = [line for line in text.splitlines() if re.search(rf":{rows} = ", line)]
    assert re.search(rows, text) and not made


@pytest.mark.parametrize(
    ("token_ids", "message"),
    [
        ([], "token_ids must be a list of token ids, got an array of float64, shape \\(0,\\)"),
        ([1.0, 2.0], "token_ids must be a list of token ids, got an array of float64"),
        ([[1, 2]], "token_ids must be a list of token ids, got an array of int64, shape \\(1, 2\\)"),
        ([3, 61], "token_ids reach from 3 to 61; the target has 0 to 60"),
        ([-1, 4], "token_ids reach from -1 to 4"),
        ([4, 5, 4], "token_ids has 1 ids more than once"),
    ],
)
def test_what_is_no_vocabulary_is_refused(token_ids, message, tmp_path):
    """A token that stands there twice would change the distribution of sampled texts."""
    with pytest.raises(ValueError, match=message):
        ITS_DRAFTER.restricted(SOME, np.array(token_ids))
    with pytest.raises(CheckpointError, match=f"draft_vocabulary: {message}"):
        export_drafter(ITS_DRAFTER.model, ITS_DRAFTER.config, tmp_path / "out", draft_vocabulary=np.array(token_ids))
    assert not list(tmp_path.iterdir())


def test_an_adaptive_width_takes_it():
    drafter = ITS_DRAFTER.restricted(SOME, THIRD)
    plain = generate(SOME, PROMPTS[:1], max_new_tokens=40)
    adaptive = generate(SOME, PROMPTS[:1], drafter=drafter, max_new_tokens=40, width="adaptive")
    assert adaptive[0].tokens == plain[0].tokens


# Files


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """(target, chats) of a tiny run."""
    folder = tmp_path_factory.mktemp("files")
    target = write_target(folder / "target")
    return target, write_rows(folder / "chats.jsonl", own_rows(target, 30))


@pytest.fixture(scope="module")
def run(files, tmp_path_factory):
    """A tiny run whose drafter proposes eight tokens, also where it is evaluated: (its folder, target)."""
    target, chats = files
    folder = tmp_path_factory.mktemp("run")
    fields = {"data__heldout_file": str(chats), "evaluation__decode_prompts": 4, "checkpoint__draft_vocab_size": 8}
    with mock.patch.object(heldout, "generate", wraps=generate) as decoding:
        train(settings(target, chats, folder, training__steps=5, **fields))
    assert [type(call.kwargs["drafter"].model) for call in decoding.call_args_list] == [RestrictedDrafter]
    return folder, target


def test_training_writes_it_and_loading_takes_it(run):
    folder, name = run
    target = load_target(name)
    drafter = load_drafter(folder / "drafter", target=target)
    assert isinstance(drafter.model, RestrictedDrafter)
    ids = read_draft_vocabulary(folder / "drafter", VOCABULARY)
    assert len(ids) == 8 and (np.diff(ids) > 0).all()
    np.testing.assert_array_equal(drafter.model.token_ids[...], ids)
    for options in ({}, {"target": target, "draft_vocabulary": False}):
        bare = load_drafter(folder / "drafter", **options)
        assert bare.model is unrestricted(bare.model)


def test_an_exported_checkpoint_has_it_too(run, tmp_path):
    folder, _ = run
    out = export_checkpoint(folder, tmp_path / "out")
    np.testing.assert_array_equal(
        read_draft_vocabulary(out, VOCABULARY), read_draft_vocabulary(folder / "drafter", VOCABULARY)
    )
    assert "| proposes | 8 tokens where draft_vocabulary.json is read |" in (out / "README.md").read_text()


def test_an_export_keeps_it_and_one_without_removes_that_of_the_drafter_before(run, tmp_path):
    folder, name = run
    drafter = load_drafter(folder / "drafter", target=load_target(name))
    out = export_drafter(drafter.model, drafter.config, tmp_path / "out")
    np.testing.assert_array_equal(read_draft_vocabulary(out, VOCABULARY), drafter.model.token_ids[...])
    export_drafter(unrestricted(drafter.model), drafter.config, out, overwrite=True)
    assert read_draft_vocabulary(out, VOCABULARY) is None
    assert load_drafter(out, target=load_target(name)).model is not None


def test_an_export_does_not_replace_a_vocabulary_unasked(tmp_path):
    write_draft_vocabulary(tmp_path, [3])
    with pytest.raises(CheckpointError, match=f"already has {DRAFT_VOCABULARY}"):
        export_drafter(ITS_DRAFTER.model, ITS_DRAFTER.config, tmp_path)
    assert read_draft_vocabulary(tmp_path, VOCABULARY).tolist() == [3]


def test_a_warm_start_trains_the_drafter_itself(run, files, tmp_path):
    fields = {"training__steps": 5, "model__warm_start": str(run[0] / "drafter")}
    outcome = train(settings(*files, tmp_path, **fields))
    assert not (outcome.drafter_dir / DRAFT_VOCABULARY).exists()


def test_a_target_without_weights_has_no_rows_for_it(run):
    folder, name = run
    outline = outline_target(name)
    with pytest.raises(ValueError, match=f"target {name} has no weights .* or the drafter with draft_vocabulary=False"):
        load_drafter(folder / "drafter", target=outline)
    bare = load_drafter(folder / "drafter", target=outline, draft_vocabulary=False)
    assert bare.draft_vocab_size is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not valid JSON"),
        ("[1, 2]", "must hold a JSON object"),
        ("{}", "token_ids must be a list of token ids, got None"),
        ('{"token_ids": []}', r"token_ids must be a list of token ids, got \[\]"),
        ('{"token_ids": [1, 2.5]}', "token_ids must be a list of token ids"),
        ('{"token_ids": [true]}', "token_ids must be a list of token ids"),
        ('{"token_ids": [3, 61]}', "token_ids reach from 3 to 61; the target has 0 to 60"),
        ('{"token_ids": [-1, 4]}', "token_ids reach from -1 to 4"),
        ('{"token_ids": [4, 5, 4]}', "1 ids more than once"),
    ],
)
def test_a_damaged_file_is_named(content, message, run, tmp_path):
    folder, name = run
    shutil.copytree(folder / "drafter", tmp_path / "damaged")
    (tmp_path / "damaged" / DRAFT_VOCABULARY).write_text(content)
    (tmp_path / "damaged" / "model.safetensors").unlink()  # it is told before weights are read
    with pytest.raises(CheckpointError, match=f"{DRAFT_VOCABULARY}.*{message}"):
        load_drafter(tmp_path / "damaged", target=load_target(name))


def test_the_most_frequent_answer_tokens():
    tokens_T = np.array([9, 9, 9, 4, 4, 5, 7, 7, 7], np.int32)
    rows = [TrainingRow("a", tokens_T, np.array([0, 0, 0, 1, 1, 1, 1, 1, 1], bool))] * 2
    counts_V = command.count_answer_tokens(rows, 12)
    assert (counts_V[9], counts_V[7], counts_V.sum()) == (0, 6, 12)  # 9 is in no answer
    np.testing.assert_array_equal(command.most_frequent(counts_V, 2), [7, 4])
    np.testing.assert_array_equal(command.most_frequent(counts_V, 100), [7, 4, 5])


def test_the_command_counts_what_training_counts(run, files, tmp_path):
    folder, name = run
    shutil.copytree(folder / "drafter", tmp_path / "drafter")
    (tmp_path / "drafter" / DRAFT_VOCABULARY).unlink()
    train_file = str(files[1])
    text = command.run(str(tmp_path / "drafter"), str(name), train_file, 8)
    assert "8 of 61 tokens" in text
    assert (tmp_path / "drafter" / DRAFT_VOCABULARY).read_text() == (folder / "drafter" / DRAFT_VOCABULARY).read_text()
    for wrong in ({"drafter": "nowhere"}, {"target": "nowhere"}, {"data": "nowhere"}):
        arguments = {"drafter": str(tmp_path / "drafter"), "target": str(name), "data": train_file} | wrong
        with pytest.raises(ValueError, match=f"--{next(iter(wrong))}='nowhere'"):
            command.run(size=8, **arguments)


def test_the_command_names_the_drafter_that_it_cannot_write_into(run, files, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))  # the shell leaves ~ in --drafter=~/drafter
    shutil.copytree(run[0] / "drafter", tmp_path / "drafter")
    assert command.run("~/drafter", str(run[1]), str(files[1]), 5).startswith(str(tmp_path / "drafter"))
    (tmp_path / "drafter" / DRAFT_VOCABULARY).unlink()
    (tmp_path / "drafter" / DRAFT_VOCABULARY).mkdir()
    with pytest.raises(ValueError, match=f"--drafter='~/drafter': can't be written: .*{DRAFT_VOCABULARY}"):
        command.run("~/drafter", str(run[1]), str(files[1]), 5)


def test_the_command_takes_data_of_another_target_when_told_to(run, files, tmp_path):
    folder, name = run
    shutil.copytree(folder / "drafter", tmp_path / "drafter")
    chats = shutil.copy(files[1], tmp_path / "chats.jsonl")
    meta_path(chats).write_text('{"target": "other", "target_fingerprint": "0"}')
    arguments = str(tmp_path / "drafter"), str(name), str(chats), 8
    with pytest.raises(ValueError, match="--data=.*made for another target .*allow_other_target"):
        command.run(*arguments)
    assert "8 of 61 tokens" in command.run(*arguments, allow_other_target=True)


def test_a_row_with_a_token_that_the_target_lacks_is_named():
    row = TrainingRow("a", np.array([70, 61], np.int32), np.array([False, True]))
    assert command.count_answer_tokens([row], 62)[61] == 1
    with pytest.raises(ValueError, match="row 'a' has token 61; the target has 0 to 60"):
        command.count_answer_tokens([row], 61)


def test_the_file_is_small_and_sorted(tmp_path):
    write_draft_vocabulary(tmp_path, [5, 3, 9])
    assert json.loads((tmp_path / DRAFT_VOCABULARY).read_text()) == {"token_ids": [3, 5, 9]}

"""The speculators layout of drafters, beside the z-lab layout: both say the same, to us and to a reader that is not."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from checkpoint_folders import rewrite, same_parameters, set_config

from dflash_jax.checkpoints.draft_vocabulary import DRAFT_VOCABULARY, read_draft_vocabulary
from dflash_jax.checkpoints.drafter_export import export_drafter
from dflash_jax.checkpoints.export import is_hub_id
from dflash_jax.checkpoints.huggingface import LoadedDrafter, LoadedTarget, load_drafter, load_target
from dflash_jax.checkpoints.safetensors_io import CheckpointError, read_independently
from dflash_jax.models.draft_vocabulary import unrestricted
from dflash_jax.models.family import ConfigError, drafter_config_to_dict, parse_drafter_config, to_speculators

FIXTURES = Path(__file__).parent / "fixtures"
TARGET = "some/target"


@dataclasses.dataclass(frozen=True)
class Served:
    """What a server takes from a drafter's folder."""

    decoder: dict
    taps: list[int]
    mask_token_id: int
    speculative_tokens: int
    causal: bool | None
    tensors: dict[str, np.ndarray]


def read_as_served(folder: Path) -> Served:
    """A reader of both layouts, written from what vLLM reads. It shares no code with ours but that of the weights'
    file, which is written from the format's definition alone."""
    config = json.loads((folder / "config.json").read_text())
    tensors = dict(read_independently(folder / "model.safetensors"))
    sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    sizes += ("head_dim", "vocab_size", "rms_norm_eps", "layer_types", "sliding_window", "rope_parameters")
    if "speculators_model_type" not in config:
        own = config["dflash_config"]
        decoder, width, causal = config, config["block_size"], config.get("is_causal")
        taps, mask = own["target_layer_ids"], own["mask_token_id"]
    else:
        assert config["speculators_model_type"] == config["speculators_config"]["algorithm"] == "dflash"
        assert config["speculators_config"]["verifier"]["name_or_path"] == TARGET
        assert config["draft_vocab_size"] == config["transformer_layer_config"]["vocab_size"]
        (proposal,) = config["speculators_config"]["proposal_methods"]
        decoder, width = config["transformer_layer_config"], proposal["speculative_tokens"] + 1
        taps = [entered - 1 for entered in config["aux_hidden_state_layer_ids"]]
        mask, causal = config["mask_token_id"], not config["sliding_window_non_causal"]
        assert not {"dflash_config", "block_size", "num_target_layers"} & set(decoder)
    return Served({name: decoder[name] for name in sizes}, taps, mask, width - 1, causal, tensors)


@pytest.fixture(scope="module")
def drafter() -> LoadedDrafter:
    return load_drafter(FIXTURES / "qwen3_yarn_b16" / "drafter")


@pytest.fixture
def exported(drafter, tmp_path) -> Path:
    return export_drafter(drafter.model, drafter.config, tmp_path / "there", layout="speculators", verifier=TARGET)


def test_both_layouts_are_read_to_the_same_drafter(drafter, exported, tmp_path):
    plain = export_drafter(drafter.model, drafter.config, tmp_path / "plain")
    ours, theirs = read_as_served(exported), read_as_served(plain)
    assert dataclasses.replace(ours, tensors={}) == dataclasses.replace(theirs, tensors={})
    assert ours.tensors.keys() == theirs.tensors.keys()
    for name, tensor in theirs.tensors.items():
        assert ours.tensors[name].dtype == tensor.dtype and ours.tensors[name].tobytes() == tensor.tobytes()
    assert theirs.taps == list(drafter.config.target_layer_ids) and theirs.speculative_tokens == 15


def test_an_export_loads_again(drafter, exported):
    again = load_drafter(exported, target=load_target(FIXTURES / "qwen3_yarn_b16" / "target"))
    assert drafter_config_to_dict(again.config) == drafter_config_to_dict(drafter.config)
    assert same_parameters(again.model, drafter.model)


def test_a_file_that_does_not_count_the_targets_layers_needs_the_target(drafter, exported):
    content = json.loads((exported / "config.json").read_text())
    del content["num_target_layers"]
    with pytest.raises(ConfigError, match="does not set .*num_target_layers"):
        parse_drafter_config(content)
    again = parse_drafter_config(content, num_target_layers=drafter.config.num_target_layers)
    assert drafter_config_to_dict(again) == drafter_config_to_dict(drafter.config)


@pytest.mark.parametrize(
    ("layer_types", "is_causal", "switch"),
    [
        (("full_attention", "full_attention"), False, False),
        (("full_attention", "sliding_attention"), False, False),
        (("sliding_attention", "sliding_attention"), True, True),
        (("sliding_attention", "sliding_attention"), None, True),
        (("full_attention", "sliding_attention"), None, None),
        (("full_attention", "sliding_attention"), True, None),
        (("full_attention", "full_attention"), True, None),
    ],
)
def test_causality_is_kept_or_refused(drafter, layer_types, is_causal, switch):
    fields = {"num_layers": 2, "layer_types": layer_types, "sliding_window": 8, "is_causal": is_causal}
    config = dataclasses.replace(drafter.config, **fields)
    plain = drafter_config_to_dict(config)
    if switch is None:
        with pytest.raises(ConfigError, match="is_causal: in the speculators layout"):
            to_speculators(plain, verifier=TARGET)
        return
    written = to_speculators(plain, verifier=TARGET)
    assert written["sliding_window_non_causal"] == (not switch)
    reread = parse_drafter_config(written)
    for layer in range(2):
        assert reread.layer_is_causal(layer) == config.layer_is_causal(layer) == switch
        assert reread.layer_window(layer) == config.layer_window(layer)


@pytest.mark.parametrize(
    ("kind", "is_causal", "non_causal", "causal"),
    [
        ("full_attention", False, False, False),
        ("full_attention", False, True, False),
        ("sliding_attention", False, True, False),
        ("sliding_attention", True, False, True),
        ("sliding_attention", False, False, None),
        ("sliding_attention", True, True, None),
        ("full_attention", True, False, None),
    ],
)
def test_two_switches_for_causality_have_to_agree(drafter, kind, is_causal, non_causal, causal):
    """The library's converter leaves is_causal among the decoder's fields, where vLLM alone reads it."""
    fields = {"num_layers": 2, "layer_types": (kind, kind), "sliding_window": 8, "is_causal": False}
    written = to_speculators(drafter_config_to_dict(dataclasses.replace(drafter.config, **fields)), verifier=TARGET)
    written["sliding_window_non_causal"] = non_causal
    written["transformer_layer_config"]["is_causal"] = is_causal
    if causal is None:
        with pytest.raises(ConfigError, match=f"is_causal {is_causal} contradicts sliding_window_non_causal"):
            parse_drafter_config(written)
        return
    assert {parse_drafter_config(written).layer_is_causal(layer) for layer in range(2)} == {causal}


@pytest.mark.parametrize("tied", [True, False])
def test_whether_the_target_is_tied_stands_among_the_decoders_fields(drafter, tied):
    """The library writes false at the top level in either case."""
    config = dataclasses.replace(drafter.config, tie_word_embeddings=tied)
    written = to_speculators(drafter_config_to_dict(config), verifier=TARGET)
    assert parse_drafter_config(written | {"tie_word_embeddings": False}).tie_word_embeddings is tied


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"speculators_model_type": "eagle3"}, "speculators_model_type 'eagle3' is not supported"),
        ({"projector_type": "domino"}, "projector_type 'domino' is not supported"),
        ({"shift_label": True}, "shift_label True is not supported"),
        ({"sample_from_anchor": True}, "sample_from_anchor True is not supported"),
        ({"draft_vocab_size": 0}, "draft_vocab_size.* 0"),
        ({"draft_vocab_size": 10_000}, "draft_vocab_size 10000 must be from 1 to vocab_size"),
        ({"target_hidden_size": 8}, "target_hidden_size 8 must be the drafter's hidden_size"),
        ({"aux_hidden_state_layer_ids": [0, 2, 3]}, "aux_hidden_state_layer_ids .*: must be at least 1"),
        ({"aux_hidden_state_layer_ids": None}, "does not set aux_hidden_state_layer_ids"),
        ({"mask_token_id": None}, "does not set .*mask_token_id"),
    ],
)
def test_what_differs_from_our_drafter_is_refused_by_field(exported, fields, message):
    set_config(exported, **fields)
    with pytest.raises(ConfigError, match=message):
        load_drafter(exported)


def test_a_copy_of_the_targets_tables_is_refused(exported):
    rewrite(exported, lambda tensors: tensors | {"embed_tokens.weight": np.ones((2, 2), np.float32)})
    with pytest.raises(CheckpointError, match="unexpected: embed_tokens.weight"):
        load_drafter(exported)


def test_the_target_has_to_be_named(drafter, tmp_path):
    with pytest.raises(CheckpointError, match="names the target; set verifier"):
        export_drafter(drafter.model, drafter.config, tmp_path / "out", layout="speculators")
    assert not list(tmp_path.iterdir())


def test_names_of_targets_that_a_server_takes(tmp_path, monkeypatch):
    assert is_hub_id("Qwen/Qwen3-8B")
    assert not any(map(is_hub_id, ["target", "runs/mine/target", "/models/target", "../target"]))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Qwen" / "Qwen3-8B").mkdir(parents=True)
    assert not is_hub_id("Qwen/Qwen3-8B")


# A draft vocabulary among the tensors


@pytest.fixture(scope="module")
def target() -> LoadedTarget:
    return load_target(FIXTURES / "qwen3_yarn_b16" / "target")


def test_a_draft_vocabulary_is_written_where_servers_look_and_read_again(drafter, target, tmp_path):
    ids = np.array([3, 9, 4, 40], np.int32)  # in any order
    ours = drafter.restricted(target, ids)
    out = export_drafter(ours.model, ours.config, tmp_path / "out", layout="speculators", verifier=TARGET)
    assert json.loads((out / "config.json").read_text())["draft_vocab_size"] == 4
    stored = dict(read_independently(out / "model.safetensors"))
    # as vLLM reads it: row i of lm_head is token i + d2t[i]; the library picks rows by t2d
    np.testing.assert_array_equal(np.arange(4) + stored["d2t"], [3, 4, 9, 40])
    np.testing.assert_array_equal(np.flatnonzero(stored["t2d"]), [3, 4, 9, 40])
    np.testing.assert_array_equal(stored["lm_head.weight"], target.model.head_VD[np.array([3, 4, 9, 40])])
    assert not (out / DRAFT_VOCABULARY).exists()
    again = load_drafter(out, target=target)
    np.testing.assert_array_equal(again.model.token_ids[...], [3, 4, 9, 40])
    assert not again.model.has_own_head and same_parameters(unrestricted(again.model), drafter.model)
    assert load_drafter(out).draft_vocab_size is None
    plain = export_drafter(again.model, again.config, tmp_path / "plain")
    np.testing.assert_array_equal(read_draft_vocabulary(plain, 160), [3, 4, 9, 40])


def test_a_head_of_its_own_is_kept_and_has_no_place_in_the_other_layout(drafter, target, tmp_path):
    ids = np.array([3, 4, 40], np.int32)
    head_UD = 2 * np.asarray(target.model.head_VD[ids])
    ours = drafter.restricted(target, ids, head_UD)
    out = export_drafter(ours.model, ours.config, tmp_path / "out", layout="speculators", verifier=TARGET)
    again = load_drafter(out, target=target)
    assert again.model.has_own_head
    np.testing.assert_array_equal(again.model.head[...], head_UD)
    with pytest.raises(CheckpointError, match="head is its own and not its target's; the layout must be speculators"):
        export_drafter(again.model, again.config, tmp_path / "plain")
    assert not (tmp_path / "plain").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"d2t": None}, "proposes 4 tokens .draft_vocab_size. and has no d2t"),
        ({"lm_head.weight": None}, "has no lm_head.weight"),
        ({"d2t": np.zeros(3, np.int64)}, r"d2t is \[3\] and must be \[4\]"),
        ({"lm_head.weight": np.zeros((5, 64), np.float32)}, r"lm_head.weight is \[5, 64\] and must be \[4, 64\]"),
        ({"lm_head.weight": np.zeros((4, 8), np.float32)}, r"lm_head.weight is \[4, 8\] and must be \[4, 64\]"),
        ({"d2t": np.zeros(4, np.float32)}, "'d2t' .* has dtype F32"),
        ({"d2t": np.full(4, 160)}, "d2t: token_ids reach from 160 to 163"),
        ({"d2t": np.array([1, 0, 0, 0])}, "d2t: token_ids has 1 ids more than once"),
        ({"t2d": np.ones(160, np.bool_)}, "t2d marks other tokens than d2t leads to"),
    ],
)
def test_tables_that_do_not_fit_are_named(change, message, drafter, target, tmp_path):
    ours = drafter.restricted(target, np.array([3, 4, 9, 40], np.int32))
    out = export_drafter(ours.model, ours.config, tmp_path / "out", layout="speculators", verifier=TARGET)
    rewrite(out, lambda tensors: {n: t for n, t in (tensors | change).items() if t is not None})
    with pytest.raises(CheckpointError, match=message):
        load_drafter(out, target=target)

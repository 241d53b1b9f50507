"""Drafter configurations: every spelling of config.json, what is refused, how a drafter is held against a target."""

import dataclasses
import json
from pathlib import Path

import pytest
import transformers

from dflash_jax.models.family import (
    ConfigError,
    check_drafter_matches_target,
    check_mask_token_id,
    drafter_config_to_dict,
    parse_drafter_config,
    parse_target_config,
)

FIXTURES = Path(__file__).parent / "fixtures"
FIXTURE_NAMES = ("qwen3_b8", "llama3_tied_b10", "qwen3_yarn_b16")


def read_config(*parts: str) -> dict:
    return json.loads(FIXTURES.joinpath(*parts, "config.json").read_text())


def without(config: dict, *names: str) -> dict:
    return {name: value for name, value in config.items() if name not in names}


@pytest.fixture
def drafter() -> dict:
    return read_config("qwen3_b8", "drafter")


def test_nested_flat_and_mixed_spellings_are_the_same_drafter(drafter):
    nested = parse_drafter_config(drafter)
    own = {**drafter["dflash_config"], "block_size": drafter["block_size"]}
    flat = without(drafter, "dflash_config") | own
    mixed = without(drafter, "block_size") | {
        "dflash_config": {"block_size": own["block_size"], "target_layer_ids": own["target_layer_ids"]},
        "mask_token_id": own["mask_token_id"],
    }
    assert parse_drafter_config(flat) == parse_drafter_config(mixed) == nested
    assert (nested.block_size, nested.mask_token_id, nested.target_layer_ids) == (8, 159, (1, 3, 5))


def test_dflash_config_wins_over_the_top_level(drafter):
    config = drafter | {"mask_token_id": 3, "target_layer_ids": [0], "block_size": 4}
    config["dflash_config"] = drafter["dflash_config"] | {"block_size": 6}
    parsed = parse_drafter_config(config)
    assert (parsed.block_size, parsed.mask_token_id, parsed.target_layer_ids) == (6, 159, (1, 3, 5))


def test_ids_of_a_checkpoint_win_over_the_formula_and_keep_their_order(drafter):
    drafter["dflash_config"]["target_layer_ids"] = [5, 0, 2]
    assert parse_drafter_config(drafter).target_layer_ids == (5, 0, 2)


@pytest.mark.parametrize(
    ("is_causal", "kinds", "causal"),
    [
        (None, "fsf", [False, True, False]),
        (True, "fsf", [True, True, True]),
        (False, "fsf", [False, False, False]),
        (None, "fff", [False, False, False]),
        (None, "sss", [True, True, True]),
    ],
)
def test_causality_follows_the_layer_type_unless_it_is_explicit(drafter, is_causal, kinds, causal):
    names = {"f": "full_attention", "s": "sliding_attention"}
    drafter |= {"layer_types": [names[kind] for kind in kinds], "sliding_window": 7, "is_causal": is_causal}
    parsed = parse_drafter_config(drafter)
    assert [parsed.layer_is_causal(i) for i in range(3)] == causal
    assert [parsed.layer_window(i) for i in range(3)] == [7 if kind == "s" else None for kind in kinds]
    written = drafter_config_to_dict(parsed)
    reread = parse_drafter_config(json.loads(json.dumps(written)))
    assert [reread.layer_is_causal(i) for i in range(3)] == causal
    assert [reread.layer_window(i) for i in range(3)] == [parsed.layer_window(i) for i in range(3)]
    # one value can only be written where it describes every layer
    assert written.get("is_causal") == (causal[0] if len(set(causal)) == 1 else None)


def test_layer_types_are_derived_as_qwen3_does_when_absent(drafter):
    config = without(drafter, "layer_types") | {
        "use_sliding_window": True,
        "sliding_window": 16,
        "max_window_layers": 1,
    }
    assert parse_drafter_config(config).layer_types == ("full_attention", "sliding_attention", "sliding_attention")
    assert parse_drafter_config(config | {"use_sliding_window": False}).layer_types == ("full_attention",) * 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_theta": None}, "rope_theta is missing"),
        ({"sample_from_anchor": True}, "sample_from_anchor True is not supported: .*slot 0"),
        ({"dflash_config": {"sample_from_anchor": True}}, "dflash_config.sample_from_anchor"),
        ({"d2t": [0, 1]}, "d2t .*reduced vocabulary"),
        ({"draft_vocab_size": 80}, "draft_vocab_size 80 .*reduced vocabulary"),
        ({"attention_sink_bias": True}, "attention_sink_bias"),
        ({"attention_bias": True}, "attention_bias"),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "LlamaForCausalLMEagle3.*supported: DFlashDraftModel"),
        ({"architectures": None}, "supported: DFlashDraftModel"),
        ({"model_type": "llama"}, "model_type 'llama'"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"num_target_layers": None}, "num_target_layers"),
        ({"num_target_layers": 5}, r"target_layer_ids=\[1, 3, 5\]"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries, num_hidden_layers is 3"),
        ({"layer_types": ["full_attention", "linear_attention", "full_attention"]}, "linear_attention"),
        ({"layer_types": ["sliding_attention"] * 3}, "sliding_window must be at least 1, got None"),
        ({"block_size": 1}, "block_size must be an integer of at least 2, got 1"),
        ({"is_causal": True, "causal": False}, "contradict"),
        ({"dflash_config": [1]}, "dflash_config must be a JSON object"),
    ],
)
def test_drafters_that_cannot_be_represented_are_refused(drafter, change, message):
    if isinstance(change.get("dflash_config"), dict):
        change = {"dflash_config": drafter["dflash_config"] | change["dflash_config"]}
    with pytest.raises(ConfigError, match=message):
        parse_drafter_config(drafter | change)


def test_eagle_style_layer_ids_are_never_converted_silently(drafter):
    drafter["dflash_config"].pop("target_layer_ids")
    with pytest.raises(ConfigError, match="dflash_config.target_layer_ids"):
        parse_drafter_config(drafter)
    with pytest.raises(ConfigError, match="eagle_aux_hidden_state_layer_ids.*one higher"):
        parse_drafter_config(drafter | {"eagle_aux_hidden_state_layer_ids": [2, 4, 6]})


def test_switches_that_are_off_are_not_in_the_way(drafter):
    config = drafter | {"sample_from_anchor": False, "draft_vocab_size": 160, "attention_sink_bias": False}
    assert parse_drafter_config(config) == parse_drafter_config(drafter)


@pytest.mark.parametrize("name", FIXTURE_NAMES)
def test_drafter_config_round_trip(name):
    parsed = parse_drafter_config(read_config(name, "drafter"))
    written = json.loads(json.dumps(drafter_config_to_dict(parsed, dtype="bfloat16")))
    assert parse_drafter_config(written) == dataclasses.replace(parsed, is_causal=False)
    assert written["block_size"] == written["dflash_config"]["block_size"] == parsed.block_size
    assert written["rope_theta"] == written["rope_parameters"]["rope_theta"] == parsed.rope.theta
    assert written["dtype"] == "bfloat16"


def test_every_field_of_the_layout_is_written(drafter):
    listed = [
        "architectures",
        "model_type",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "hidden_act",
        "rms_norm_eps",
        "vocab_size",
        "max_position_embeddings",
        "attention_bias",
        "attention_dropout",
        "layer_types",
        "sliding_window",
        "use_sliding_window",
        "max_window_layers",
        "tie_word_embeddings",
        "initializer_range",
        "dtype",
        "block_size",
        "num_target_layers",
        "dflash_config",
        "rope_theta",
        "rope_parameters",
        "rope_scaling",
        "is_causal",
    ]
    written = drafter_config_to_dict(parse_drafter_config(drafter))
    assert sorted(written) == sorted(listed)
    assert sorted(written["dflash_config"]) == ["block_size", "mask_token_id", "target_layer_ids"]


@pytest.mark.parametrize("name", FIXTURE_NAMES)
def test_an_exported_config_means_the_same_to_transformers(name):
    parsed = parse_drafter_config(read_config(name, "drafter"))
    theirs = transformers.Qwen3Config(**without(drafter_config_to_dict(parsed), "architectures", "model_type"))
    assert theirs.rope_parameters["rope_theta"] == parsed.rope.theta
    assert theirs.rope_parameters["rope_type"] == parsed.rope.kind
    assert theirs.rope_parameters.get("factor", 1.0) == parsed.rope.factor
    assert (theirs.head_dim, tuple(theirs.layer_types)) == (parsed.head_dim, parsed.layer_types)


# A drafter and its target


def test_a_mask_token_may_lie_in_the_padded_tail_of_the_table():
    check_mask_token_id(151_669, 151_936, {"eos_token_id": 151_645, "pad_token_id": 151_643, "bos_token_id": None})


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (None, "mask_token_id is not set"),
        (-1, r"mask_token_id=-1 lies outside .*0\.\.159"),
        (160, r"mask_token_id=160 lies outside .*0\.\.159"),
        (True, "mask_token_id=True"),
        (2, "mask_token_id=2 equals eos_token_id"),
        (0, "mask_token_id=0 equals pad_token_id"),
    ],
)
def test_a_mask_token_that_is_unset_special_or_out_of_range_is_an_error(mask, message):
    with pytest.raises(ConfigError, match=message):
        check_mask_token_id(mask, 160, {"pad_token_id": 0, "eos_token_id": 2})


def test_an_unset_mask_token_in_a_checkpoint_is_an_error(drafter):
    drafter["dflash_config"]["mask_token_id"] = None
    with pytest.raises(ConfigError, match="mask_token_id"):
        parse_drafter_config(drafter)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 32}, "layers: .*target of 8 layers.*has 32"),
        ({"hidden_size": 128}, "hidden size: .*is 64, the target's is 128"),
        ({"vocab_size": 161}, "vocabulary: .*is 160, the target's is 161"),
    ],
)
def test_a_drafter_for_another_target_is_a_clear_error(drafter, change, message):
    target = parse_target_config(read_config("qwen3_b8", "target"))
    check_drafter_matches_target(parse_drafter_config(drafter), target)
    with pytest.raises(ConfigError, match=message):
        check_drafter_matches_target(parse_drafter_config(drafter), dataclasses.replace(target, **change))


def test_all_differences_to_the_target_are_named_at_once(drafter):
    target = parse_target_config(read_config("qwen3_b8", "target"))
    other = dataclasses.replace(target, num_layers=32, hidden_size=128, vocab_size=161)
    with pytest.raises(ConfigError, match="layers: .*hidden size: .*vocabulary: "):
        check_drafter_matches_target(parse_drafter_config(drafter), other)

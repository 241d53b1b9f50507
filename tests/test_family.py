"""Target configurations from config.json: what is accepted, what is refused and with which words."""

import json
import warnings

import pytest
import transformers

from dflash_jax.models.family import (
    ConfigError,
    RopeConfig,
    check_target_layer_ids,
    default_target_layer_ids,
    parse_rope,
    parse_target_config,
)

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}
QWEN2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "num_key_value_heads": 2}
QWEN3 = QWEN2 | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 32}


def without(config: dict, *names: str) -> dict:
    return {name: value for name, value in config.items() if name not in names}


# Targets


def test_families_differ_in_bias_norm_and_head_size():
    llama, qwen2, qwen3 = (parse_target_config(config) for config in (LLAMA, QWEN2, QWEN3))
    assert (llama.num_kv_heads, qwen2.num_kv_heads, qwen3.num_kv_heads) == (4, 2, 2)
    assert (llama.head_dim, qwen2.head_dim, qwen3.head_dim) == (16, 16, 32)
    assert (llama.qkv_bias, qwen2.qkv_bias, qwen3.qkv_bias) == (False, True, False)
    assert (llama.qk_norm, qwen2.qk_norm, qwen3.qk_norm) == (False, False, True)


def test_attention_bias_covers_all_four_projections_but_in_qwen2():
    for config, o_bias in ((LLAMA, True), (QWEN2, False), (QWEN3, True)):
        parsed = parse_target_config(config | {"attention_bias": True})
        assert (parsed.qkv_bias, parsed.o_bias) == (True, o_bias)


def test_mlp_bias_and_tying_are_read():
    assert parse_target_config(LLAMA | {"mlp_bias": True, "tie_word_embeddings": True}).mlp_bias
    assert parse_target_config(LLAMA | {"tie_word_embeddings": True}).tie_word_embeddings


@pytest.mark.parametrize("architecture", [transformers.LlamaConfig, transformers.Qwen2Config, transformers.Qwen3Config])
def test_what_transformers_writes_is_read(architecture, tmp_path):
    written = architecture(
        num_hidden_layers=3,
        vocab_size=77,
        num_key_value_heads=8,
        rope_parameters={"rope_theta": 5e5, "rope_type": "default"},
    )
    written.architectures = [{"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[written.model_type] + "ForCausalLM"]
    written.save_pretrained(tmp_path)
    parsed = parse_target_config(json.loads((tmp_path / "config.json").read_text()))
    assert (parsed.family, parsed.num_layers, parsed.vocab_size) == (written.model_type, 3, 77)
    assert (parsed.num_kv_heads, parsed.rope) == (8, RopeConfig(theta=5e5))


QWEN_SLIDING = {"use_sliding_window": True, "sliding_window": 128, "max_window_layers": 2}


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (LLAMA | {"model_type": "gpt2"}, "model_type 'gpt2'"),
        (LLAMA | {"model_type": "mistral", "sliding_window": 4096}, "sliding-window attention.*sliding_window 4096"),
        (QWEN2 | QWEN_SLIDING, "sliding-window attention.*use_sliding_window"),
        (QWEN3 | {"layer_types": ["full_attention", "sliding_attention"] * 2}, "sliding-window attention.*layer_types"),
        (QWEN3 | {"layer_types": ["full_attention", "linear_attention"] * 2}, "linear attention"),
        (QWEN3 | {"model_type": "qwen3_next", "linear_num_key_heads": 16}, "linear attention"),
        (QWEN3 | {"model_type": "qwen3_moe", "num_experts": 128}, "mixture of experts.*num_experts 128"),
        (LLAMA | {"model_type": "mixtral", "num_local_experts": 8}, "mixture of experts"),
        (LLAMA | {"quantization_config": {"quant_method": "gptq"}}, "quantised weights.*gptq"),
        ({"model_type": "qwen2_5_vl", "vision_config": {}, "text_config": QWEN2}, "vision"),
        (LLAMA | {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        (LLAMA | {"position_embedding_type": "absolute"}, "position_embedding_type 'absolute'"),
        (LLAMA | {"alibi": True}, "ALiBi"),
        (LLAMA | {"no_rope_layers": [1, 1, 1, 0]}, "no_rope_layers"),
        (LLAMA | {"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        (QWEN3 | {"architectures": ["DFlashDraftModel"]}, "DFlashDraftModel"),
    ],
)
def test_unsupported_targets_are_refused_by_name_with_what_is_supported(config, reason):
    with pytest.raises(ConfigError, match=f"(?s){reason}.*supported targets.*Llama 3.x, SmolLM2.*Qwen2.5.*qwen3"):
        parse_target_config(config)


def test_a_window_that_slides_nowhere_is_no_sliding_target():
    off = {"use_sliding_window": False, "sliding_window": 131072, "max_window_layers": 2}
    assert parse_target_config(QWEN2 | off) == parse_target_config(QWEN2)
    beyond = QWEN_SLIDING | {"max_window_layers": 4}
    assert parse_target_config(QWEN2 | beyond) == parse_target_config(QWEN2)
    listed = {**QWEN_SLIDING, "layer_types": ["full_attention"] * 4}
    assert parse_target_config(QWEN2 | listed) == parse_target_config(QWEN2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "does not set hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be an integer of at least 1, got 0"),
        ({"vocab_size": "100"}, "vocab_size must be an integer of at least 1, got '100'"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps must be a positive number, got -1.0"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false, got 'yes'"),
        ({"num_attention_heads": True}, "num_attention_heads must be an integer of at least 1, got True"),
        ({"num_key_value_heads": 3}, r"num_attention_heads \(4\) must be a multiple of num_key_value_heads \(3\)"),
        ({"num_attention_heads": 5, "num_key_value_heads": 5}, "not a multiple of num_attention_heads.*head_dim"),
        ({"head_dim": 15}, "head_dim must be even for rotary positions, got 15"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries, num_hidden_layers is 4"),
        ({"model_type": None}, "does not set model_type"),
        ({"rope_theta": 0}, "rope_theta must be a positive number, got 0"),
    ],
)
def test_a_wrong_field_is_named_with_the_value_seen(change, message):
    with pytest.raises(ConfigError, match=message):
        parse_target_config(LLAMA | change)


def test_qwen3_without_head_dim_is_not_guessed():
    with pytest.raises(ConfigError, match="head_dim"):
        parse_target_config(without(QWEN3, "head_dim"))


# Rotary positions

LLAMA3_SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LLAMA3_ROPE = RopeConfig(1e6, "llama3", 8.0, 8192, 1.0, 4.0)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"rope_theta": 1e6}, RopeConfig(1e6)),
        ({"rope_theta": 1e6, "rope_scaling": None}, RopeConfig(1e6)),
        ({"rope_theta": 1000000}, RopeConfig(1e6)),
        ({"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}, RopeConfig(1e6)),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6, "rope_type": "default"}}}, RopeConfig(1e6)),
        ({"rope_scaling": {"rope_theta": 1e6, "rope_type": "default"}}, RopeConfig(1e6)),
        ({"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 2}}, RopeConfig(1e6, "linear", 2.0)),
        ({"rope_theta": 1e6, "rope_scaling": {"rope_type": "llama3", **LLAMA3_SCALING}}, LLAMA3_ROPE),
        ({"rope_parameters": {"rope_theta": 1e6, "rope_type": "llama3", **LLAMA3_SCALING}}, LLAMA3_ROPE),
        (
            {
                "rope_theta": 1e6,
                "rope_scaling": {"type": "llama3", **LLAMA3_SCALING},
                "rope_parameters": {"rope_theta": 1e6, "rope_type": "llama3", **LLAMA3_SCALING},
            },
            LLAMA3_ROPE,
        ),
        (
            {"rope_theta": 1e6, "max_position_embeddings": 128, "rope_scaling": {"type": "yarn", "factor": 4.0}},
            RopeConfig(1e6, "yarn", 4.0, 128),
        ),
        (
            {
                "rope_theta": 1e6,
                "max_position_embeddings": 128,
                "rope_scaling": {
                    "rope_type": "yarn",
                    "original_max_position_embeddings": 32,
                    "beta_fast": 16,
                    "mscale": 1.5,
                    "mscale_all_dim": 0.5,
                    "truncate": False,
                },
            },
            RopeConfig(1e6, "yarn", 4.0, 32, beta_fast=16, mscale=1.5, mscale_all_dim=0.5, truncate=False),
        ),
    ],
)
def test_every_spelling_of_rope_is_read(config, expected):
    assert parse_rope(config) == expected


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "rope_theta is missing"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_theta is missing"),
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}}, "rope_theta contradict"),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "linear"}}, "rope_scaling.factor"),
        (
            {"rope_theta": 1e4, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "'dynamic'.*default, linear, llama3, yarn",
        ),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "longrope"}}, "'longrope'"),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}, "'mrope'"),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "default", "mrope_section": [16, 24, 24]}}, "'mrope'"),
        ({"rope_theta": 1e4, "partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"rope_theta": 1e4, "rope_scaling": 2.0}, "rope_scaling must be a JSON object or null, got 2.0"),
        (
            {
                "rope_theta": 1e4,
                "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 1},
            },
            "low_freq_factor",
        ),
        (
            {"rope_theta": 1e4, "rope_scaling": {"rope_type": "llama3", **LLAMA3_SCALING, "low_freq_factor": 4.0}},
            "low_freq_factor < high_freq_factor",
        ),
        (
            {
                "rope_theta": 1e4,
                "rope_scaling": {"type": "linear", "factor": 2.0},
                "rope_parameters": {"rope_type": "linear", "factor": 4.0},
            },
            "contradict each other",
        ),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}, "sliding_attention": {}}}, "per layer type"),
    ],
)
def test_rope_that_is_unclear_or_unsupported_is_refused(config, message):
    with pytest.raises(ConfigError, match=message):
        parse_rope(config)


# Taps


@pytest.mark.parametrize(
    ("layers", "taps", "ids"),
    [
        (36, 5, (1, 9, 17, 25, 33)),
        (32, 5, (1, 8, 15, 22, 29)),
        (30, 5, (1, 8, 14, 20, 27)),
        (28, 1, (14,)),
    ],
)
def test_default_taps(layers, taps, ids):
    assert default_target_layer_ids(layers, taps) == ids


@pytest.mark.parametrize(("layers", "taps"), [(4, 2), (4, 5), (3, 2), (6, 5), (8, 0)])
def test_a_target_too_shallow_for_the_taps_is_an_error(layers, taps):
    with pytest.raises(ConfigError, match="taps"):
        default_target_layer_ids(layers, taps)


@pytest.mark.parametrize("ids", [(), (-1, 2), (1, 8), (2, 2)])
def test_tap_ids_outside_the_target_or_twice_are_errors(ids):
    with pytest.raises(ConfigError, match="target_layer_ids"):
        check_target_layer_ids(ids, 8)


def test_tapping_the_last_layer_warns_and_nothing_else_does():
    with pytest.warns(UserWarning, match=r"last layer \(7\)"):
        check_target_layer_ids((5, 7), 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_target_layer_ids((5, 1, 3), 8)

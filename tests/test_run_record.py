"""What a run leaves beside its results, and the arithmetic of what a step needs."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from small_models import drafter_config, target_config
from tiny_run import settings

from dflash_jax.compile_check import known_target
from dflash_jax.training.flops import drafter_flops, feature_flops, layer_weights, peak_flops
from dflash_jax.training.run_record import Profile, git_commit, write_record

QWEN3_8B = known_target("Qwen/Qwen3-8B", None)


def test_the_paper_size_costs_what_it_does_by_hand():
    """Qwen3-8B: 6.95 billion weights in 36 layers, the published 8.19 less the two tables of 0.62 each."""
    assert 36 * layer_weights(QWEN3_8B)[0] == pytest.approx(8.19e9 - 2 * 151_936 * 4096, rel=1e-3)
    one_pass = feature_flops(QWEN3_8B, 36, rows=1, length=3072)
    assert one_pass == pytest.approx(3072 * 2 * 36 * layer_weights(QWEN3_8B)[0] + 36 * 2 * 4096 * 3072**2)
    sizes = {"hidden_size": 4096, "intermediate_size": 12_288, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
    drafter = drafter_config(QWEN3_8B, **sizes, num_layers=5, target_layer_ids=(1, 9, 17, 25, 33))
    blocks = 8192 * 5 * (2 * layer_weights(QWEN3_8B)[0] + 4 * 4096 * (1536 + 16))
    context = 3072 * 2 * (5 * 4096**2 + 5 * 2 * 4096 * 1024)
    head = 512 * 15 * 2 * 4096 * 151_936
    wanted = 3 * (blocks + context) + 2 * head
    assert drafter_flops(drafter, rows=1, length=3072, anchors=512, width=16) == pytest.approx(wanted)


def test_what_is_needed_is_what_a_small_pass_computes():
    """Against the products that JAX counts in the real feature pass, where a causal mask saves nothing."""
    from small_models import random_target

    from dflash_jax.compiled_work import work_of
    from dflash_jax.training.step import context_taps

    target, length = random_target(), 64
    tokens_BT = jnp.zeros((2, length), jnp.int32)
    counted = work_of(context_taps.lower(target.model, tokens_BT, layers=(1,)).compile().as_text()).flops
    config = target_config()
    unmasked = 2 * 2 * length * 2 * config.num_heads * config.head_dim * length / 2 * 2
    assert counted == pytest.approx(feature_flops(config, 2, 2, length) + unmasked)


@pytest.mark.parametrize(
    ("kind", "peak"), [("TPU v5p", 459e12), ("TPU v5 lite", 197e12), ("NVIDIA H200", 989e12), ("cpu", None)]
)
def test_peaks_are_known_by_the_names_that_jax_gives(kind, peak):
    assert peak_flops(kind) == peak


def test_settings_versions_and_commit_are_written(tmp_path):
    experiment = settings(tmp_path, tmp_path / "chats.jsonl", tmp_path)
    write_record(tmp_path, experiment)
    write_record(tmp_path, experiment)  # resumed
    record, again = json.loads((tmp_path / "run.json").read_text())
    assert again == record
    assert record["experiment"]["training"]["steps"] == 20
    assert record["versions"]["jax"] == jax.__version__ and record["processes"] == 1
    assert git_commit(tmp_path) is None
    commit = git_commit(Path(__file__).parent)
    assert commit is None or len(commit.rstrip("+")) == 40


def test_a_trace_of_some_steps_is_written(tmp_path):
    experiment = settings(tmp_path, tmp_path / "chats.jsonl", tmp_path)
    for first, written in ((None, False), (1, True)):
        chosen = dataclasses.replace(experiment, logging=dataclasses.replace(experiment.logging, profile_step=first))
        profile = Profile(chosen, tmp_path)
        for _ in range(6):
            profile.before_step()
            jax.block_until_ready(jnp.ones(3) + 1)
        profile.close()
        assert any((tmp_path / "profile").rglob("*.xplane.pb")) == written

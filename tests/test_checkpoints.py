"""Checkpoint folders: every layout loads, everything broken is refused with the reason."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tiny_models
import torch
from checkpoint_folders import rewrite, same_parameters, set_config, shard
from flax import nnx
from safetensors.numpy import load_file

from dflash_jax.checkpoints import sources
from dflash_jax.checkpoints.huggingface import load_drafter, load_target
from dflash_jax.checkpoints.names import drafter_entries, target_entries
from dflash_jax.checkpoints.safetensors_io import (
    CheckpointError,
    TensorFolder,
)
from dflash_jax.checkpoints.weights import parameter
from dflash_jax.models.family import ConfigError, parse_target_config

FIXTURES = Path(__file__).parent / "fixtures"
FIXTURE_NAMES = ("qwen3_b8", "llama3_tied_b10", "qwen3_yarn_b16")


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def saved(request, tmp_path_factory) -> Path:
    """A tiny Qwen2 target (biases and all) as transformers saves it."""
    folder = tmp_path_factory.mktemp("tied" if request.param else "untied")
    tiny_models.torch_target("qwen2", tied=request.param).save_pretrained(folder)
    return folder


@pytest.fixture
def untied(tmp_path) -> Path:
    folder = tmp_path / "target"
    shutil.copytree(FIXTURES / "qwen3_b8" / "target", folder)
    return folder


# Tables of names


@pytest.mark.parametrize("name", FIXTURE_NAMES)
def test_the_tables_cover_every_parameter_exactly_once(name):
    target = load_target(FIXTURES / name / "target")
    drafter = load_drafter(FIXTURES / name / "drafter", target=target)
    for model, entries in (
        (target.model, target_entries(target.config)),
        (drafter.model, drafter_entries(drafter.config)),
    ):
        paths = [".".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(model))]
        assert sorted(entry.path for entry in entries) == sorted(paths)
        assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(model))


# Layouts of targets


@pytest.mark.parametrize("prefix", ["model.", "", "language_model.model.", "model.language_model.", "model.model."])
@pytest.mark.parametrize("sharded", [False, True], ids=["single", "sharded"])
def test_every_layout_loads_the_same_target(saved, sharded, prefix, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(saved, folder)
    head = {"language_model.model.": "language_model.lm_head.weight", "model.model.": "model.lm_head.weight"}

    def rename(name: str) -> str:
        if name == "lm_head.weight":
            return head.get(prefix, name)
        return prefix + name.removeprefix("model.")

    rewrite(folder, lambda tensors: {rename(name): tensor for name, tensor in tensors.items()})
    if sharded:
        shard(folder)
    loaded = load_target(folder)
    assert same_parameters(loaded.model, load_target(saved).model)
    assert (loaded.model.head is None) == loaded.config.tie_word_embeddings


def test_parameters_are_the_tensors_of_the_file(saved):
    tensors, model = load_file(saved / "model.safetensors"), load_target(saved).model
    np.testing.assert_array_equal(model.embedding[...], tensors["model.embed_tokens.weight"])
    layer = model.layers[1]
    np.testing.assert_array_equal(layer.mlp.down_proj.weight[...], tensors["model.layers.1.mlp.down_proj.weight"])
    np.testing.assert_array_equal(layer.attention.k_proj.bias[...], tensors["model.layers.1.self_attn.k_proj.bias"])
    np.testing.assert_array_equal(layer.input_norm.scale[...], tensors["model.layers.1.input_layernorm.weight"])


def test_the_head_of_a_tied_target_is_the_embedding_bit_for_bit():
    model = load_target(FIXTURES / "llama3_tied_b10" / "target").model
    assert np.asarray(model.head_VD).tobytes() == np.asarray(model.embedding[...]).tobytes()


def test_only_needed_shards_are_opened(untied):
    shard(untied)
    with TensorFolder(untied) as tensors:
        name = min(tensors.names)
        for path in untied.glob("model-*.safetensors"):
            if name not in load_file(path):
                path.unlink()
        tensors.read(name)
        with pytest.raises(CheckpointError, match="lacks the shard"):
            [tensors.read(other) for other in tensors.names]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtype_of_parameters(untied, dtype):
    assert {leaf.dtype for leaf in jax.tree.leaves(load_target(untied, dtype=dtype).model)} == {jnp.dtype(dtype)}


def test_dtype_none_keeps_what_is_stored(untied):
    rewrite(untied, lambda tensors: {name: t.astype(ml_dtypes.bfloat16) for name, t in tensors.items()})
    kept, widened = load_target(untied, dtype=None).model, load_target(untied).model
    assert kept.embedding.dtype == jnp.bfloat16
    np.testing.assert_array_equal(kept.embedding[...].astype(jnp.float32), widened.embedding[...])


def test_unknown_dtype_is_named(untied):
    with pytest.raises(CheckpointError, match="dtype 'int4'.*float32, bfloat16, float16"):
        load_target(untied, dtype="int4")


def test_a_tied_config_ignores_a_head_that_is_the_embedding_and_refuses_another(tmp_path):
    folder = tmp_path / "tied"
    shutil.copytree(FIXTURES / "llama3_tied_b10" / "target", folder)
    plain = load_target(folder)
    rewrite(folder, lambda tensors: tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]})
    assert same_parameters(load_target(folder).model, plain.model)
    rewrite(folder, lambda tensors: tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1})
    with pytest.raises(CheckpointError, match="lm_head.weight differs from model.embed_tokens.weight"):
        load_target(folder)


def test_rotary_buffers_of_old_files_are_ignored(untied):
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(16, np.float32)}
    rewrite(untied, lambda tensors: tensors | buffer)
    assert same_parameters(load_target(untied).model, load_target(FIXTURES / "qwen3_b8" / "target").model)


# Broken targets


def test_missing_unexpected_and_misshapen_tensors_are_reported_together(untied):
    def break_it(tensors):
        tensors.pop("model.layers.2.mlp.up_proj.weight")
        tensors["model.norm.weight"] = np.ones(63, np.float32)
        return tensors | {"model.layers.9.mlp.up_proj.weight": np.ones((2, 2), np.float32)}

    rewrite(untied, break_it)
    with pytest.raises(CheckpointError) as error:
        load_target(untied)
    for part in (
        r"missing: model.layers.2.mlp.up_proj.weight",
        "what is there: lm_head.weight, model.embed_tokens.weight, model.layers.*.input_layernorm.weight (×8)",
        "unexpected: model.layers.*.mlp.up_proj.weight",
        "model.norm.weight is [63], the config makes it [64]",
    ):
        assert part in str(error.value)


def test_an_untied_config_without_head_is_an_error_that_names_the_field(untied):
    rewrite(untied, lambda tensors: {name: t for name, t in tensors.items() if name != "lm_head.weight"})
    with pytest.raises(CheckpointError, match="missing: lm_head.weight.*tie_word_embeddings"):
        load_target(untied)


def test_pickled_weights_are_refused(untied):
    (untied / "model.safetensors").rename(untied / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin is pickled, which is never read"):
        load_target(untied)


@pytest.mark.parametrize(
    "name",
    ["../outside.safetensors", "/etc/outside.safetensors", "sub/a.safetensors", "a\\b.safetensors", "a.bin", 3, []],
)
def test_shard_names_that_leave_the_folder_are_refused(untied, name):
    (untied / "model.safetensors").rename(untied.parent / "outside.safetensors")
    (untied / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    with pytest.raises(CheckpointError, match="must be a .safetensors file beside it"):
        load_target(untied)


def test_shards_may_be_links_as_in_the_hub_cache(untied):
    blob = untied.parent / "blob"
    (untied / "model.safetensors").rename(blob)
    (untied / "model.safetensors").symlink_to(blob)
    assert load_target(untied).config.vocab_size == 160


def test_an_index_that_misplaces_a_tensor_is_an_error(untied):
    shard(untied)
    path = untied / "model.safetensors.index.json"
    weight_map = json.loads(path.read_text())["weight_map"]
    weight_map["lm_head.weight"] = weight_map["model.layers.0.input_layernorm.weight"]
    path.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match="doesn't hold tensor 'lm_head.weight'"):
        load_target(untied)


def test_a_truncated_weight_file_is_an_error(untied):
    path = untied / "model.safetensors"
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(CheckpointError, match="not a readable safetensors file"):
        load_target(untied)


def test_integer_weights_are_refused_as_quantised(untied):
    rewrite(untied, lambda tensors: tensors | {"model.norm.weight": np.ones(64, np.int8)})
    with pytest.raises(CheckpointError, match="'model.norm.weight'.*dtype I8"):
        load_target(untied)


def test_a_drafter_folder_is_no_target():
    with pytest.raises(ConfigError, match="DFlashDraftModel"):
        load_target(FIXTURES / "qwen3_b8" / "drafter")


# Sources


@pytest.mark.parametrize("source", ["no such folder", "./nothing/here", Path("org/name")])
def test_a_source_that_is_nothing_is_an_error(source):
    with pytest.raises(CheckpointError, match="neither an existing folder, nor a hub id"):
        load_target(source)


def test_a_folder_without_config_is_an_error(tmp_path):
    with pytest.raises(CheckpointError, match=r"has no config.json"):
        load_target(tmp_path)


def test_a_hub_id_without_network_is_a_clear_error(monkeypatch):
    def offline(*args, **kwargs):
        raise sources.LocalEntryNotFoundError("no network")

    monkeypatch.setattr(sources, "snapshot_download", offline)
    with pytest.raises(CheckpointError, match="'org/name'.*not in the local hub cache.*offline"):
        load_target("org/name")


def test_only_needed_files_of_a_hub_repository_are_fetched(monkeypatch):
    from huggingface_hub.utils import filter_repo_objects

    offered = ["config.json", "tokenizer.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json"]
    ballast = [
        "pytorch_model.bin",
        "original/consolidated.00.pth",
        "original/config.json",
        "onnx/model.safetensors",
        "x.py",
    ]

    def download(hub_id, *, allow_patterns, ignore_patterns):
        fetched = filter_repo_objects(offered + ballast, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns)
        assert (hub_id, sorted(fetched)) == ("org/name", sorted(offered))
        return str(FIXTURES / "qwen3_b8" / "target")

    monkeypatch.setattr(sources, "snapshot_download", download)
    assert load_target("org/name").source == "org/name"


# Tokenizer, stop tokens, fingerprint


def test_stop_tokens_are_the_union_of_all_places(untied):
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {f"t{i}": i for i in range(10)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="t0")), eos_token="t7", unk_token="t0"
    )
    tokenizer.chat_template = "{{ messages[0].content }}"
    tokenizer.save_pretrained(untied)
    (untied / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 3]}))
    set_config(untied, eos_token_id=3)
    loaded = load_target(untied)
    assert loaded.stop_token_ids == (3, 7, 9)
    assert loaded.tokenizer.convert_ids_to_tokens([5]) == ["t5"]
    assert loaded.tokenizer.chat_template == "{{ messages[0].content }}"
    assert load_target(FIXTURES / "qwen3_b8" / "target").tokenizer is None


def test_the_fingerprint_is_of_the_content_not_of_the_place(untied):
    original = load_target(FIXTURES / "qwen3_b8" / "target").fingerprint
    assert load_target(untied).fingerprint == original
    path = untied / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    assert load_target(untied).fingerprint != original


# The other direction: what transformers loads is what we hold


def test_our_reading_of_a_sharded_folder_is_that_of_transformers(saved, tmp_path):
    from transformers import AutoModelForCausalLM

    shutil.copytree(saved, tmp_path / "copy")
    shard(tmp_path / "copy")
    model = load_target(tmp_path / "copy").model
    theirs = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32).state_dict()
    config = parse_target_config(json.loads((saved / "config.json").read_text()))
    for entry in target_entries(config):
        name = entry.name if entry.path == "head" else f"model.{entry.name}"
        np.testing.assert_array_equal(parameter(model, entry.path)[...], theirs[name].numpy())

"""Drafter folders: import and export are byte-equal, writes are checked, and what can't be represented is refused."""

import json
import shutil
import struct
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from checkpoint_folders import rewrite, same_parameters
from safetensors.numpy import save_file

from dflash_jax.checkpoints import sources
from dflash_jax.checkpoints.drafter_export import export_drafter
from dflash_jax.checkpoints.huggingface import MADE_WITH, load_drafter, load_target, read_made_with
from dflash_jax.checkpoints.safetensors_io import CheckpointError, read_independently, write_safetensors
from dflash_jax.models.family import ConfigError

FIXTURES = Path(__file__).parent / "fixtures"
FIXTURE_NAMES = ("qwen3_b8", "llama3_tied_b10", "qwen3_yarn_b16")


@pytest.fixture
def drafter_folder(tmp_path) -> Path:
    folder = tmp_path / "drafter"
    shutil.copytree(FIXTURES / "qwen3_b8" / "drafter", folder)
    return folder


@pytest.mark.parametrize("name", FIXTURE_NAMES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_import_then_export_is_byte_equal(name, dtype, tmp_path):
    """A warm start of zero steps changes nothing: for tensors stored in this dtype, the whole file is the same."""
    source = tmp_path / "source"
    shutil.copytree(FIXTURES / name / "drafter", source)
    rewrite(source, lambda tensors: {n: t.astype(jnp.dtype(dtype)) for n, t in tensors.items()})
    loaded = load_drafter(source)
    out = export_drafter(loaded.model, loaded.config, tmp_path / "runs" / "exported", dtype=dtype)
    before, after = (dict(read_independently(folder / "model.safetensors")) for folder in (source, out))
    assert before.keys() == after.keys()
    assert all(before[n].dtype == after[n].dtype and before[n].tobytes() == after[n].tobytes() for n in before)
    assert json.loads((out / "config.json").read_text())["dtype"] == dtype
    assert same_parameters(load_drafter(out).model, loaded.model)


def test_an_export_is_read_by_an_independent_reader(tmp_path):
    loaded = load_drafter(FIXTURES / "qwen3_b8" / "drafter")
    out = export_drafter(loaded.model, loaded.config, tmp_path / "out")
    weight_DF = np.asarray(loaded.model.layers[2].mlp.down_proj.weight[...])
    data = (out / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    entry = json.loads(data[8 : 8 + length])["layers.2.mlp.down_proj.weight"]
    begin, end = (8 + length + offset for offset in entry["data_offsets"])
    assert (entry["dtype"], entry["shape"]) == ("F32", list(weight_DF.shape))
    np.testing.assert_array_equal(np.frombuffer(data[begin:end], np.float32).reshape(entry["shape"]), weight_DF)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(12, dtype=np.float32).reshape(3, 4).T,
        np.arange(24, dtype=np.float32)[::2].reshape(3, 4),
        np.arange(12).reshape(3, 4).astype(ml_dtypes.bfloat16).T,
        np.float32(7.0) * np.ones(()),
    ],
    ids=["transposed", "strided", "bfloat16", "scalar"],
)
def test_arrays_of_any_layout_in_memory_are_written_as_their_values(array, tmp_path):
    path = tmp_path / "x.safetensors"
    array = np.asarray(array, dtype=array.dtype if array.dtype != np.float64 else np.float32)
    write_safetensors(path, {"x": array})
    ((name, read),) = read_independently(path)
    assert (name, read.shape, read.dtype) == ("x", array.shape, array.dtype)
    np.testing.assert_array_equal(read, array)


def test_a_bad_write_is_noticed(tmp_path, monkeypatch):
    """Whatever goes wrong below us is seen before the folder exists: here rows come out in another order."""

    def careless(tensors, path, metadata=None):
        save_file({name: tensor[::-1].copy() for name, tensor in tensors.items()}, path)

    monkeypatch.setattr("dflash_jax.checkpoints.safetensors_io.save_file", careless)
    loaded = load_drafter(FIXTURES / "qwen3_b8" / "drafter")
    with pytest.raises(CheckpointError, match="reads back different from what was written"):
        export_drafter(loaded.model, loaded.config, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_export_never_replaces_a_drafter_unasked(tmp_path):
    loaded = load_drafter(FIXTURES / "qwen3_b8" / "drafter")
    out = export_drafter(loaded.model, loaded.config, tmp_path / "out")
    (out / "notes.txt").write_text("mine")
    before = (out / "model.safetensors").read_bytes()
    with pytest.raises(CheckpointError, match=r"already has config.json and model.safetensors.*overwrite"):
        export_drafter(loaded.model, loaded.config, out, dtype="bfloat16")
    assert (out / "model.safetensors").read_bytes() == before
    export_drafter(loaded.model, loaded.config, out, dtype="bfloat16", overwrite=True)
    assert load_drafter(out, dtype=None).model.fc.weight.dtype == jnp.bfloat16
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "model.safetensors", "notes.txt"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_a_mask_embedding_beside_the_weights_is_refused(drafter_folder):
    (drafter_folder / "mask_embedding.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"mask_embedding.pt"):
        load_drafter(drafter_folder)


@pytest.mark.parametrize("name", ["d2t", "lm_head.weight", "embed_tokens.weight"])
def test_tensors_that_a_drafter_does_not_have_are_refused(drafter_folder, name):
    rewrite(drafter_folder, lambda tensors: tensors | {name: np.ones((2, 2), np.float32)})
    with pytest.raises(CheckpointError, match=f"unexpected: {name}"):
        load_drafter(drafter_folder)


def test_a_drafter_of_another_target_is_refused_before_its_weights_are_read(drafter_folder):
    (drafter_folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"layers: .*target of 8 layers.*this target has 6"):
        load_drafter(drafter_folder, target=load_target(FIXTURES / "llama3_tied_b10" / "target"))


def test_a_drafter_of_other_weights_of_the_same_shape_is_told_of(drafter_folder, recwarn):
    target = load_target(FIXTURES / "qwen3_b8" / "target")
    record = {"target": "org/first-version", "target_fingerprint": target.fingerprint}
    (drafter_folder / "training.json").write_text(json.dumps(record))
    load_drafter(drafter_folder, target=target)
    assert not recwarn.list
    (drafter_folder / "training.json").write_text(json.dumps(record | {"target_fingerprint": "0123"}))
    with pytest.warns(UserWarning, match=f"'org/first-version' with fingerprint 0123.*{target.fingerprint}"):
        load_drafter(drafter_folder, target=target)
    load_drafter(drafter_folder)  # without a target there is nothing to compare with
    (drafter_folder / "training.json").write_text("[")
    recwarn.clear()
    load_drafter(drafter_folder, target=target)
    assert not recwarn.list


def test_a_mask_token_that_is_a_stop_token_of_the_target_is_refused(drafter_folder, tmp_path):
    untied = tmp_path / "target"
    shutil.copytree(FIXTURES / "qwen3_b8" / "target", untied)
    (untied / "generation_config.json").write_text(json.dumps({"eos_token_id": 159}))
    with pytest.raises(ConfigError, match="mask_token_id=159 equals stop token 159"):
        load_drafter(drafter_folder, target=load_target(untied))


def test_the_shipped_drafter_loads_and_fits_the_target_it_names():
    loaded = load_drafter(Path(__file__).parent.parent / "configs/drafters/smollm2", dtype=None)
    config = loaded.config
    assert (config.block_size, config.num_target_layers, config.hidden_size, config.vocab_size) == (8, 30, 576, 49152)
    leaves = jax.tree.leaves(loaded.model)
    assert sum(leaf.size for leaf in leaves) == 12_280_704
    assert all(leaf.dtype == jnp.bfloat16 and bool(jnp.isfinite(leaf).all()) for leaf in leaves)


def test_what_a_drafter_of_the_hub_was_made_with_is_read_there(monkeypatch, tmp_path):
    (tmp_path / MADE_WITH).write_text('{"target": "org/target"}')

    def download(hub_id, *, allow_patterns, ignore_patterns):
        assert hub_id == "org/drafter" and MADE_WITH in allow_patterns
        return str(tmp_path)

    monkeypatch.setattr(sources, "snapshot_download", download)
    assert read_made_with("org/drafter") == read_made_with(tmp_path) == {"target": "org/target"}

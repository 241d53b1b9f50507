"""Drafters across frameworks: an export read by a torch module of its own drafts what the JAX drafter drafts."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from safetensors.numpy import load_file
from small_models import randomized
from torch_drafter import TorchDrafter

from dflash_jax.checkpoints.drafter_export import export_drafter
from dflash_jax.checkpoints.huggingface import load_drafter, load_target
from dflash_jax.models.drafter import Drafter

FIXTURES = Path(__file__).parent / "fixtures"
FIXTURE_NAMES = ("qwen3_b8", "llama3_tied_b10", "qwen3_yarn_b16")
TOLERANCE = 1e-4  # float32 sums in another order, through three layers


@pytest.fixture(autouse=True)
def exact_products():
    with jax.default_matmul_precision("highest"):
        yield


@jax.jit
def draft(drafter, target, taps_BTF, anchor, block_BW):
    """The decoding pass, as the loop calls it: absorb the taps of positions < anchor, then read one block.

    The taps of later positions are absorbed too, as after a rejected proposal, and must not be seen.
    """
    B, T = taps_BTF.shape[:2]
    taps_BTMD = taps_BTF.reshape(B, T, -1, target.config.hidden_size)
    positions_BT, anchors_B = jnp.broadcast_to(jnp.arange(T), (B, T)), jnp.broadcast_to(anchor, (B,))
    cache = drafter.absorb(drafter.init_cache(B, T + 8), taps_BTMD, positions_BT, anchors_B)
    hidden_BWD = drafter.block_hidden(target.embed(block_BW), cache, anchors_B)
    return hidden_BWD, target.logits(hidden_BWD)


def draft_with_torch(folder: Path, target, taps_BTF, anchor: int, block_BW):
    twin = TorchDrafter.from_folder(folder)
    embedding, head = (torch.tensor(np.asarray(table)) for table in (target.embedding[...], target.head_VD))
    rows = zip(torch.tensor(np.asarray(taps_BTF)), torch.tensor(np.asarray(block_BW)), strict=True)
    hidden_BWD = torch.stack([twin(taps_TF[:anchor], embedding[block_W]) for taps_TF, block_W in rows])
    return hidden_BWD.numpy(), (hidden_BWD @ head.T).numpy()


@pytest.mark.parametrize("name", FIXTURE_NAMES)
def test_fixture_drafts_and_their_export_read_by_torch(name, tmp_path):
    target = load_target(FIXTURES / name / "target")
    drafter = load_drafter(FIXTURES / name / "drafter", target=target)
    recorded = load_file(FIXTURES / name / "tensors.safetensors")
    taps_BTF, block_BW, anchor = recorded["context_features"], recorded["block_ids"], int(recorded["anchor"].item())
    hidden_BWD, logits_BWV = draft(drafter.model, target.model, taps_BTF, anchor, block_BW)
    np.testing.assert_allclose(hidden_BWD, recorded["draft_hidden"], atol=TOLERANCE)
    np.testing.assert_allclose(logits_BWV, recorded["draft_logits"], atol=TOLERANCE)

    folder = export_drafter(drafter.model, drafter.config, tmp_path / "exported")
    hidden, logits = draft_with_torch(folder, target.model, taps_BTF, anchor, block_BW)
    np.testing.assert_allclose(hidden_BWD, hidden, atol=TOLERANCE)
    np.testing.assert_allclose(logits_BWV, logits, atol=TOLERANCE)


@pytest.mark.parametrize("is_causal", [None, True, False])
def test_random_drafters_with_windows_and_causality_survive_export(is_causal, tmp_path):
    target = load_target(FIXTURES / "qwen3_b8" / "target")
    config = dataclasses.replace(
        load_drafter(FIXTURES / "qwen3_b8" / "drafter").config,
        layer_types=("full_attention", "sliding_attention", "sliding_attention"),
        sliding_window=11,
        is_causal=is_causal,
    )
    drafter = randomized(Drafter(config, rngs=nnx.Rngs(0)))
    random = np.random.default_rng(4)
    taps_BTF = random.standard_normal((2, 30, 3 * config.hidden_size), dtype=np.float32)
    block_BW = random.integers(0, config.vocab_size, (2, config.block_size))
    folder = export_drafter(drafter, config, tmp_path / "exported")
    hidden, logits = draft_with_torch(folder, target.model, taps_BTF, 19, block_BW)
    reread = load_drafter(folder, target=target)
    for model in (drafter, reread.model):
        hidden_BWD, logits_BWV = draft(model, target.model, taps_BTF, 19, block_BW)
        np.testing.assert_allclose(hidden_BWD, hidden, atol=TOLERANCE)
        np.testing.assert_allclose(logits_BWV, logits, atol=TOLERANCE)

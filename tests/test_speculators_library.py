"""Drafters across projects: the speculators library reads our exports, we read its files, and both draft the same."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import speculators_library
from checkpoint_folders import same_parameters
from flax import nnx
from safetensors.numpy import load_file
from small_models import randomized

from dflash_jax.checkpoints.drafter_export import export_drafter
from dflash_jax.checkpoints.huggingface import LoadedDrafter, LoadedTarget, load_drafter, load_target
from dflash_jax.models.drafter import Drafter
from dflash_jax.models.family import ConfigError, drafter_config_to_dict

speculators = speculators_library.import_speculators()
pytestmark = pytest.mark.long

FIXTURES = Path(__file__).parent / "fixtures"
TOLERANCE = 1e-4  # float32 sums in another order, through three layers
ANCHORS = [1, 8, 21]
FULL, SLIDING = "full_attention", "sliding_attention"
# the fixture, and what is changed in its drafter; no window is left by a block here
DRAFTERS = {
    "untied": ("qwen3_b8", {}),
    "tied": ("llama3_tied_b10", {"tie_word_embeddings": True}),
    "yarn": ("qwen3_yarn_b16", {}),
    "causal": ("qwen3_b8", {"layer_types": (SLIDING,) * 3, "sliding_window": 64, "is_causal": True}),
    "sliding": ("qwen3_b8", {"layer_types": (SLIDING,) * 3, "sliding_window": 64, "is_causal": False}),
    "mixed": ("qwen3_b8", {"layer_types": (SLIDING, FULL, FULL), "sliding_window": 64, "is_causal": False}),
}


@pytest.fixture(autouse=True)
def exact_products():
    with jax.default_matmul_precision("highest"):
        yield


@dataclasses.dataclass(frozen=True)
class Case:
    """A target, a drafter for it with random norms, and a sequence with its taps."""

    folder: Path
    target: LoadedTarget
    drafter: Drafter
    taps_TF: np.ndarray
    tokens_T: np.ndarray

    @property
    def config(self):
        return self.drafter.config


def make_case(name: str, **fields) -> Case:
    folder = FIXTURES / name
    config = dataclasses.replace(load_drafter(folder / "drafter").config, **fields)
    recorded = load_file(folder / "tensors.safetensors")
    taps_TF, tokens_T = recorded["context_features"][0], recorded["input_ids"][0]
    drafter = randomized(Drafter(config, rngs=nnx.Rngs(0)))
    return Case(folder / "target", load_target(folder / "target"), drafter, taps_TF, tokens_T)


def exported(case: Case, folder: Path) -> Path:
    """An export in the library's layout."""
    verifier = str(case.folder)
    return export_drafter(case.drafter, case.config, folder / "out", layout="speculators", verifier=verifier)


@jax.jit
def draft(drafter, target, taps_TF, tokens_T, anchors_A):
    """Final hidden states [A, W, D] and logits [A, W, V] of one block an anchor, each a row that is being decoded."""
    A, T, c = len(anchors_A), len(tokens_T), drafter.config
    taps_BTMD = jnp.broadcast_to(taps_TF.reshape(T, -1, c.hidden_size), (A, T, len(c.target_layer_ids), c.hidden_size))
    cache = drafter.init_cache(A, T)
    cache = drafter.absorb(cache, taps_BTMD, jnp.broadcast_to(jnp.arange(T), (A, T)), anchors_A)
    block_AW = jnp.full((A, c.block_size), c.mask_token_id).at[:, 0].set(tokens_T[anchors_A])
    hidden_AWD = drafter.block_hidden(target.embed(block_AW), cache, anchors_A)
    return hidden_AWD, target.logits(hidden_AWD)


def difference(case: Case, drafter: Drafter, theirs) -> np.ndarray:
    """The largest difference of hidden states and logits between the drafter and theirs, of each block. [A]"""
    ours = draft(drafter, case.target.model, case.taps_TF, case.tokens_T, jnp.array(ANCHORS))
    there = speculators_library.draft(theirs, case.taps_TF, case.tokens_T, ANCHORS)
    return np.max([np.abs(a - b).max(axis=(1, 2)) for a, b in zip(ours, there, strict=True)], axis=0)


def assert_tensors_are_those_of_the_file(model, folder: Path) -> None:
    """And no other parameter of the model is the drafter's: the rest are tables of the target."""
    state, stored = model.state_dict(), load_file(folder / "model.safetensors")
    for name, tensor in stored.items():
        assert tensor.shape == tuple(state[name].shape) and np.array_equal(tensor, state[name].numpy())
    tables = {"embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight", "verifier_norm.weight"}
    assert set(state) - set(stored) == tables


@pytest.mark.parametrize("name", DRAFTERS)
def test_the_library_reads_an_export(name, tmp_path):
    fixture, fields = DRAFTERS[name]
    case = make_case(fixture, **fields)
    folder = exported(case, tmp_path)
    theirs = speculators_library.load(folder)
    assert type(theirs) is speculators.DFlashDraftModel
    assert_tensors_are_those_of_the_file(theirs, folder)
    assert_says_the_same(theirs.config, case)
    assert difference(case, case.drafter, theirs).max() < TOLERANCE


def assert_says_the_same(theirs, case: Case) -> None:
    decoder, ours = theirs.transformer_layer_config, drafter_config_to_dict(case.config)
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    names += ("head_dim", "vocab_size", "rms_norm_eps", "layer_types", "sliding_window", "max_position_embeddings")
    names += ("rope_parameters", "attention_bias", "hidden_act", "tie_word_embeddings", "use_sliding_window")
    for field in names:
        assert getattr(decoder, field) == ours[field], field
    assert theirs.aux_hidden_state_layer_ids == [layer + 1 for layer in case.config.target_layer_ids]
    assert (theirs.block_size, theirs.mask_token_id) == (case.config.block_size, case.config.mask_token_id)
    assert theirs.draft_vocab_size == theirs.target_vocab_size and not theirs.sample_from_anchor
    (proposals,) = theirs.speculators_config.proposal_methods
    assert proposals.speculative_tokens == case.config.block_size - 1
    assert theirs.speculators_config.verifier.name_or_path == str(case.folder)


def converted(case: Case, folder: Path) -> Path:
    """An export in the z-lab layout, made over by the library's converter."""
    from speculators.convert.dflash.converter import DFlashConverter

    plain = export_drafter(case.drafter, case.config, folder / "plain")
    DFlashConverter().convert(plain, folder / "converted", base_model=str(case.folder), validate=True)
    return folder / "converted"


@pytest.mark.parametrize("name", ["untied", "tied", "yarn"])
def test_the_librarys_converter_takes_an_export_in_the_other_layout(name, tmp_path):
    fixture, fields = DRAFTERS[name]
    case = make_case(fixture, **fields)
    folder = converted(case, tmp_path)
    theirs = speculators_library.load(folder)
    assert_tensors_are_those_of_the_file(theirs, folder)
    assert_says_the_same(theirs.config, case)
    again = load_drafter(folder, target=case.target)
    assert drafter_config_to_dict(again.config) == drafter_config_to_dict(case.config)
    assert same_parameters(again.model, case.drafter)
    assert difference(case, again.model, theirs).max() < TOLERANCE


def test_a_switch_that_the_converter_drops_is_not_read_past(tmp_path):
    """Its file says is_causal in a place where the library doesn't look and vLLM does."""
    fixture, fields = DRAFTERS["sliding"]
    with pytest.raises(ConfigError, match="is_causal False contradicts sliding_window_non_causal False"):
        load_drafter(converted(make_case(fixture, **fields), tmp_path))


def saved_by_the_library(case: Case, folder: Path, *, non_causal: bool, ids=None, **fields) -> Path:
    """A drafter that the library describes, makes and saves, for these tokens, ascending, or for all."""
    import torch
    from transformers import Qwen3Config

    plain = drafter_config_to_dict(case.config)
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim")
    names += ("num_key_value_heads", "rms_norm_eps", "rope_parameters")
    decoder = Qwen3Config(**{field: plain[field] for field in names}, **fields)
    method = speculators.TokenProposalConfig.registry["greedy"](speculative_tokens=case.config.block_size - 1)
    config = speculators.DFlashSpeculatorConfig(
        transformer_layer_config=decoder,
        draft_vocab_size=case.config.vocab_size if ids is None else len(ids),
        block_size=case.config.block_size,
        aux_hidden_state_layer_ids=[layer + 1 for layer in case.config.target_layer_ids],
        mask_token_id=case.config.mask_token_id,
        sliding_window_non_causal=non_causal,
        speculators_config=speculators.SpeculatorsConfig(
            algorithm="dflash",
            proposal_methods=[method],
            default_proposal_method="greedy",
            verifier=speculators.VerifierConfig.from_pretrained(str(case.folder)),
        ),
    )
    model = speculators.DFlashDraftModel(config)
    if ids is not None:
        used = torch.zeros(case.config.vocab_size, dtype=torch.bool)
        used[ids] = True
        model.load_vocab_mappings(used, torch.tensor(ids) - torch.arange(len(ids)))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * noise if name.endswith("norm.weight") else 0.1 * noise)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("fixture", "layer_types", "non_causal", "causal"),
    [
        ("qwen3_b8", (FULL,) * 3, False, (False,) * 3),
        ("qwen3_yarn_b16", (FULL,) * 2, False, (False,) * 2),
        ("llama3_tied_b10", (SLIDING,) * 2, False, (True,) * 2),
        ("llama3_tied_b10", (SLIDING,) * 2, True, (False,) * 2),
        ("qwen3_b8", (FULL, SLIDING, SLIDING), False, (False, True, True)),
    ],
)
def test_a_drafter_that_the_library_saved_loads_here(fixture, layer_types, non_causal, causal, tmp_path):
    case = make_case(fixture)
    slides = {"layer_types": list(layer_types), "sliding_window": 64, "use_sliding_window": True}
    fields = slides if SLIDING in layer_types else {}
    folder = saved_by_the_library(case, tmp_path / "saved", non_causal=non_causal, **fields)
    loaded: LoadedDrafter = load_drafter(folder, target=case.target)
    assert loaded.config.layer_types == layer_types
    assert tuple(loaded.config.layer_is_causal(layer) for layer in range(len(layer_types))) == causal
    assert (loaded.config.rope, loaded.config.head_dim) == (case.config.rope, case.config.head_dim)
    assert loaded.config.num_target_layers == case.config.num_target_layers
    theirs = speculators_library.load(folder)
    assert_tensors_are_those_of_the_file(theirs, folder)
    assert difference(case, loaded.model, theirs).max() < TOLERANCE


IDS = [2, 3, 17, 40, 41, 99]


@pytest.mark.parametrize("name", ["untied", "tied"])
def test_the_library_proposes_from_the_vocabulary_of_an_export(name, tmp_path):
    """Its head is of our rows, and its tables lead to our tokens."""
    fixture, fields = DRAFTERS[name]
    case = make_case(fixture, **fields)
    ours = LoadedDrafter(case.drafter, case.config, "").restricted(case.target, np.array(IDS, np.int32))
    folder = export_drafter(ours.model, case.config, tmp_path, layout="speculators", verifier=str(case.folder))
    theirs = speculators_library.load(folder)
    assert (theirs.d2t + np.arange(len(IDS))).tolist() == IDS == np.flatnonzero(theirs.t2d).tolist()
    assert_proposes_as(theirs, case, ours)


def test_a_vocabulary_that_the_library_saved_loads_here(tmp_path):
    """With a head that is not the target's, as one that was trained would be."""
    case = make_case("qwen3_b8")
    folder = saved_by_the_library(case, tmp_path / "saved", non_causal=False, ids=IDS)
    loaded = load_drafter(folder, target=case.target)
    assert loaded.model.has_own_head and loaded.model.token_ids[...].tolist() == IDS
    assert_proposes_as(speculators_library.load(folder), case, loaded)


def assert_proposes_as(theirs, case: Case, ours: LoadedDrafter) -> None:
    """Logits [A, W, U] of both, over the draft vocabulary."""
    hidden_AWD, _ = draft(ours.model.drafter, case.target.model, case.taps_TF, case.tokens_T, jnp.array(ANCHORS))
    logits_AWU = hidden_AWD @ ours.model.head[...].T
    _, there_AWU = speculators_library.draft(theirs, case.taps_TF, case.tokens_T, ANCHORS)
    assert logits_AWU.shape[-1] == len(IDS)
    np.testing.assert_allclose(logits_AWU, there_AWU, atol=TOLERANCE)


def test_a_window_counts_from_the_slot_here_and_from_the_anchor_there(monkeypatch, tmp_path):
    """vLLM and SGLang count from the slot, as Hugging Face does; nothing else in the two passes differs."""
    window = 16  # of which the last anchor's block can't see the whole context
    assert max(ANCHORS[:2]) + 8 <= window < ANCHORS[2]
    case = make_case("qwen3_b8", layer_types=(SLIDING,) * 3, sliding_window=window, is_causal=True)
    theirs = speculators_library.load(exported(case, tmp_path))
    first, second, last = difference(case, case.drafter, theirs)
    assert max(first, second) < TOLERANCE < 0.01 < last
    speculators_library.count_windows_from_the_slot(monkeypatch)
    assert difference(case, case.drafter, theirs).max() < TOLERANCE


def test_blocks_of_packed_documents(tmp_path):
    """Training on packed documents: context, positions and blocks stay inside their own."""
    case = make_case("qwen3_yarn_b16")
    folder = exported(case, tmp_path)
    T, start = len(case.tokens_T), 12
    anchors, starts = [7, 14, 22], [0, start, start]
    document_T, position_T = np.arange(T) >= start, np.arange(T) - start * (np.arange(T) >= start)
    hidden_AWD, _ = speculators_library.draft(
        speculators_library.load(folder), case.taps_TF, case.tokens_T, anchors, document_T.astype(int), position_T
    )
    tokens_AW = np.full((3, case.config.block_size), case.config.mask_token_id)
    tokens_AW[:, 0] = case.tokens_T[anchors]
    embedded_BAWD = case.target.model.embed(tokens_AW)[None]
    taps_BTMD = case.taps_TF.reshape(1, T, -1, case.config.hidden_size)
    rest = (jnp.array([starts]), jnp.array([anchors]), jnp.array([position_T]))
    ours_BAWD = packed(case.drafter, embedded_BAWD, taps_BTMD, *rest)
    np.testing.assert_allclose(ours_BAWD[0], hidden_AWD, atol=TOLERANCE)


@jax.jit
def packed(drafter, embedded_BAWD, taps_BTMD, starts_BA, anchors_BA, positions_BT):
    """Final hidden states [B, A, W, D] by the pass of training."""
    context_BTD = drafter.fuse(taps_BTMD)
    return drafter.packed(embedded_BAWD, context_BTD, starts_BA, anchors_BA, positions_BT=positions_BT)

"""The speculators library on a CPU: imported without the packages that only its data pipeline needs, and called."""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

# It imports them with its models, and calls them only to read data sets and to ask servers for hidden states.
_OF_THE_DATA_PIPELINE = ("datasets", "hs_connectors", "openai", "openai.types", "openai.types.chat")
_OF_THE_DATA_PIPELINE += ("openai.types.completion",)


class _Placeholder(ModuleType):
    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def import_speculators() -> ModuleType:
    """The library; skips where it is not installed."""
    if importlib.util.find_spec("speculators") is None:
        pytest.skip("speculators is not installed: pip install --no-deps speculators", allow_module_level=True)
    absent = [name for name in _OF_THE_DATA_PIPELINE if importlib.util.find_spec(name.partition(".")[0]) is None]
    with pytest.MonkeyPatch.context() as patch:
        for name in absent:
            patch.setitem(sys.modules, name, _Placeholder(name))
        for name in ("speculators", "speculators.convert.dflash.converter", "speculators.models.dflash.core"):
            importlib.import_module(name)
    return sys.modules["speculators"]


def load(folder: Path):
    """The drafter in a folder, by the library's own classes, in float32, with the tables of the target it names."""
    speculators = sys.modules["speculators"]
    config = speculators.SpeculatorModelConfig.from_pretrained(folder)
    # The default builds its masks with a compiler.
    config.transformer_layer_config._attn_implementation = "eager"
    return speculators.SpeculatorModel.from_pretrained(folder, config=config, dtype=torch.float32).eval()


@torch.no_grad()
def draft(model, taps_TF: np.ndarray, tokens_T: np.ndarray, anchors_A: list[int], documents_T=None, positions_T=None):
    """Final hidden states [A, W, D] and logits [A, W, V] of one block an anchor, by the library's training pass.

    It draws anchors among the positions with loss and sorts them, so loss stands at the anchors alone. None may stand
    in the last W positions.
    """
    (T,) = tokens_T.shape
    loss_mask = torch.zeros(1, T)
    loss_mask[0, anchors_A] = 1
    documents_T = np.zeros(T, int) if documents_T is None else documents_T
    hidden, logits, *_, index = model._backbone_forward(
        torch.tensor(taps_TF)[None],
        torch.tensor(tokens_T)[None],
        loss_mask,
        torch.zeros(1, T, taps_TF.shape[1] // len(model.target_layer_ids)),
        torch.tensor(documents_T)[None],
        None if positions_T is None else torch.tensor(positions_T)[None],
        max_anchors=len(anchors_A),
    )
    A, W = len(anchors_A), model.block_size
    assert index.view(A, W)[:, 0].tolist() == anchors_A
    return hidden.view(A, W, -1).numpy(), logits.view(A, W, -1).numpy()


def count_windows_from_the_slot(patch: pytest.MonkeyPatch) -> None:
    """Has the library's masks count a sliding window from each slot instead of from the anchor of its block."""
    from torch.nn.attention.flex_attention import and_masks

    core = sys.modules["speculators.models.dflash.core"]
    original = core.create_anchor_block_mask_mod

    def create(document_ids, total_seq_len, anchor_positions, block_size, sliding_window=None, **causality):
        endless = None if sliding_window is None else 2**30
        mask, *lengths = original(
            document_ids, total_seq_len, anchor_positions, block_size, sliding_window=endless, **causality
        )

        def position(slot):
            return anchor_positions[slot // block_size] + slot % block_size

        def near(_b, _h, query, key):
            at_key = torch.where(key < total_seq_len, key, position((key - total_seq_len).clamp(min=0)))
            return position(query) - at_key < sliding_window

        return (mask if sliding_window is None else and_masks(mask, near), *lengths)

    patch.setattr(core, "create_anchor_block_mask_mod", create)

"""The one place that knows tensor names: Hugging Face names ↔ attribute paths of Target and Drafter.

A name and a path may hold {i}, the layer. Tensors have the same layout in files and modules.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from dflash_jax.models.family import DrafterConfig, TargetConfig


@dataclass(frozen=True)
class Entry:
    """One tensor: its name in a file, and the attribute path of its parameter."""

    name: str
    path: str


def _linear(name: str, path: str, *, bias: bool = False) -> tuple[Entry, ...]:
    weight = Entry(f"{name}.weight", f"{path}.weight")
    return (weight, Entry(f"{name}.bias", f"{path}.bias")) if bias else (weight,)


def _norm(name: str, path: str) -> Entry:
    return Entry(f"{name}.weight", f"{path}.scale")


def _layer(*, qkv_bias: bool, o_bias: bool, mlp_bias: bool, qk_norm: bool) -> tuple[Entry, ...]:
    """The entries of one decoder layer, named alike in every family and in drafters."""
    entries = [
        _norm("layers.{i}.input_layernorm", "layers.{i}.input_norm"),
        _norm("layers.{i}.post_attention_layernorm", "layers.{i}.post_attention_norm"),
    ]
    for part in ("q_proj", "k_proj", "v_proj", "o_proj"):
        bias = o_bias if part == "o_proj" else qkv_bias
        entries += _linear("layers.{i}.self_attn." + part, "layers.{i}.attention." + part, bias=bias)
    if qk_norm:
        entries += [_norm("layers.{i}.self_attn." + p, "layers.{i}.attention." + p) for p in ("q_norm", "k_norm")]
    for part in ("gate_proj", "up_proj", "down_proj"):
        entries += _linear("layers.{i}.mlp." + part, "layers.{i}.mlp." + part, bias=mlp_bias)
    return tuple(entries)


TARGET_BODY = (Entry("embed_tokens.weight", "embedding"), _norm("norm", "norm"))
TARGET_HEAD = Entry("lm_head.weight", "head")
DRAFTER_BODY = (*_linear("fc", "fc"), _norm("hidden_norm", "hidden_norm"), _norm("norm", "norm"))

# (body prefix, head prefix): plain models, bare backbones, and the language part of a larger model as it is saved
# by transformers 4, by transformers 5, and by extraction
TARGET_PREFIXES = (
    ("model.", ""),
    ("", ""),
    ("language_model.model.", "language_model."),
    ("model.language_model.", ""),
    ("model.language_model.model.", "model.language_model."),
    ("model.model.", "model."),
)

# rotary buffers of old files: derived from the config, never parameters
IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)


def target_entries(config: TargetConfig) -> tuple[Entry, ...]:
    """All tensors of a target, without prefix; the head only where it is not the embedding."""
    layer = _layer(qkv_bias=config.qkv_bias, o_bias=config.o_bias, mlp_bias=config.mlp_bias, qk_norm=config.qk_norm)
    head = () if config.tie_word_embeddings else (TARGET_HEAD,)
    return (*TARGET_BODY, *_expand(layer, config.num_layers), *head)


def drafter_entries(config: DrafterConfig) -> tuple[Entry, ...]:
    """All tensors of a drafter; its files have no prefix, embedding or head."""
    layer = _layer(qkv_bias=False, o_bias=False, mlp_bias=False, qk_norm=True)
    return (*DRAFTER_BODY, *_expand(layer, config.num_layers))


def prefixed_target_entries(config: TargetConfig, available: Collection[str]) -> tuple[tuple[Entry, ...], str]:
    """The entries under the prefix that this checkpoint uses.

    Args:
        config: the target.
        available: all tensor names of the checkpoint.

    Returns:
        The entries with full names, and the full name that the LM head has under this prefix, tied or not. Without
        any embedding in the checkpoint, the names of plain models, so that what is missing is named as users know it.
    """
    embedding = TARGET_BODY[0].name
    found = (pair for pair in TARGET_PREFIXES if pair[0] + embedding in available)
    body_prefix, head_prefix = next(found, TARGET_PREFIXES[0])
    if head_prefix + TARGET_HEAD.name not in available and body_prefix + TARGET_HEAD.name in available:
        head_prefix = body_prefix
    head = replace(TARGET_HEAD, name=head_prefix + TARGET_HEAD.name)
    entries = tuple(
        head if entry is TARGET_HEAD else replace(entry, name=body_prefix + entry.name)
        for entry in target_entries(config)
    )
    return entries, head.name


def table_entries(config: TargetConfig, available: Collection[str]) -> tuple[Entry, ...]:
    """The entries of embedding and head alone; arguments as for `prefixed_target_entries`."""
    entries, _ = prefixed_target_entries(config, available)
    return tuple(entry for entry in entries if entry.path in (TARGET_BODY[0].path, TARGET_HEAD.path))


def _expand(layer: Iterable[Entry], num_layers: int) -> tuple[Entry, ...]:
    layer = tuple(layer)
    return tuple(
        replace(entry, name=entry.name.format(i=i), path=entry.path.format(i=i))
        for i in range(num_layers)
        for entry in layer
    )

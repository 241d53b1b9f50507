"""Loading targets and drafters from Hugging Face folders."""

from __future__ import annotations

import contextlib
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from dflash_jax.checkpoints.draft_vocabulary import (
    DRAFT_VOCABULARY,
    VOCABULARY_TENSORS,
    read_draft_vocabulary,
    read_vocabulary_tensors,
)
from dflash_jax.checkpoints.names import drafter_entries, prefixed_target_entries, table_entries
from dflash_jax.checkpoints.safetensors_io import (
    CheckpointError,
    TensorFolder,
    fingerprint,
    read_json,
)
from dflash_jax.checkpoints.sources import TEXT_FILES, WEIGHT_FILES, resolve_source
from dflash_jax.checkpoints.weights import check_dtype, fill
from dflash_jax.models.draft_vocabulary import RestrictedDrafter, unrestricted
from dflash_jax.models.drafter import Drafter
from dflash_jax.models.family import (
    DrafterConfig,
    TargetConfig,
    check_drafter_matches_target,
    check_mask_token_id,
    parse_drafter_config,
    parse_target_config,
    reduced_vocabulary,
)
from dflash_jax.models.target import Target, TargetTables

if TYPE_CHECKING:  # importing it takes a second, and prints advice where a command has not silenced it yet
    from transformers import PreTrainedTokenizerFast

MADE_WITH = "training.json"  # beside an exported drafter: what it was trained for and on
_OUR_FILES = (MADE_WITH, DRAFT_VOCABULARY)  # which other readers ignore

# fetched only so that its presence can be refused; never opened
_MASK_EMBEDDING_FILE = "mask_embedding.pt"


@dataclass(frozen=True)
class LoadedTarget:
    """A target ready to run.

    Attributes:
        model, config: the parameters and their description.
        tokenizer: the folder's tokenizer, or None when it has no tokenizer.json.
        stop_token_ids: ascending union of what generation config, config.json and tokenizer call end of sequence.
        source: what was asked for.
        fingerprint: tells checkpoints apart; the same for the same files wherever they lie.
    """

    model: Target
    config: TargetConfig
    tokenizer: PreTrainedTokenizerFast | None
    stop_token_ids: tuple[int, ...]
    source: str
    fingerprint: str

    @property
    def has_layers(self) -> bool:
        """Whether the model can run; `load_target_tables` gives one that can't."""
        return type(self.model) is not TargetTables


@dataclass(frozen=True)
class LoadedDrafter:
    """A drafter ready to run: parameters, their description, and what was asked for."""

    model: Drafter | RestrictedDrafter
    config: DrafterConfig
    source: str

    @property
    def draft_vocab_size(self) -> int | None:
        """How many tokens it proposes; None: any of the target's."""
        return self.model.token_ids.shape[0] if isinstance(self.model, RestrictedDrafter) else None

    def restricted(
        self, target: LoadedTarget, token_ids_U: np.ndarray | None, head_UD: np.ndarray | None = None
    ) -> LoadedDrafter:
        """The same drafter, proposing only these tokens of the target, int32 [U]; None: any. head_UD and errors as for
        RestrictedDrafter."""
        model = unrestricted(self.model)
        return replace(
            self, model=model if token_ids_U is None else RestrictedDrafter(model, target.model, token_ids_U, head_UD)
        )


def read_target_config(source: str | Path) -> TargetConfig:
    """The description of a target, without its weights; source and errors as for `load_target`."""
    return parse_target_config(read_json(resolve_source(source, files=("config.json",)) / "config.json"))


def read_drafter_config(source: str | Path, target: TargetConfig) -> DrafterConfig:
    """The description of a drafter, checked against that of its target, without its weights; source and errors as for
    `load_drafter`."""
    folder = resolve_source(source, files=("config.json",), kind="drafter")
    config = parse_drafter_config(read_json(folder / "config.json"), num_target_layers=target.num_layers)
    check_drafter_matches_target(config, target)
    return config


def load_target(source: str | Path, *, dtype: str | None = "float32", mesh: Mesh | None = None) -> LoadedTarget:
    """Loads a target.

    Args:
        source: a Hugging Face folder, a hub id "org/name", or "smollm2-135m-instruct" (the quickstart's target).
        dtype: "float32", "bfloat16" or "float16"; None keeps the dtypes of the files.
        mesh: the devices to divide the parameters over (sharding.make_mesh); None: one device. No host ever holds more
            of the files than a tensor at a time.

    Returns:
        The target with its tokenizer and stop tokens.

    Raises:
        ConfigError: the model is of a kind that is not supported; the message lists what is.
        CheckpointError: the source can't be found, or its files are incomplete or don't fit its config.json.
    """
    check_dtype(dtype)
    outline, folder = _outline(source)
    with TensorFolder(folder) as tensors:
        _fill_target(outline, tensors, dtype, mesh)
    return replace(outline, fingerprint=fingerprint(folder))


def outline_target(source: str | Path) -> LoadedTarget:
    """A target whose parameters are shapes: all that `load_target` gives, without loading weights."""
    outline, folder = _outline(source)
    return replace(outline, fingerprint=fingerprint(folder))


def load_target_tables(source: str | Path, *, dtype: str | None = "float32", mesh: Mesh | None = None) -> LoadedTarget:
    """A target of which only embedding and head are loaded, as a TargetTables; the other weights need not be there.

    Arguments and errors as for `load_target`. The fingerprint is "", since it covers all weights; see
    target_files.tables_hash.
    """
    check_dtype(dtype)
    outline, folder = _outline(source)
    tables: Any = nnx.eval_shape(lambda: TargetTables(outline.config, rngs=nnx.Rngs(0)))
    with TensorFolder(folder) as tensors:
        fill(
            tables,
            table_entries(outline.config, tensors.names),
            tensors,
            dtype=dtype,
            expected=tensors.names,
            mesh=mesh,
        )
    return replace(outline, model=tables)


def load_drafter(
    source: str | Path,
    *,
    target: LoadedTarget | None = None,
    dtype: str | None = "float32",
    mesh: Mesh | None = None,
    draft_vocabulary: bool = True,
) -> LoadedDrafter:
    """Loads a drafter in the z-lab or the speculators layout.

    Args:
        source: a folder or a hub id "org/name".
        target: the target that it will draft for; given, the two are checked against each other before any weight is
            read.
        dtype: "float32", "bfloat16" or "float16"; None keeps the dtypes of the files.
        mesh: as for `load_target`; the same as the target's.
        draft_vocabulary: whether it proposes only the tokens that its files list, if they list any: in
            draft_vocabulary.json, or in tensors of the speculators layout. Without a target it proposes any, as that
            takes rows of its head.

    Raises:
        ConfigError: not a drafter that can be represented, or not one for this target.
        ValueError: it has a draft vocabulary, and the target is an outline, which has no rows to take.
        CheckpointError: the source can't be found, or its files are incomplete or don't fit its config.json.
    """
    check_dtype(dtype)
    folder = resolve_source(source, files=(*WEIGHT_FILES, *_OUR_FILES, _MASK_EMBEDDING_FILE), kind="drafter")
    layers = None if target is None else target.config.num_layers
    raw_config = read_json(folder / "config.json")
    config, size = parse_drafter_config(raw_config, num_target_layers=layers), reduced_vocabulary(raw_config)
    if (folder / _MASK_EMBEDDING_FILE).exists():
        raise CheckpointError(
            f"{folder} has {_MASK_EMBEDDING_FILE}: a drafter with its own mask embedding is not supported, "
            "here the mask token is embedded by the target"
        )
    if target is not None:
        check_drafter_matches_target(config, target.config)
        check_mask_token_id(config.mask_token_id, target.config.vocab_size, special_token_ids(target))
        with contextlib.suppress(CheckpointError):  # a damaged record costs the warning, not the drafter
            _warn_of_other_weights(str(source), read_made_with(folder), target)
    vocabulary = ()  # token ids and, in the speculators layout, rows of a head
    restricts = draft_vocabulary and target is not None
    if restricts and size is None:  # before any weight is read: a damaged one is told at once
        vocabulary = (read_draft_vocabulary(folder, config.vocab_size),)
    if target is not None and draft_vocabulary and (size is not None or any(ids is not None for ids in vocabulary)):
        _check_has_head(target, source)
    with TensorFolder(folder) as tensors:
        if restricts and size is not None:
            vocabulary = read_vocabulary_tensors(tensors, size, config.vocab_size, config.hidden_size)
        model = nnx.eval_shape(lambda: Drafter(config, rngs=nnx.Rngs(0)))
        expected = () if size is None else VOCABULARY_TENSORS
        fill(model, drafter_entries(config), tensors, dtype=dtype, expected=expected, mesh=mesh)
    drafter = LoadedDrafter(model=model, config=config, source=str(source))
    return drafter if target is None or not vocabulary else drafter.restricted(target, *vocabulary)


def _check_has_head(target: LoadedTarget, source: str | Path) -> None:
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(target.model)):
        raise ValueError(
            f"drafter {source} has a draft vocabulary, whose rows are those of the target's head, and target "
            f"{target.source} has no weights (outline_target): load it with load_target or load_target_tables, or the "
            "drafter with draft_vocabulary=False"
        )


def read_made_with(source: str | Path) -> dict[str, Any]:
    """What a drafter (a folder or a hub id) was trained for and on, as training records it; empty where it isn't said.

    Raises:
        CheckpointError: the record is damaged, or the source can't be found.
    """
    path = resolve_source(source, files=_OUR_FILES, kind="drafter") / MADE_WITH
    return read_json(path) if path.is_file() else {}


def _warn_of_other_weights(source: str, made_with: dict[str, Any], target: LoadedTarget) -> None:
    theirs = made_with.get("target_fingerprint")
    if theirs and target.fingerprint and theirs != target.fingerprint:
        warnings.warn(
            f"drafter {source} was trained for {made_with.get('target')!r} with fingerprint {theirs}, and "
            f"{target.source!r} has {target.fingerprint}: if its weights are others, proposals may be refused more "
            "often; the text stays the target's own",
            stacklevel=3,
        )


def special_token_ids(target: LoadedTarget) -> dict[str, int | None]:
    """Ids with a meaning of their own, by name, that a mask token must not share."""
    ids: dict[str, int | None] = {f"stop token {i}": i for i in target.stop_token_ids}
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        ids[name] = getattr(target.tokenizer, name, None)
    return ids


def _outline(source: str | Path) -> tuple[LoadedTarget, Path]:
    """A target of shapes, without a fingerprint, and the folder that it lies in."""
    folder = resolve_source(source, files=(*WEIGHT_FILES, *TEXT_FILES))
    raw_config = read_json(folder / "config.json")
    config = parse_target_config(raw_config)
    model = nnx.eval_shape(lambda: Target(config, rngs=nnx.Rngs(0)))
    tokenizer = load_tokenizer(folder)
    stop_token_ids = stop_token_ids_of(folder, raw_config, tokenizer)
    return LoadedTarget(model, config, tokenizer, stop_token_ids, str(source), ""), folder


def _fill_target(outline: LoadedTarget, tensors: TensorFolder, dtype: str | None, mesh: Mesh | None) -> None:
    """Puts arrays where the outline has shapes."""
    entries, head_name = prefixed_target_entries(outline.config, tensors.names)
    fill(outline.model, entries, tensors, dtype=dtype, expected=[head_name], mesh=mesh)
    if outline.config.tie_word_embeddings and head_name in tensors.names:
        embedding_name = next(entry.name for entry in entries if entry.path == "embedding")
        if not np.array_equal(tensors.read(head_name), tensors.read(embedding_name)):
            raise CheckpointError(
                f"{tensors.folder}: config.json sets tie_word_embeddings, but {head_name} differs from "
                f"{embedding_name}; set tie_word_embeddings to false if the head is its own"
            )


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast | None:
    """The tokenizer of a checkpoint folder, or None when it has no tokenizer.json."""
    if not (folder / "tokenizer.json").exists():
        return None
    from transformers import PreTrainedTokenizerFast

    # the class that takes tokenizer.json as it is; family classes of transformers 5 rebuild parts of it
    return PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)


def stop_token_ids_of(folder: Path, raw_config: dict, tokenizer: PreTrainedTokenizerFast | None) -> tuple[int, ...]:
    """Ascending union of what generation config, config.json and tokenizer call end of sequence."""
    generation = folder / "generation_config.json"
    sources = {
        "generation_config.json": read_json(generation).get("eos_token_id") if generation.exists() else None,
        "config.json": raw_config.get("eos_token_id"),
        "the tokenizer": None if tokenizer is None else tokenizer.eos_token_id,
    }
    ids: set[int] = set()
    for place, value in sources.items():
        listed = value if isinstance(value, list) else [] if value is None else [value]
        if any(isinstance(item, bool) or not isinstance(item, int) for item in listed):
            raise CheckpointError(f"eos_token_id in {place} must be an integer or a list of them, got {value!r}")
        ids.update(listed)
    return tuple(sorted(ids))

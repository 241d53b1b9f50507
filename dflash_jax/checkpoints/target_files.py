"""What making data needs to know of a target: tokenizer, embedding's size, fingerprint …; no weight is loaded."""

from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from dflash_jax.checkpoints.huggingface import load_tokenizer, stop_token_ids_of
from dflash_jax.checkpoints.safetensors_io import CheckpointError, fingerprint, read_json
from dflash_jax.checkpoints.sources import TEXT_FILES, WEIGHT_FILES, resolve_source
from dflash_jax.models.family import parse_target_config


@dataclass(frozen=True)
class TargetDescription:
    """A target seen from its files; fields as of LoadedTarget. embedding_rows: ids below it have an embedding.

    context_length: most tokens of prompt and answer together.
    """

    tokenizer: PreTrainedTokenizerFast
    embedding_rows: int
    fingerprint: str
    source: str
    stop_token_ids: tuple[int, ...]
    context_length: int


def describe_target(source: str | Path) -> TargetDescription:
    """Describes a target.

    Args:
      source: as for load_target. Of a hub id the weights are fetched too: the fingerprint covers them.

    Raises:
      ConfigError: the model is of a kind that is not supported.
      CheckpointError: the source can't be found, or has no tokenizer.
    """
    folder = resolve_source(source, files=(*WEIGHT_FILES, *TEXT_FILES))
    raw_config = read_json(folder / "config.json")
    config = parse_target_config(raw_config)
    tokenizer = load_tokenizer(folder)
    if tokenizer is None:
        raise CheckpointError(f"{source} has no tokenizer.json; chats can't be rendered without")
    return TargetDescription(
        tokenizer,
        config.vocab_size,
        fingerprint(folder),
        str(source),
        stop_token_ids_of(folder, raw_config, tokenizer),
        config.max_position_embeddings,
    )

"""Gives a drafter that is there a draft vocabulary: the tokens that answers are made of.

    python -m dflash_jax.data.draft_vocabulary --drafter DRAFTER --target TARGET --data chats.jsonl.gz --size 4096

Counts the answers' tokens in regenerated chats or a prepared set and writes the most frequent ones into the drafter's
folder, as draft_vocabulary.json. From then on it proposes these only, here; the text stays the target's own, and other
readers of the folder don't look at the file. A training run writes it where checkpoint.draft_vocab_size is set.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags

from dflash_jax.cli import exit_with, run_command, writing
from dflash_jax.data.rows import TrainingRow


def count_answer_tokens(rows: Iterable[TrainingRow], vocab_size: int) -> np.ndarray:
    """How often each token stands in the answers of training rows, int64 [V].

    Raises:
      ValueError: a row has a token beyond the vocabulary, as rows made for another target may.
    """
    counts_V = np.zeros(vocab_size, np.int64)
    for row in rows:
        tokens_T = row.tokens[row.loss_mask]
        if tokens_T.max(initial=0) >= vocab_size:
            raise ValueError(f"row {row.id!r} has token {tokens_T.max()}; the target has 0 to {vocab_size - 1}")
        np.add.at(counts_V, tokens_T, 1)
    return counts_V


def most_frequent(counts_V: np.ndarray, size: int) -> np.ndarray:
    """The most frequent tokens, at most `size` and none that never occurs, most frequent first, int32 [U]."""
    order_V = np.argsort(-counts_V, kind="stable")
    return order_V[: min(size, np.count_nonzero(counts_V))].astype(np.int32)


def run(drafter: str, target: str, data: str, size: int, *, allow_other_target: bool = False) -> str:
    """Writes the draft vocabulary, and returns what there is to say about it.

    Args:
      allow_other_target: count the data's tokens even if it was made for another target or tokenizer.

    Raises:
      ValueError: drafter, target or data can't be read or don't belong together.
    """
    from dflash_jax.checkpoints.draft_vocabulary import write_draft_vocabulary
    from dflash_jax.checkpoints.huggingface import outline_target, read_drafter_config
    from dflash_jax.config import PARTS, DataConfig, ExperimentConfig, naming
    from dflash_jax.evaluation.training_run import training_rows

    folder = Path(drafter).expanduser()
    if not folder.is_dir():
        raise ValueError(f"--drafter={drafter!r}: there is no such folder")
    with naming("--target", target):
        outline = outline_target(target)
    with naming("--drafter", drafter):
        read_drafter_config(folder, outline.config)
    parts: dict[str, Any] = {name: part() for name, part in PARTS.items()}
    parts["data"] = DataConfig(train_file=data, allow_other_target=allow_other_target)
    experiment = ExperimentConfig(**parts)
    rows = training_rows(data, "--data", experiment, outline, split="train")
    with naming("--data", data):
        counts_V = count_answer_tokens(rows, outline.config.vocab_size)
    token_ids_U = most_frequent(counts_V, size)
    with writing("--drafter", drafter):
        path = write_draft_vocabulary(folder, token_ids_U)
    share = counts_V[token_ids_U].sum() / counts_V.sum()
    return (
        f"{path}: {len(token_ids_U):,} of {outline.config.vocab_size:,} tokens, which make up {share:.1%} of the "
        f"{counts_V.sum():,} tokens of {len(rows):,} rows' answers"
    )


def _define_flags() -> None:
    flags.DEFINE_string("drafter", None, "Folder of the drafter, into which the file is written.", required=True)
    flags.DEFINE_string("target", None, "Folder, hub id, or smollm2-135m-instruct.", required=True)
    flags.DEFINE_string("data", None, "File of regenerated chats, or a prepared set.", required=True)
    flags.DEFINE_integer("size", 4096, "How many tokens, if that many occur.", lower_bound=1)
    flags.DEFINE_bool("allow_other_target", False, "Sets data.allow_other_target: take data made for another target.")


def main() -> None:
    flag = flags.FLAGS
    try:
        text = run(flag.drafter, flag.target, flag.data, flag.size, allow_other_target=flag.allow_other_target)
    except (ValueError, OSError) as error:
        exit_with(error)
    print(text)


if __name__ == "__main__":
    _define_flags()
    run_command(main)

"""How good a drafter is on held-out chats: per-slot accuracy on fixed anchors, and acceptance by real decoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from dflash_jax.checkpoints.huggingface import LoadedDrafter, LoadedTarget
from dflash_jax.decoding.generate import Generation, generate
from dflash_jax.decoding.stats import position_acceptance
from dflash_jax.sharding import to_devices
from dflash_jax.training.metrics import report, zero_sums
from dflash_jax.training.step import Batch, StepSettings, VocabularyTables, evaluation_step


@dataclass(frozen=True)
class DecodingReport:
    """Sums over prompts, divided once.

    acceptance_length: committed tokens a round, the target's token counted, in 1 … W.
    accepted_share: accepted draft tokens / drafted tokens; of an adaptive width / verified ones.
    position_acceptance: of slot k = 1 … W−1, of the rounds that verified it the share that accepted slots 1 … k, as in
        decoding.stats.Stats; 0 where no round verified it.
    """

    acceptance_length: float
    accepted_share: float
    position_acceptance: list[float]
    rounds: int
    tokens: int
    prompts: int


def decoding_report(generations: Sequence[Generation], width: int, *, adaptive: bool = False) -> DecodingReport:
    """Pools the rounds of all generations. A last round cut by budget or stop counts what it gave.

    adaptive: rounds may have been narrower than `width`.
    """
    pooled = [
        counts
        for generation in generations
        for counts in zip(generation.acceptance_lengths, generation.verified_lengths, strict=True)
    ]
    lengths, verified = [accepted for accepted, _ in pooled], [slots for _, slots in pooled]
    rounds = max(len(lengths), 1)
    accepted = sum(lengths) - len(lengths)
    drafted = sum(verified) - len(verified) if adaptive else rounds * (width - 1)
    shares = position_acceptance(pooled)
    return DecodingReport(
        acceptance_length=sum(lengths) / rounds,
        accepted_share=accepted / drafted if drafted else 0.0,
        position_acceptance=shares + [0.0] * (width - 1 - len(shares)),
        rounds=len(lengths),
        tokens=sum(len(generation.tokens) for generation in generations),
        prompts=len(generations),
    )


def acceptance_by_decoding(
    target: LoadedTarget,
    drafter: LoadedDrafter,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    width: int,
    batch_size: int,
    check: Callable[[], None] = lambda: None,
) -> DecodingReport:
    """Decodes the prompts greedily with the drafter and reports what was accepted. As rows end, `check` is called."""
    generations = generate(
        *(target, prompts),
        drafter=drafter,
        max_new_tokens=max_new_tokens,
        width=width,
        batch_size=batch_size,
        progress=lambda finished: check(),
    )
    return decoding_report(generations, width)


def fixed_anchor_report(
    drafter,
    tables: VocabularyTables,
    batches,
    features,
    settings: StepSettings,
    check: Callable[[], None] = lambda: None,
) -> dict:
    """Loss, accuracy by slot and accepted prefix over held-out batches, on evenly spread anchors. Before each batch,
    `check` is called."""
    sums = zero_sums(settings.width)
    for batch in batches:
        check()
        on_device = Batch(
            *to_devices((batch["tokens_BT"], batch["loss_mask_BT"], batch["row_index_B"])),
            taps=features(batch).taps,
        )
        sums = jax.tree.map(jnp.add, sums, evaluation_step(drafter, tables, on_device, settings=settings))
    return report(sums)

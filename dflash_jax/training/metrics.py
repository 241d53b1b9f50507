"""What a step or an evaluation reports: sums and counts that are added over everything and divided once."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.training.anchors import Blocks
from dflash_jax.training.losses import SlotScores


class BlockSums(NamedTuple):
    """Numerators and counts, all float32, that may be added over rows, steps and devices.

    loss: Σ weight · nats. weight: Σ weight. correct, slots: [W], right and supervised slots by slot.
    prefix: tokens a decoder would have kept, Σ (leading right slots + 1). blocks: valid blocks.
    """

    loss: jax.Array
    weight: jax.Array
    correct: jax.Array
    slots: jax.Array
    prefix: jax.Array
    blocks: jax.Array


def block_sums(loss: jax.Array, weights_BAW: jax.Array, scores: SlotScores, blocks: Blocks) -> BlockSums:
    """Collects the sums of one pass; `scores` are [B, A, W]."""
    supervised_BAW = blocks.supervised
    correct_BAW = scores.correct * supervised_BAW
    run_BAV = jnp.cumprod(correct_BAW[..., 1:], axis=-1)  # an unsupervised slot ends the run
    accepted_BA = (1.0 + run_BAV.sum(axis=-1)) * blocks.valid
    return BlockSums(
        loss=loss,
        weight=weights_BAW.sum(),
        correct=correct_BAW.sum(axis=(0, 1)),
        slots=supervised_BAW.astype(jnp.float32).sum(axis=(0, 1)),
        prefix=accepted_BA.sum(),
        blocks=blocks.valid.astype(jnp.float32).sum(),
    )


def zero_sums(width: int) -> BlockSums:
    """The neutral element of addition."""
    zero = jnp.float32(0.0)
    return BlockSums(zero, zero, jnp.zeros(width), jnp.zeros(width), zero, zero)


def report(sums: BlockSums) -> dict[str, Any]:
    """Means, on the host. `accepted_prefix` is the acceptance length the blocks would have reached."""
    host = jax.tree.map(lambda x: np.asarray(x, np.float64), sums)

    def ratio(top, bottom):
        return float(top / bottom) if bottom > 0 else 0.0

    return {
        "loss": ratio(host.loss, host.weight),
        "accuracy": ratio(host.correct.sum(), host.slots.sum()),
        "position_accuracy": [ratio(c, n) for c, n in zip(host.correct[1:], host.slots[1:], strict=True)],
        "accepted_prefix": ratio(host.prefix, host.blocks),
        "blocks": float(host.blocks),
    }

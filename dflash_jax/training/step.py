"""One training step of the drafter: anchors, packed pass, loss, update. Pure functions under jax.jit."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from dflash_jax.kernels.block_attention import Backend
from dflash_jax.models.drafter import Drafter
from dflash_jax.sharding import constrain, constrain_parameters, lookup, over_blocks
from dflash_jax.training.anchors import Blocks, cut_at_random, draw_anchors, make_blocks, spread_anchors, step_keys
from dflash_jax.training.losses import SlotScores, block_loss, decay_weights
from dflash_jax.training.metrics import BlockSums, block_sums, zero_sums
from dflash_jax.training.teacher import teacher_hidden, teacher_loss


class Batch(NamedTuple):
    """Rows of a step; under accumulation each array has a leading axis of micro-batches.

    tokens int32 [B, T] · loss_mask bool [B, T] · rows int32 [B], their numbers in the data set · taps [B, T, M, D],
    the target's context features of these tokens · hidden [B, T, D], its final hidden states, where the loss asks for
    them (training.loss "teacher") · starts int32 [B, T], where in a packed row the document of each token starts; None:
    every row is one document.
    """

    tokens: jax.Array
    loss_mask: jax.Array
    rows: jax.Array
    taps: jax.Array
    hidden: jax.Array | None = None
    starts: jax.Array | None = None


class VocabularyTables(NamedTuple):
    """What the drafter borrows from the target, frozen: input and output table, both [V, D].

    shortlist: rows [S, D] of the head that the teacher loss compares distributions on; None where it isn't used.
    """

    embedding: jax.Array
    head: jax.Array
    shortlist: jax.Array | None = None


class TrainState(NamedTuple):
    """Everything a step changes. drafter: float32 masters · optimizer: Optax state · step, skipped: int32 scalars."""

    drafter: Drafter
    optimizer: optax.OptState
    step: jax.Array
    skipped: jax.Array


class StepSettings(NamedTuple):
    """What the compiled step depends on, apart from shapes. gamma None: no decay. random_cut: see cut_at_random.

    teacher: the loss compares distributions (`teacher_loss`) instead of scoring labels (`block_loss`). remat: see
    Drafter.packed.
    """

    anchors: int
    width: int
    mask_id: int
    gamma: float | None
    loss_chunk: int
    compute_dtype: str
    seed: int
    random_cut: bool = False
    teacher: bool = False
    remat: bool = False
    backend: Backend = "auto"


@functools.partial(jax.jit, static_argnames=("layers", "scan"))
def context_taps(
    target, tokens_BT: jax.Array, starts_BT: jax.Array | None = None, *, layers: tuple[int, ...], scan: bool = False
) -> jax.Array:
    """The target's outputs at `layers` for every position, [B, T, M, D]; layers above the deepest are not run."""
    return hidden_and_taps(target, tokens_BT, starts_BT, layers=layers, scan=scan)[1]


@functools.partial(jax.jit, static_argnames=("layers", "scan"))
def hidden_and_taps(
    target, tokens_BT: jax.Array, starts_BT: jax.Array | None = None, *, layers: tuple[int, ...], scan: bool = False
) -> tuple[jax.Array, jax.Array]:
    """The target's final hidden states [B, T, D], after the final norm, and its taps as `context_taps` gives them.

    starts_BT: see Batch. scan: see Target.scanned.
    """
    positions_BT = served_positions(tokens_BT.shape, starts_BT)
    run = target.scanned if scan else target.forward
    return run(tokens_BT, positions_BT, taps=layers, starts_BT=starts_BT)[:2]


def served_positions(shape: tuple[int, ...], starts_BT: jax.Array | None) -> jax.Array:
    """The positions that serving knows tokens by, int32 [B, T]: they begin anew with every document."""
    at_BT = jnp.broadcast_to(jnp.arange(shape[1]), shape)
    return at_BT if starts_BT is None else at_BT - starts_BT


def blocks_loss(
    drafter: Drafter,
    tables: VocabularyTables,
    batch: Batch,
    blocks: Blocks,
    weights_W: jax.Array,
    settings: StepSettings,
) -> tuple[jax.Array, tuple[jax.Array, SlotScores]]:
    """Σ weight · loss of the given blocks (not normalised); also the weights [B, A, W] and slot scores."""
    dtype = jnp.dtype(settings.compute_dtype)
    # Divided masters are gathered in the dtype of the computation, not in their own.
    drafter = constrain_parameters(jax.tree.map(lambda leaf: leaf.astype(dtype), drafter))
    context_BTD = drafter.fuse(batch.taps.astype(dtype))
    embedded_BAWD = lookup(tables.embedding, blocks.tokens, "rows", "blocks").astype(dtype)
    starts_BA, positions_BT = jnp.zeros_like(blocks.anchors), None
    if batch.starts is not None:
        starts_BA = jnp.take_along_axis(batch.starts, blocks.anchors, axis=1)
        positions_BT = served_positions(batch.starts.shape, batch.starts)
    hidden_BAWD = drafter.packed(
        *(embedded_BAWD, context_BTD, starts_BA, blocks.anchors),
        positions_BT=positions_BT,
        backend=settings.backend,
        remat=settings.remat,
    )
    weights_BAW = weights_W * blocks.supervised
    if settings.teacher:
        loss, scores = _teacher_sums(hidden_BAWD, weights_BAW, tables, batch, blocks, settings.loss_chunk)
    else:
        loss, scores = _label_sums(hidden_BAWD, weights_BAW, tables, blocks, settings.loss_chunk)
    return loss, (weights_BAW, scores)


def _label_sums(hidden_BAWD, weights_BAW, tables: VocabularyTables, blocks: Blocks, chunk: int):
    def score(hidden_BAWD, labels_BAW, weights_BAW, head_VD):
        flat = _slots(hidden_BAWD), head_VD, labels_BAW.reshape(-1), weights_BAW.reshape(-1)
        return _by_block(block_loss(*flat, chunk=chunk), labels_BAW.shape)

    head_VD = jax.lax.stop_gradient(tables.head)
    return over_blocks(score, hidden_BAWD, blocks.labels, weights_BAW, whole=[head_VD])


def _teacher_sums(hidden_BAWD, weights_BAW, tables: VocabularyTables, batch: Batch, blocks: Blocks, chunk: int):
    if batch.hidden is None or tables.shortlist is None:
        raise ValueError("the teacher loss needs the target's final hidden states and a shortlist")

    def score(hidden_BAWD, teacher_BAWD, weights_BAW, shortlist_SD):
        flat = _slots(hidden_BAWD), _slots(teacher_BAWD), shortlist_SD, weights_BAW.reshape(-1)
        return _by_block(teacher_loss(*flat, chunk=chunk), weights_BAW.shape)

    teacher_BAWD = teacher_hidden(batch.hidden, blocks)
    shortlist_SD = jax.lax.stop_gradient(tables.shortlist)
    return over_blocks(score, hidden_BAWD, teacher_BAWD, weights_BAW, whole=[shortlist_SD])


def _slots(x_BAWD: jax.Array) -> jax.Array:
    return x_BAWD.reshape(-1, x_BAWD.shape[-1])


def _by_block(loss_and_scores: tuple[jax.Array, SlotScores], shape: tuple[int, ...]) -> tuple[jax.Array, SlotScores]:
    loss, scores = loss_and_scores
    return loss, jax.tree.map(lambda leaf_R: leaf_R.reshape(shape), scores)


@functools.partial(jax.jit, static_argnames=("parts",))
def micro_batches(batch: Batch, parts: int) -> Batch:
    """The rows dealt out to so many micro-batches. Neighbours go to different ones, so each device keeps its own."""

    def deal(x, *meaning):
        return constrain(x.reshape(-1, parts, *x.shape[1:]).swapaxes(0, 1), None, "rows", *meaning)

    taps, hidden = jax.tree.map(lambda x: deal(x, "positions"), (batch.taps, batch.hidden))
    return jax.tree.map(deal, batch._replace(taps=None, hidden=None))._replace(taps=taps, hidden=hidden)


def initial_state(drafter: Drafter, optimizer: optax.GradientTransformation) -> TrainState:
    """The state before the first step."""
    parameters: Any = drafter  # a tree of arrays, though not of the types that Optax lists
    return TrainState(drafter, optimizer.init(parameters), jnp.int32(0), jnp.int32(0))


@functools.partial(jax.jit, static_argnames=("settings", "optimizer"), donate_argnames=("state",))
def train_step(
    state: TrainState,
    tables: VocabularyTables,
    batch: Batch,
    *,
    settings: StepSettings,
    optimizer: optax.GradientTransformation,
) -> tuple[TrainState, BlockSums]:
    """One update from batch [micro-batches, B, …].

    The gradient is that of Σ weight · loss / Σ weight over all micro-batches (and devices), so it does not depend on
    how rows are split. A step whose loss or gradient is not finite changes nothing but `step` and `skipped`; a loss
    that is not finite is left out of the sums. A step without a supervised slot has gradient zero.
    """

    def micro_step(carry, micro: Batch):
        gradient, sums = carry
        keys_B = step_keys(settings.seed, state.step, micro.rows)
        anchors_BA, valid_BA = draw_anchors(keys_B, micro.loss_mask, settings.anchors)
        blocks = make_blocks(micro.tokens, micro.loss_mask, anchors_BA, valid_BA, settings.width, settings.mask_id)
        weights_W = decay_weights(settings.width, settings.gamma)
        if settings.random_cut:
            blocks, weights_W = cut_at_random(keys_B, blocks, weights_W), jnp.ones_like(weights_W)
        grad_fn = jax.value_and_grad(blocks_loss, has_aux=True)
        (loss, (weights_BAW, scores)), new = grad_fn(state.drafter, tables, micro, blocks, weights_W, settings)
        return (
            constrain_parameters(jax.tree.map(jnp.add, gradient, new)),
            jax.tree.map(jnp.add, sums, block_sums(loss, weights_BAW, scores, blocks)),
        ), None

    start = (constrain_parameters(jax.tree.map(jnp.zeros_like, state.drafter)), zero_sums(settings.width))
    (gradient, sums), _ = jax.lax.scan(micro_step, start, batch)
    gradient = jax.tree.map(lambda g: g / jnp.maximum(sums.weight, 1e-9), gradient)
    counted = jax.tree.map(lambda total: jnp.where(jnp.isfinite(sums.loss), total, 0.0), sums)
    return constrain_parameters(apply_update(state, gradient, sums.loss, optimizer)), counted


def apply_update(state: TrainState, gradient, loss: jax.Array, optimizer: optax.GradientTransformation) -> TrainState:
    """The optimizer's update, or none of it when loss or gradient is not finite."""
    finite = jnp.isfinite(loss) & jnp.isfinite(optax.tree.norm(gradient))
    drafter: Any = state.drafter
    updates, moved = optimizer.update(gradient, state.optimizer, drafter)
    new_drafter = optax.apply_updates(drafter, updates)

    def keep(new, old):
        return jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)

    return TrainState(
        drafter=keep(new_drafter, state.drafter),
        optimizer=keep(moved, state.optimizer),
        step=state.step + 1,
        skipped=state.skipped + ~finite,
    )


@functools.partial(jax.jit, static_argnames=("settings",))
def evaluation_step(drafter: Drafter, tables: VocabularyTables, batch: Batch, *, settings: StepSettings) -> BlockSums:
    """The sums of one batch (no micro-batch axis) on fixed, evenly spread anchors; nothing is drawn."""
    anchors_BA, valid_BA = spread_anchors(batch.loss_mask, settings.anchors)
    blocks = make_blocks(batch.tokens, batch.loss_mask, anchors_BA, valid_BA, settings.width, settings.mask_id)
    weights_W = decay_weights(settings.width, settings.gamma)
    loss, (weights_BAW, scores) = blocks_loss(drafter, tables, batch, blocks, weights_W, settings)
    return block_sums(loss, weights_BAW, scores, blocks)


@functools.cache  # the same object for the same settings, so that train_step is not compiled again
def make_optimizer(
    learning_rate: float,
    steps: int,
    *,
    warmup_ratio: float,
    weight_decay: float,
    b1: float,
    b2: float,
    clip_norm: float,
) -> optax.GradientTransformation:
    """AdamW under global-norm clipping: linear warm-up over warmup_ratio · steps, cosine to 0 (paper, appendix)."""
    warmup = max(1, round(warmup_ratio * steps))
    # The rate is 0 before the first update and after the last one, so that neither is lost.
    schedule = optax.warmup_cosine_decay_schedule(0.0, learning_rate, warmup, max(steps, warmup) + 1)
    adamw = optax.adamw(lambda count: schedule(count + 1), b1=b1, b2=b2, weight_decay=weight_decay)
    return optax.chain(optax.clip_by_global_norm(clip_norm), adamw)

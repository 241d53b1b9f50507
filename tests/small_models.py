"""Small random targets and drafters, built in memory, and drafters and targets that follow a script."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dflash_jax.checkpoints.huggingface import LoadedDrafter, LoadedTarget
from dflash_jax.models.drafter import Drafter
from dflash_jax.models.family import DrafterConfig, RopeConfig, TargetConfig
from dflash_jax.models.proposal import Proposal
from dflash_jax.models.target import Target


def target_config(**fields) -> TargetConfig:
    """A Qwen3 target of four tiny layers."""
    sizes = {
        "family": "qwen3",
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_layers": 4,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-6,
        "rope": RopeConfig(theta=10_000.0),
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "qk_norm": True,
    }
    return TargetConfig(**sizes | fields)


def drafter_config(target: TargetConfig, **fields) -> DrafterConfig:
    """A drafter of two tiny layers for that target; the mask token is its last."""
    sizes = {
        "hidden_size": target.hidden_size,
        "intermediate_size": 48,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-6,
        "vocab_size": target.vocab_size,
        "max_position_embeddings": target.max_position_embeddings,
        "rope": RopeConfig(theta=10_000.0),
        "block_size": 4,
        "mask_token_id": target.vocab_size - 1,
        "target_layer_ids": (0, 2),
        "num_target_layers": target.num_layers,
        "layer_types": ("full_attention",) * fields.get("num_layers", 2),
    }
    return DrafterConfig(**sizes | fields)


def widened(model, factor: float):
    """The model with its matrices multiplied, so that its outputs depend visibly on every input."""
    return jax.tree.map(lambda leaf: leaf * factor if leaf.ndim > 1 else leaf, model)


def randomized(drafter: Drafter) -> Drafter:
    """Every parameter away from its initial value: norms that stay at one would hide a swapped name."""
    leaves, treedef = jax.tree.flatten(drafter)
    keys = jax.random.split(jax.random.key(7), len(leaves))
    noisy = [x + 0.1 * jax.random.normal(key, x.shape, x.dtype) for x, key in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(treedef, noisy)


def random_target(
    seed: int = 0, *, factor: float = 10.0, stop_token_ids: tuple[int, ...] = (), **fields
) -> LoadedTarget:
    """A random target without a tokenizer."""
    config = target_config(**fields)
    model = widened(Target(config, rngs=nnx.Rngs(seed)), factor)
    return LoadedTarget(model, config, None, stop_token_ids, "a random target", "none")


def random_drafter(target: TargetConfig, seed: int = 1, *, factor: float = 10.0, **fields) -> LoadedDrafter:
    """A random, untrained drafter."""
    config = drafter_config(target, **fields)
    return LoadedDrafter(widened(Drafter(config, rngs=nnx.Rngs(seed)), factor), config, "a random drafter")


def random_prompts(lengths: list[int], *, vocab_size: int = 61, seed: int = 0) -> list[list[int]]:
    """One prompt of each length."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab_size, length).tolist() for length in lengths]


def script(prompts: list[list[int]], answers: list[list[int]], length: int = 256) -> jax.Array:
    """Each row's prompt and answer by position, int32 [B, length]; what lies behind is 0."""
    rows_BS = np.zeros((len(prompts), length), np.int32)
    for row, text in zip(rows_BS, map(list.__add__, prompts, answers), strict=True):
        row[: len(text)] = text
    return jnp.asarray(rows_BS)


@jax.tree_util.register_pytree_node_class
class RiggedDrafter:
    """Proposes the script's tokens in the first `right` slots behind the anchor and other tokens in the rest."""

    tap_layers: tuple[int, ...] = ()

    def __init__(self, script_BS: jax.Array, right: Any, max_width: int, vocab_size: int = 61):
        self.script_BS, self.right, self.max_width, self.vocab_size = script_BS, right, max_width, vocab_size

    def tree_flatten(self):
        return (self.script_BS, self.right), (self.max_width, self.vocab_size)

    @classmethod
    def tree_unflatten(cls, static, leaves):
        return cls(*leaves, *static)

    def init_cache(self, batch: int, length: int) -> tuple:
        return ()

    def absorb(self, cache: tuple, taps_BTMD: jax.Array, positions_BT: jax.Array, anchors_B: jax.Array) -> tuple:
        return cache

    def propose(self, target, cache, anchor_B, position_B, draw, *, width: int) -> Proposal:
        slot_V = jnp.arange(1, width)
        tokens_BV = jnp.take_along_axis(self.script_BS, position_B[:, None] + slot_V, axis=1)
        wrong_BV = (tokens_BV + 1) % self.vocab_size
        return Proposal(jnp.where(slot_V <= self.right, tokens_BV, wrong_BV), None)


def rigged(script_BS: jax.Array, right: int, width: int, **options) -> LoadedDrafter:
    """A RiggedDrafter as `generate` takes it. `right` is traced: all values share a compilation."""
    return LoadedDrafter(RiggedDrafter(script_BS, jnp.int32(right), width, **options), None, "a rigged drafter")


@jax.tree_util.register_pytree_node_class
class ScriptedTarget:
    """Says the script's token at every position, whatever it reads; its hidden state is that token, one-hot."""

    dtype = jnp.float32

    def __init__(self, script_BS: jax.Array, vocab_size: int):
        self.script_BS, self.vocab_size = script_BS, vocab_size

    def tree_flatten(self):
        return (self.script_BS,), (self.vocab_size,)

    @classmethod
    def tree_unflatten(cls, static, leaves):
        return cls(*leaves, *static)

    def init_cache(self, batch: int, length: int) -> tuple:
        return ()

    def forward(self, tokens_BT, positions_BT, cache=None, *, taps=()):
        next_BT = jnp.take_along_axis(self.script_BS, positions_BT + 1, axis=1)
        hidden_BTV = jax.nn.one_hot(next_BT, self.vocab_size)
        return hidden_BTV, jnp.zeros((*tokens_BT.shape, 0, self.vocab_size)), cache

    def logits(self, hidden: jax.Array) -> jax.Array:
        return hidden

    def commit(self, cache: tuple, lengths_B: jax.Array) -> tuple:
        return cache


def scripted(script_BS: jax.Array, vocab_size: int = 61, *, tokenizer=None, stop_token_ids=()) -> LoadedTarget:
    """A ScriptedTarget as `generate` takes it."""
    config = target_config(vocab_size=vocab_size)
    return LoadedTarget(
        ScriptedTarget(script_BS, vocab_size), config, tokenizer, stop_token_ids, "a scripted target", "none"
    )

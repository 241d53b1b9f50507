"""The dense decoder-only target: Llama 3.x, SmolLM2, Qwen2.5 and Qwen3, with taps on its layers' outputs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from dflash_jax.models.attention import Segment, grouped_attention
from dflash_jax.models.cache import KVCache, empty_cache, write
from dflash_jax.models.family import TargetConfig
from dflash_jax.models.layers import INIT_STD, MLP, AttentionProjections, RMSNorm
from dflash_jax.models.project import project
from dflash_jax.models.rotary import Rotation, rotation
from dflash_jax.sharding import constrain, lookup


class DecoderLayer(nnx.Module):
    """Pre-norm attention and SwiGLU, each with its residual."""

    def __init__(self, config: TargetConfig, *, rngs: nnx.Rngs, dtype=jnp.float32):
        self.input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)
        self.attention = AttentionProjections(
            config, qk_norm=config.qk_norm, qkv_bias=config.qkv_bias, o_bias=config.o_bias, rngs=rngs, dtype=dtype
        )
        self.post_attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)
        self.mlp = MLP(config.hidden_size, config.intermediate_size, bias=config.mlp_bias, rngs=rngs, dtype=dtype)

    def __call__(self, x_BTD: jax.Array, rotated: Rotation, mask_BTS: jax.Array, layer_cache, start_B: jax.Array):
        """Returns the output [B, T, D] and the layer's updated (keys, values), both [B, K, S, H]."""
        normed_BTD = self.input_norm(x_BTD)
        q_BTNH = self.attention.queries(normed_BTD, rotated)
        k_BTKH, v_BTKH = self.attention.keys_values(normed_BTD, rotated)
        if layer_cache is None:
            # Where positions are divided, every device reads the keys of all of them.
            k_BKSH, v_BKSH = (constrain(new.swapaxes(1, 2), "rows", "heads") for new in (k_BTKH, v_BTKH))
        else:
            k_BKSH, v_BKSH = (write(old, new, start_B) for old, new in zip(layer_cache, (k_BTKH, v_BTKH), strict=True))
        mixed_BTNH = grouped_attention(q_BTNH, [Segment(k_BKSH, v_BKSH, mask_BTS)], self.attention.head_dim**-0.5)
        x_BTD = x_BTD + self.attention.output(mixed_BTNH)
        return x_BTD + self.mlp(self.post_attention_norm(x_BTD)), (k_BKSH, v_BKSH)


class TargetTables(nnx.Module):
    """What a drafter borrows from its target: embedding and head. They are one where the config ties them."""

    def __init__(self, config: TargetConfig, *, rngs: nnx.Rngs, dtype=jnp.float32):
        self.config = config
        table_VD = (config.vocab_size, config.hidden_size)
        self.embedding = nnx.Param((INIT_STD * jax.random.normal(rngs.params(), table_VD)).astype(dtype))
        if config.tie_word_embeddings:
            self.head = None
        else:
            self.head = nnx.Param((INIT_STD * jax.random.normal(rngs.params(), table_VD)).astype(dtype))

    @property
    def dtype(self):
        return self.embedding[...].dtype

    @property
    def head_VD(self) -> jax.Array:
        """The output table [V, D]: bit for bit the embedding where they are tied."""
        return self.embedding[...] if self.head is None else self.head[...]


class Target(TargetTables):
    """Embedding, decoder layers, final norm, head."""

    def __init__(self, config: TargetConfig, *, rngs: nnx.Rngs, dtype=jnp.float32):
        super().__init__(config, rngs=rngs, dtype=dtype)
        self.layers = nnx.List([DecoderLayer(config, rngs=rngs, dtype=dtype) for _ in range(config.num_layers)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)

    def init_cache(self, batch: int, length: int) -> KVCache:
        """A cache for `length` positions of each row. Allow for one block beyond the last token kept."""
        c = self.config
        return empty_cache([length] * c.num_layers, batch, c.num_kv_heads, c.head_dim, self.dtype)

    def embed(self, tokens: jax.Array) -> jax.Array:
        """Token ids [B, ...] → embeddings [B, ..., D]."""
        return lookup(self.embedding[...], tokens, "rows")

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Final hidden states [..., D] → float32 logits [..., V]."""
        return project(hidden, self.head_VD, dtype=jnp.float32)

    def forward(
        self,
        tokens_BT: jax.Array,
        positions_BT: jax.Array,
        cache: KVCache | None = None,
        *,
        taps: tuple[int, ...] = (),
        starts_BT: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array, KVCache | None]:
        """One causal pass over consecutive tokens of each row.

        Args:
            tokens_BT: int32 ids.
            positions_BT: their positions; within a row, or a document of it, they rise by one.
            cache: where earlier positions were kept. None: the tokens see only themselves.
            taps: 0-based layers whose outputs (before the final norm) are returned, in this order.
            starts_BT: of rows that hold several documents, where in the row each token's document starts: tokens see
                their own document alone. None: one document. Without a cache only.

        Returns:
            hidden_BTD after the final norm, taps_BTMD (M = len(taps)), and the cache with these positions written.
        """
        divided = ("rows", "positions") if cache is None else ("rows",)
        x_BTD = lookup(self.embedding[...], tokens_BT, *divided)
        rotated = rotation(self.config.rope, self.config.head_dim, positions_BT)
        if cache is None:
            mask_BTS = _causal_mask(positions_BT, starts_BT)
        else:
            mask_BTS = jnp.arange(cache.length)[None, None, :] <= positions_BT[:, :, None]
        outputs, keys, values = {}, [], []
        for index, layer in enumerate(self.layers):
            layer_cache = None if cache is None else (cache.keys[index], cache.values[index])
            x_BTD, (k_BKSH, v_BKSH) = layer(x_BTD, rotated, mask_BTS, layer_cache, positions_BT[:, 0])
            x_BTD = constrain(x_BTD, *divided)
            keys.append(k_BKSH)
            values.append(v_BKSH)
            if index in taps:
                outputs[index] = x_BTD
        empty_BTMD = jnp.zeros((*x_BTD.shape[:2], 0, x_BTD.shape[-1]), x_BTD.dtype)
        taps_BTMD = jnp.stack([outputs[i] for i in taps], axis=2) if taps else empty_BTMD
        return self.norm(x_BTD), taps_BTMD, None if cache is None else KVCache(tuple(keys), tuple(values))

    def scanned(
        self,
        tokens_BT: jax.Array,
        positions_BT: jax.Array,
        *,
        taps: tuple[int, ...],
        starts_BT: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """`forward` without a cache, where the layers between two taps are one loop.

        So the compiler of a deep target sees one layer for each tap. The price is a copy of the parameters, stacked.

        Returns:
            hidden_BTD and taps_BTMD, as `forward`.
        """
        rotated = rotation(self.config.rope, self.config.head_dim, positions_BT)
        mask_BTS = _causal_mask(positions_BT, starts_BT)

        def one_layer(x_BTD, layer: DecoderLayer):
            y_BTD, _ = layer(x_BTD, rotated, mask_BTS, None, positions_BT[:, 0])
            return constrain(y_BTD, "rows", "positions"), None

        x_BTD, outputs, first = lookup(self.embedding[...], tokens_BT, "rows", "positions"), {}, 0
        for last in sorted({*taps, self.config.num_layers - 1}):
            stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *self.layers[first : last + 1])
            x_BTD, _ = jax.lax.scan(one_layer, x_BTD, stacked)
            outputs[last], first = x_BTD, last + 1
        return self.norm(x_BTD), jnp.stack([outputs[tap] for tap in taps], axis=2)

    def commit(self, cache: KVCache, lengths_B: jax.Array) -> KVCache:
        """Keeps the first lengths_B positions. Attention needs no work: later slots are never read, only rewritten."""
        del lengths_B
        return cache


def _causal_mask(positions_BT: jax.Array, starts_BT: jax.Array | None) -> jax.Array:
    """Which of the same tokens each may read, bool [B, T, S]: itself and earlier ones of its document."""
    if starts_BT is None:
        return positions_BT[:, None, :] <= positions_BT[:, :, None]
    at_S = jnp.arange(positions_BT.shape[1])
    return (at_S <= at_S[:, None]) & (at_S >= starts_BT[:, :, None])

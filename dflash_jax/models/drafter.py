"""The DFlash drafter: a few decoder layers that read the target's hidden states as extra keys and values.

One set of weights, two faces. Training calls `packed`: many blocks of one sequence at once. Decoding calls `absorb`
and `propose`: one block a row, context keys and values kept in a cache. (Paper section 3; layout of released
checkpoints.)
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from dflash_jax.kernels.block_attention import SAVED, Backend, block_attention
from dflash_jax.models.attention import Segment, grouped_attention
from dflash_jax.models.cache import KVCache, empty_cache, ring_positions, write, write_ring
from dflash_jax.models.family import DrafterConfig
from dflash_jax.models.layers import MLP, AttentionProjections, Linear, RMSNorm
from dflash_jax.models.proposal import Draw, Proposal
from dflash_jax.models.rotary import Rotation, rotation
from dflash_jax.sharding import constrain


class DrafterLayer(nnx.Module):
    """A Qwen3-style decoder layer; how its queries meet keys is the caller's `attend`."""

    def __init__(self, config: DrafterConfig, *, rngs: nnx.Rngs, dtype=jnp.float32):
        self.input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)
        self.attention = AttentionProjections(
            config, qk_norm=True, qkv_bias=False, o_bias=False, rngs=rngs, dtype=dtype
        )
        self.post_attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)
        self.mlp = MLP(config.hidden_size, config.intermediate_size, rngs=rngs, dtype=dtype)

    def __call__(self, x: jax.Array, rotated: Rotation, attend) -> jax.Array:
        """x [..., W, D] → [..., W, D]; attend maps (q, k, v) of the block slots to mixed values [..., W, N, H]."""
        normed = self.input_norm(x)
        q = self.attention.queries(normed, rotated)
        k, v = self.attention.keys_values(normed, rotated)
        x = x + self.attention.output(attend(q, k, v))
        return x + self.mlp(self.post_attention_norm(x))


class Drafter(nnx.Module):
    """Parameters of the drafter. Embedding and head are the target's and are passed in where they are needed."""

    def __init__(self, config: DrafterConfig, *, rngs: nnx.Rngs, dtype=jnp.float32):
        self.config = config
        hidden, taps = config.hidden_size, len(config.target_layer_ids)
        self.fc = Linear(taps * hidden, hidden, rngs=rngs, dtype=dtype)
        self.hidden_norm = RMSNorm(hidden, config.rms_norm_eps, dtype=dtype)
        self.layers = nnx.List([DrafterLayer(config, rngs=rngs, dtype=dtype) for _ in range(config.num_layers)])
        self.norm = RMSNorm(hidden, config.rms_norm_eps, dtype=dtype)

    @property
    def tap_layers(self) -> tuple[int, ...]:
        """The target layers whose outputs `absorb` and `fuse` expect, in order."""
        return self.config.target_layer_ids

    @property
    def max_width(self) -> int:
        """The widest block it was trained for."""
        return self.config.block_size

    def fuse(self, taps_BTMD: jax.Array) -> jax.Array:
        """Context features H_t [B, T, D]: RMSNorm(W_c · concatenated taps), computed once for all layers."""
        return constrain(self.hidden_norm(self.fc(taps_BTMD.reshape(*taps_BTMD.shape[:2], -1))), "rows", "positions")

    def _rotation(self, positions: jax.Array) -> Rotation:
        return rotation(self.config.rope, self.config.head_dim, positions)

    # Training: many blocks of a sequence in one pass.

    def packed(
        self,
        embedded_BAWD: jax.Array,
        context_BTD: jax.Array,
        starts_BA: jax.Array,
        anchors_BA: jax.Array,
        *,
        positions_BT: jax.Array | None = None,
        backend: Backend = "auto",
        remat: bool = False,
    ) -> jax.Array:
        """Final hidden states [B, A, W, D] of all blocks.

        Args:
            embedded_BAWD: embeddings of [anchor token, mask, mask, …] of every block.
            context_BTD: context features of positions 0 … T−1, from `fuse`.
            starts_BA: first context position a block may read (0, or its document's start).
            anchors_BA: the block's anchor position; it reads context positions < anchor. Padding: anchor ≤ start.
            positions_BT: positions that serving knows the context by: those within the documents of a packed sequence.
                None: 0 … T−1.
            remat: keep a layer's input and its attention's results for the backward pass, and compute the rest again.
        """
        W = embedded_BAWD.shape[2]
        served_BA = anchors_BA
        if positions_BT is None:
            positions_BT = jnp.arange(context_BTD.shape[1])[None]
        else:
            served_BA = jnp.take_along_axis(positions_BT, anchors_BA, axis=1)
        block_rotation = self._rotation(served_BA[..., None] + jnp.arange(W))
        context_rotation = self._rotation(positions_BT)

        def run(layer: DrafterLayer, x_BAWD: jax.Array, context_BTD: jax.Array, index: int) -> jax.Array:
            # Context features bypass the layer's input norm: only hidden_norm has touched them.
            k_context_BTKH, v_context_BTKH = layer.attention.keys_values(context_BTD, context_rotation)

            def attend(q, k, v):
                return block_attention(
                    *(q, k, v, k_context_BTKH, v_context_BTKH, starts_BA, anchors_BA),
                    scale=self.config.head_dim**-0.5,
                    window=self.config.layer_window(index),
                    causal_in_block=self.config.layer_is_causal(index),
                    backend=backend,
                )

            return constrain(layer(x_BAWD, block_rotation, attend), "rows", "blocks")

        if remat:
            policy = jax.checkpoint_policies.save_only_these_names(*SAVED)
            run = jax.checkpoint(run, policy=policy, static_argnums=3)
        x_BAWD = constrain(embedded_BAWD, "rows", "blocks")
        for index, layer in enumerate(self.layers):
            x_BAWD = run(layer, x_BAWD, context_BTD, index)
        return self.norm(x_BAWD)

    # Decoding: one block a row, context in a cache.

    def init_cache(self, batch: int, length: int) -> KVCache:
        """Room for the context keys and values of `length` positions, in a layer with a window for no more than that.

        Block keys and values are never kept.
        """
        c = self.config
        windows = [c.layer_window(index) for index in range(c.num_layers)]
        lengths = [length if window is None else min(window, length) for window in windows]
        return empty_cache(lengths, batch, c.num_kv_heads, c.head_dim, self.fc.weight[...].dtype)

    def absorb(self, cache: KVCache, taps_BTMD: jax.Array, positions_BT: jax.Array, anchors_B: jax.Array) -> KVCache:
        """Writes the context keys and values of T consecutive positions of each row.

        anchors_B: where the next anchor stands. What is given of positions from there on does not count.
        """
        context_BTD, rotated = self.fuse(taps_BTMD), self._rotation(positions_BT)

        def put(index: int, cache_BKSH: jax.Array, new_BTKH: jax.Array) -> jax.Array:
            if self.config.layer_window(index) is None:
                return write(cache_BKSH, new_BTKH, positions_BT[:, 0])
            return write_ring(cache_BKSH, new_BTKH, positions_BT, anchors_B)

        keys, values = [], []
        for index, layer in enumerate(self.layers):
            k_BTKH, v_BTKH = layer.attention.keys_values(context_BTD, rotated)
            keys.append(put(index, cache.keys[index], k_BTKH))
            values.append(put(index, cache.values[index], v_BTKH))
        return KVCache(tuple(keys), tuple(values))

    def block_hidden(self, embedded_BWD: jax.Array, cache: KVCache, position_B: jax.Array) -> jax.Array:
        """Final hidden states [B, W, D] of one block a row whose anchor stands at position_B."""
        W = embedded_BWD.shape[1]
        rotated = self._rotation(position_B[:, None] + jnp.arange(W))
        x_BWD = embedded_BWD
        for index, layer in enumerate(self.layers):

            def attend(q, k, v, index=index):
                context_mask_BWS, block_mask_BWW = self._decoding_masks(
                    index, position_B, W, cache.keys[index].shape[2]
                )
                context = Segment(cache.keys[index], cache.values[index], context_mask_BWS)
                block = Segment(k.swapaxes(1, 2), v.swapaxes(1, 2), block_mask_BWW)
                return grouped_attention(q, [context, block], self.config.head_dim**-0.5)

            x_BWD = layer(x_BWD, rotated, attend)
        return self.norm(x_BWD)

    def _decoding_masks(self, index: int, position_B: jax.Array, W: int, S: int) -> tuple[jax.Array, jax.Array]:
        """What slot w of each row may read: of the cache, bool [B, W, S], and of its block, [B, W, W]."""
        slot_W, window = jnp.arange(W), self.config.layer_window(index)
        at_BS = jnp.arange(S)[None] if window is None else ring_positions(S, position_B)
        B = position_B.shape[0]
        context_BWS = jnp.broadcast_to(((at_BS >= 0) & (at_BS < position_B[:, None]))[:, None], (B, W, S))
        block_WW = jnp.ones((W, W), bool)
        if self.config.layer_is_causal(index):
            block_WW &= slot_W[None, :] <= slot_W[:, None]
        if window is not None:
            context_BWS &= position_B[:, None, None] + slot_W[None, :, None] - at_BS[:, None, :] < window
            block_WW &= slot_W[:, None] - slot_W[None, :] < window
        return context_BWS, jnp.broadcast_to(block_WW, (B, W, W))

    def propose(
        self, target, cache: KVCache, anchor_B: jax.Array, position_B: jax.Array, draw: Draw, *, width: int
    ) -> Proposal:
        """Tokens for slots 1 … width−1, given the anchor token at position_B; each slot is drawn by itself.

        `target` gives `embed` and `logits`.
        """
        masks_BV = jnp.full((anchor_B.shape[0], width - 1), self.config.mask_token_id, anchor_B.dtype)
        block_BW = jnp.concatenate([anchor_B[:, None], masks_BV], axis=1)
        embedded_BWD = target.embed(block_BW).astype(self.fc.weight[...].dtype)
        hidden_BWD = self.block_hidden(embedded_BWD, cache, position_B)
        logits_BVV = target.logits(hidden_BWD[:, 1:].astype(target.dtype))
        return draw(logits_BVV, position_B[:, None] + jnp.arange(1, width))

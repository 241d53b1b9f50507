"""The DFlash drafter as a plain torch module, for comparison only: written from the paper and the checkpoint layout.

It shares no code with the package and is deliberately direct: one block, the whole context at once, no cache, keys and
values concatenated in sequence, a dense mask, parameters named as in the file.
"""

import json
import math
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


class Attention(nn.Module):
    def __init__(self, config: dict):
        super().__init__()
        size, head = config["hidden_size"], config["head_dim"]
        self.head, self.heads, self.kv_heads = head, config["num_attention_heads"], config["num_key_value_heads"]
        self.q_proj = nn.Linear(size, self.heads * head, bias=False)
        self.k_proj = nn.Linear(size, self.kv_heads * head, bias=False)
        self.v_proj = nn.Linear(size, self.kv_heads * head, bias=False)
        self.o_proj = nn.Linear(self.heads * head, size, bias=False)
        self.q_norm, self.k_norm = RMSNorm(head, config["rms_norm_eps"]), RMSNorm(head, config["rms_norm_eps"])

    def forward(self, x, context, rope, mask):
        """x [W, D] after the input norm, context [a, D] as it is, mask [W, a + W] true where visible."""
        keys_from = torch.cat([context, x])
        q = self.q_norm(self.q_proj(x).view(len(x), self.heads, self.head))
        k = self.k_norm(self.k_proj(keys_from).view(len(keys_from), self.kv_heads, self.head))
        v = self.v_proj(keys_from).view(len(keys_from), self.kv_heads, self.head)
        positions = torch.arange(len(keys_from))
        q, k = rope(q, positions[len(context) :]), rope(k, positions)
        k, v = (t.repeat_interleave(self.heads // self.kv_heads, dim=1) for t in (k, v))
        scores = torch.einsum("qnh,knh->nqk", q, k) / math.sqrt(self.head)
        weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
        return self.o_proj(torch.einsum("nqk,knh->qnh", weights, v).flatten(1))


class MLP(nn.Module):
    def __init__(self, config: dict):
        super().__init__()
        size, inner = config["hidden_size"], config["intermediate_size"]
        self.gate_proj, self.up_proj = nn.Linear(size, inner, bias=False), nn.Linear(size, inner, bias=False)
        self.down_proj = nn.Linear(inner, size, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config: dict):
        super().__init__()
        self.input_layernorm = RMSNorm(config["hidden_size"], config["rms_norm_eps"])
        self.post_attention_layernorm = RMSNorm(config["hidden_size"], config["rms_norm_eps"])
        self.self_attn, self.mlp = Attention(config), MLP(config)

    def forward(self, x, context, rope, mask):
        x = x + self.self_attn(self.input_layernorm(x), context, rope, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class TorchDrafter(nn.Module):
    """Drafts one block of one row; embedding and head are the target's and stay outside."""

    def __init__(self, config: dict):
        super().__init__()
        self.config, size = config, config["hidden_size"]
        self.fc = nn.Linear(len(config["dflash_config"]["target_layer_ids"]) * size, size, bias=False)
        self.hidden_norm, self.norm = (RMSNorm(size, config["rms_norm_eps"]) for _ in range(2))
        self.layers = nn.ModuleList(Layer(config) for _ in range(config["num_hidden_layers"]))

    @classmethod
    def from_folder(cls, folder: Path) -> "TorchDrafter":
        """Reads config.json and, with the safetensors reader of torch, every weight by its name in the file."""
        from safetensors.torch import load_file

        drafter = cls(json.loads((folder / "config.json").read_text()))
        drafter.load_state_dict(load_file(folder / "model.safetensors"), strict=True)
        return drafter.float().eval()

    @torch.no_grad()
    def forward(self, features, embedded):
        """Taps of context positions 0 … a−1 [a, M·D], embeddings of the block at a … a+W−1 [W, D] → [W, D]."""
        context, x = self.hidden_norm(self.fc(features)), embedded
        for index, layer in enumerate(self.layers):
            x = layer(x, context, self._rope, self._mask(index, len(context), len(embedded)))
        return self.norm(x)

    def _mask(self, index: int, a: int, width: int):
        sliding = self.config["layer_types"][index] == "sliding_attention"
        explicit = self.config.get("is_causal")
        query, key = torch.arange(a, a + width)[:, None], torch.arange(a + width)[None]
        visible = torch.ones(width, a + width, dtype=torch.bool)
        if sliding if explicit is None else explicit:
            visible &= key <= query
        if sliding:
            visible &= query - key < self.config["sliding_window"]
        return visible

    def _rope(self, x, positions):
        """Half-rotation of [T, heads, H]; plain or YaRN (Peng et al. 2023) frequencies."""
        half = x.shape[-1] // 2
        theta, scaling = self.config["rope_theta"], self.config.get("rope_scaling")
        frequency = theta ** (-torch.arange(half, dtype=torch.float64) / half)
        scale = 1.0
        if scaling is not None:
            if scaling["rope_type"] != "yarn":
                raise NotImplementedError(scaling)
            length, factor = scaling["original_max_position_embeddings"], scaling["factor"]
            turn = {
                b: half * math.log(length / (2 * math.pi * scaling[b])) / math.log(theta)
                for b in ("beta_fast", "beta_slow")
            }
            low, high = max(math.floor(turn["beta_fast"]), 0), min(math.ceil(turn["beta_slow"]), 2 * half - 1)
            stretched = ((torch.arange(half) - low) / (high - low)).clamp(0, 1)
            frequency = frequency * (stretched / factor + 1 - stretched)
            scale = 0.1 * math.log(factor) + 1
        angle = (positions[:, None] * frequency).float()[:, None]
        cos, sin = angle.cos() * scale, angle.sin() * scale
        first, second = x[..., :half], x[..., half:]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

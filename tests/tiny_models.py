"""Tiny random Hugging Face models of every supported family, as torch modules and as folders."""

import torch
import transformers

SIZES = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}
ROPES = {
    "default": {"rope_type": "default", "rope_theta": 10_000.0},
    "linear": {"rope_type": "linear", "rope_theta": 50_000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 1_000_000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 256,
    },
    "yarn_mscale": {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 16.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "mscale": 1.2,
        "mscale_all_dim": 0.6,
        "truncate": False,
    },
    "yarn_factor": {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 16.0,
        "original_max_position_embeddings": 64,
        "attention_factor": 1.3,
    },
}
_CLASSES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
}


def torch_target(family: str, rope: str = "default", *, tied: bool = False, seed: int = 0, **fields):
    """A float32 causal LM in evaluation mode whose weights, norms and biases included, are all random."""
    config_class, model_class = _CLASSES[family]
    config = config_class(**SIZES | fields, rope_parameters=dict(ROPES[rope]), tie_word_embeddings=tied)
    model = model_class(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * noise if name.endswith("norm.weight") else 0.1 * noise)
    return model

"""The paper's drafter for Qwen3-8B without thinking: 5 layers, block 16, 512 anchors a row, 3,072 tokens, 6 epochs.

Paper, section 5.1; the batch of 64 rows is ours, the paper does not say. For eight devices (v5p:2x2x2 or one host of
8 H200): parameters and rows divided over all of them, one row a device at a time. What the compilers say of
memory and work is in docs/compile_check.md; it has not been trained yet.

    python -m dflash_jax.compile_check --config configs/qwen3_8b.py --hardware v5p:2x2x2
    python train.py --config configs/qwen3_8b.py --config.data.train_file=prepared/qwen3_8b
"""

from dflash_jax.config import default_config


def get_config():
    """The paper's settings; where it says nothing else, they are the defaults."""
    config = default_config()
    config.model.target = "Qwen/Qwen3-8B"
    config.model.mask_token_id = 151669  # the first id behind the tokenizer's last; it has a row in the embedding
    config.data.train_file = "prepared/qwen3_8b"
    config.data.length_buckets = (1024, 2048, 3072)
    config.training.rows_per_step = 64
    config.training.accumulation = 8
    config.training.scan_layers = True
    config.mesh.data = 1
    config.mesh.fsdp = -1
    config.checkpoint.directory = "runs/qwen3_8b"
    return config

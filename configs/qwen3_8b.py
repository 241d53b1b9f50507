"""The paper's drafter for Qwen3-8B: 5 layers, block 16, 512 anchors a row, 3,072 tokens, 6 epochs (section 5.1).

python train.py --config configs/qwen3_8b.py --config.data.train_file=prepared/qwen3_8b
"""

from dflash_jax.config import default_config


def get_config():
    """The paper's settings; defaults are left unsaid."""
    config = default_config()
    config.model.target = "Qwen/Qwen3-8B"
    config.model.mask_token_id = 151669  # the first id behind the tokenizer's last, which has an embedding row
    config.data.train_file = "prepared/qwen3_8b"
    config.data.length_buckets = (1024, 2048, 3072)
    config.training.rows_per_step = 64
    config.training.accumulation = 8
    config.mesh.data = 1
    config.mesh.fsdp = -1
    config.checkpoint.directory = "runs/qwen3_8b"
    return config

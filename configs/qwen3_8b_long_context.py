"""Goes on with the drafter of configs/qwen3_8b.py on chats of up to 32K tokens, as LongAlign's are.

One row a device at a time, as many anchors a row as before. Positions beyond the target's trained context need its
rope_scaling (YaRN) in config.json. Steps and rate are ours: the paper says that it fine-tunes, not for how long.

    python train.py --config configs/qwen3_8b_long_context.py --config.data.train_file=prepared/qwen3_8b_long
"""

from configs.qwen3_8b import get_config as qwen3_8b


def get_config():
    """The settings of qwen3_8b for long rows, from its drafter on."""
    config = qwen3_8b()
    config.model.warm_start = "runs/qwen3_8b/drafter"
    config.data.train_file = "prepared/qwen3_8b_long"
    config.data.max_length = 32_768
    config.data.length_buckets = (4096, 8192, 16_384, 32_768)
    config.training.rows_per_step = 16
    config.training.accumulation = 2
    config.training.steps = 1000
    config.optimizer.learning_rate = 1e-4
    config.checkpoint.directory = "runs/qwen3_8b_long_context"
    return config

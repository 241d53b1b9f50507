"""A drafter for Qwen3-8B with thinking: as configs/qwen3_8b.py, on chats that the target answered with its reasoning.

Make them with `python -m dflash_jax.data.regenerate … --template_arguments '{"enable_thinking": true}'`; the arguments
are recorded and stay with the drafter.

    python train.py --config configs/qwen3_8b_thinking.py --config.data.train_file=prepared/qwen3_8b_thinking
"""

from configs.qwen3_8b import get_config as qwen3_8b


def get_config():
    """The settings of qwen3_8b with other data."""
    config = qwen3_8b()
    config.data.train_file = "prepared/qwen3_8b_thinking"
    config.checkpoint.directory = "runs/qwen3_8b_thinking"
    return config

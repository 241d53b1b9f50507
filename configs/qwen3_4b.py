"""The paper's drafter for Qwen3-4B: as configs/qwen3_8b.py, for the smaller target.

python train.py --config configs/qwen3_4b.py --config.data.train_file=prepared/qwen3_4b
"""

from configs.qwen3_8b import get_config as qwen3_8b


def get_config():
    """The settings of qwen3_8b with another target."""
    config = qwen3_8b()
    config.model.target = "Qwen/Qwen3-4B"
    config.data.train_file = "prepared/qwen3_4b"
    config.checkpoint.directory = "runs/qwen3_4b"
    return config

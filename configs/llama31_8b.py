"""The paper's drafter for Llama-3.1-8B-Instruct: block 10, decay gamma 5, else as configs/qwen3_8b.py.

python train.py --config configs/llama31_8b.py --config.data.train_file=prepared/llama31_8b
"""

from configs.qwen3_8b import get_config as qwen3_8b


def get_config():
    """The settings of qwen3_8b with another target and narrower blocks."""
    config = qwen3_8b()
    config.model.target = "meta-llama/Llama-3.1-8B-Instruct"
    config.model.mask_token_id = 128002  # <|reserved_special_token_0|>
    config.model.block_size = 10
    config.data.train_file = "prepared/llama31_8b"
    config.checkpoint.directory = "runs/llama31_8b"
    return config

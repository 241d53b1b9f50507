"""The drafter of configs/smollm2_longer.py, trained further on 2,400 other chats, twice over.

Reached an acceptance length of 1.89 on the 32 held-out chats on which it started from 1.81 (greedy, width 8, its draft
vocabulary of 4,096 tokens). It took 36 min on two cores of an AMD EPYC with AVX2 that did little else, features and two
evaluations included. This is the drafter in configs/drafters/smollm2. Run configs/smollm2_longer.py first.

    python train.py --config configs/smollm2_further.py
"""

from configs.smollm2_longer import get_config as longer


def get_config():
    """The settings of the longer run, from the drafter that it made, on chats that it has not seen."""
    config = longer()
    config.model.warm_start = "runs/smollm2_longer/drafter"
    config.data.train_file = "configs/data/smollm2_docstrings.more.jsonl.gz"
    config.data.max_length = 192
    config.data.length_buckets = (192,)
    config.training.steps = 1200
    config.training.narrow_steps = 600
    config.training.narrow_width = 4  # what decodes fastest on a CPU
    config.training.loss_decay_gamma = 2.0
    config.optimizer.learning_rate = 5e-4
    config.checkpoint.directory = "runs/smollm2_further"
    config.checkpoint.every_steps = 300
    config.evaluation.every_steps = 600
    config.evaluation.decode_every_steps = 600
    return config

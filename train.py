"""Trains a DFlash drafter.

    python train.py --config configs/smollm2_quickstart.py
    python train.py --config configs/smollm2_quickstart.py --config.optimizer.learning_rate=1e-3

The run's directory (config.checkpoint.directory) holds checkpoints/, metrics.jsonl and drafter/, the exported drafter
with the highest acceptance length so far. The same command again resumes a run that was cut short; SIGTERM or Ctrl-C
makes it save a checkpoint first. On several hosts start it once on each: docs/clusters.md.
"""

import logging
import sys

from dflash_jax.cli import ending_when_interrupted, exit_with, experiment_from_flags
from dflash_jax.cli_help import asks_for_help, help_on_fields
from dflash_jax.config import PARTS


@ending_when_interrupted()
def main(argv: list[str]) -> None:
    if asks_for_help(argv):
        print(__doc__, help_on_fields(PARTS), sep="\n")
        return
    logging.basicConfig(format="%(message)s")
    logging.getLogger("dflash_jax").setLevel(logging.INFO)  # and not the libraries, which tell of every file
    try:
        experiment = experiment_from_flags(argv)
    except ValueError as error:
        exit_with(error)
    from dflash_jax.evaluation.training_run import train
    from dflash_jax.processes import ending_at_once, is_first, join

    with ending_at_once(), ending_when_interrupted():
        try:
            join()
            if not is_first():
                logging.getLogger("dflash_jax").setLevel(logging.WARNING)
            outcome = train(experiment)
        except ValueError as error:  # wrong settings, files or data; anything else is a bug and keeps its traceback
            exit_with(error)
    if not outcome.finished or not is_first():
        return
    reached = "" if outcome.acceptance_length is None else f", acceptance length {outcome.acceptance_length:.2f}"
    print(f"drafter: {outcome.drafter_dir} ({outcome.steps} steps, {outcome.skipped} skipped{reached})")


if __name__ == "__main__":
    main(sys.argv)

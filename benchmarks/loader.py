"""How fast batches of a prepared set are read, with and without packing, and how much of them is padding.

    python benchmarks/loader.py --data sets/chats --length_buckets 512,1024,2048 --rows_per_step 4

Nothing is trained: the loader is asked for one batch after the other.
"""

import time

from absl import app, flags

from dflash_jax.cli import parsed_flags
from dflash_jax.data.loader import PreparedBatches
from dflash_jax.data.packing import PackedPlan
from dflash_jax.data.pipeline import EpochPlan
from dflash_jax.data.prepared import PreparedSplit

FLAGS = flags.FLAGS
flags.DEFINE_string("data", None, "Folder of a prepared set.", required=True)
flags.DEFINE_list("length_buckets", ["512", "1024", "2048", "3072"], "Padded lengths; packs have the last.")
flags.DEFINE_integer("rows_per_step", 4, "Rows, or packs, of a batch.", lower_bound=1)
flags.DEFINE_list("workers", ["0", "2"], "Numbers of worker processes that read ahead; 0: threads.")
flags.DEFINE_float("seconds", 10, "How long each way of reading is measured.")


def main(_):
    rows, buckets = PreparedSplit(FLAGS.data, "train"), [int(length) for length in FLAGS.length_buckets]
    for kind, plan in {"rows": EpochPlan, "packs": PackedPlan}.items():
        for workers in map(int, FLAGS.workers):
            batches = PreparedBatches(rows, FLAGS.rows_per_step, buckets, plan=plan, workers=workers)
            next(batches)  # workers have started
            steps, tokens, begun = 0, 0, time.perf_counter()
            while (seconds := time.perf_counter() - begun) < FLAGS.seconds:
                tokens += int(next(batches)["length_B"].sum())
                steps += 1
            rate, padding = steps * FLAGS.rows_per_step / seconds, batches.epochs.padding()
            print(
                f"{kind}, {workers} workers: {rate:,.0f} {kind} and {tokens / seconds:,.0f} tokens a second; "
                f"{padding:.1%} of the tokens of an epoch are padding"
            )


if __name__ == "__main__":
    app.run(main, flags_parser=parsed_flags)

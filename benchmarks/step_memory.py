"""Peak temporary memory of one compiled training step at several anchor counts, from the compiler; nothing is run.

    python benchmarks/step_memory.py --config configs/smollm2_quickstart.py --anchors 32 --anchors 128

Beside it: what the logits of all slots would take at once, which the chunked loss avoids.
"""

import dataclasses

import jax
import jax.numpy as jnp
from absl import app, flags

from dflash_jax.checkpoints.huggingface import load_target
from dflash_jax.cli import exit_with, load_config_file, parsed_flags
from dflash_jax.config import to_experiment
from dflash_jax.training.initialise import random_drafter
from dflash_jax.training.setup import drafter_config, step_settings
from dflash_jax.training.step import Batch, VocabularyTables, initial_state, make_optimizer, train_step

FLAGS = flags.FLAGS
flags.DEFINE_string("config", None, "Config file of a training run.", required=True)
flags.DEFINE_multi_integer("anchors", [32, 128], "Anchors a row.", lower_bound=1)
flags.DEFINE_integer("vocabulary", None, "Rows of the head, in the place of the target's: shows what depends on it.")
flags.DEFINE_enum("loss", "labels", ["labels", "teacher"], "Loss of the step.")


def main(_):
    try:
        experiment = to_experiment(load_config_file(FLAGS.config))
        experiment = dataclasses.replace(
            experiment, training=dataclasses.replace(experiment.training, loss=FLAGS.loss, random_cut=False)
        )
        target = load_target(experiment.model.target, dtype=experiment.model.target_dtype)
        config = drafter_config(experiment.model, target)
    except ValueError as error:
        exit_with(error)
    settings = step_settings(experiment, config)
    B, T = experiment.training.rows_per_step, experiment.data.length_buckets[-1]
    V, D, W = FLAGS.vocabulary or config.vocab_size, config.hidden_size, settings.width
    optimizer = make_optimizer(1e-3, 100, warmup_ratio=0.04, weight_decay=0.01, b1=0.9, b2=0.95, clip_norm=1.0)
    state = jax.eval_shape(lambda: initial_state(random_drafter(config, 0), optimizer))
    print(f"{jax.devices()[0].device_kind}: {B} rows × {T} tokens, width {W}, {settings.loss_chunk} slots a loss chunk")
    for anchors in FLAGS.anchors:
        compiled = train_step.lower(
            *(state, _tables(V, D, experiment.training.loss_tokens), _batch(B, T, len(config.target_layer_ids), D)),
            settings=settings._replace(anchors=anchors),
            optimizer=optimizer,
        ).compile()
        peak, slots = compiled.memory_analysis().temp_size_in_bytes, B * anchors * W
        logits = 4 * slots * V
        print(f"{anchors:4d} anchors: {peak / 2**20:8.1f} MiB of temporaries; all logits: {logits / 2**20:8.1f} MiB")


def _tables(V: int, D: int, S: int) -> VocabularyTables:
    table_VD = jax.ShapeDtypeStruct((V, D), jnp.float32)
    return VocabularyTables(table_VD, table_VD, jax.ShapeDtypeStruct((S, D), jnp.float32))


def _batch(B: int, T: int, M: int, D: int) -> Batch:
    abstract = jax.ShapeDtypeStruct
    tokens, mask, rows = abstract((1, B, T), jnp.int32), abstract((1, B, T), jnp.bool_), abstract((1, B), jnp.int32)
    return Batch(tokens, mask, rows, abstract((1, B, T, M, D), jnp.float32), abstract((1, B, T, D), jnp.float32))


if __name__ == "__main__":
    app.run(main, flags_parser=parsed_flags)

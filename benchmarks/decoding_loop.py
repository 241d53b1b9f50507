"""What a round of the decoding loop costs beside its parts: verify and draft, each a jitted call of its own.

    python benchmarks/decoding_loop.py --target smollm2-135m-instruct --drafter runs/smollm2_quickstart/drafter

Prints milliseconds, each the median of several repetitions, and the ratios that do not depend on the machine's speed.
"""

import statistics
import time

import jax
import jax.numpy as jnp
from absl import app, flags

from dflash_jax import load_drafter, load_target
from dflash_jax.cli import parsed_flags
from dflash_jax.decoding.flat import flatten
from dflash_jax.decoding.loop import LoopSettings, prefill, run_rounds
from dflash_jax.decoding.request import Options, cache_bucket, checked_options
from dflash_jax.models.proposal import NoDrafter, Proposal

FLAGS = flags.FLAGS
flags.DEFINE_string("target", "smollm2-135m-instruct", "Folder, hub id, or smollm2-135m-instruct.")
flags.DEFINE_string("drafter", None, "Drafter folder.", required=True)
flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "Of both models' parameters.")
flags.DEFINE_integer("prompt_length", 64, "Tokens of the prompt.", lower_bound=1)
flags.DEFINE_integer("rounds", 20, "Rounds of one repetition.", lower_bound=1)
flags.DEFINE_integer("repetitions", 7, "Repetitions of each timing.", lower_bound=1)


def main(_):
    loaded = load_target(FLAGS.target, dtype=FLAGS.dtype)
    target, drafter = loaded.model, load_drafter(FLAGS.drafter, target=loaded, dtype=FLAGS.dtype).model
    W, length = drafter.max_width, cache_bucket(FLAGS.prompt_length + FLAGS.rounds * drafter.max_width + 16)
    print(f"{jax.devices()[0].device_kind}, {FLAGS.dtype}, batch 1, cache {length} slots, width {W}")
    verify = {width: _verify(target, drafter, width, length) for width in sorted({1, W, 16})}
    draft = _draft(target, drafter, W, length)
    plain, speculative = (_round(target, model, width, length) for model, width in ((NoDrafter(), 1), (drafter, W)))
    for width, milliseconds in verify.items():
        print(f"verify({width:2d})          {milliseconds:8.2f} ms   {milliseconds / verify[1]:.2f} × verify(1)")
    print(f"draft({W:2d})           {draft:8.2f} ms")
    print(f"autoregressive step {plain:8.2f} ms   {plain / verify[1]:.2f} × verify(1)")
    print(f"speculative round   {speculative:8.2f} ms   {speculative / (verify[W] + draft):.2f} × (verify + draft)")
    print(f"break-even acceptance length {speculative / plain:.2f}")


def _verify(target, drafter, width: int, length: int) -> float:
    positions = FLAGS.prompt_length + jnp.arange(width)[None]

    def step(target, tokens, cache):
        hidden, taps, cache = target.forward(tokens, positions, cache, taps=drafter.tap_layers if width > 1 else ())
        return jnp.argmax(target.logits(hidden), -1), taps, cache

    donated = jax.jit(step, donate_argnums=2)
    cache, tokens = target.init_cache(1, length), jnp.ones((1, width), jnp.int32)

    def run():
        nonlocal cache
        chosen, _, cache = donated(target, tokens, cache)
        chosen.block_until_ready()

    return _median(run)


def _draft(target, drafter, width: int, length: int) -> float:
    """Absorbing the last round's features and proposing: what a drafter adds to a round."""
    position = jnp.full((1,), FLAGS.prompt_length)
    shape = (1, width, len(drafter.tap_layers), target.config.hidden_size)
    taps = jnp.ones(shape, target.dtype)

    def argmax(logits, _):
        return Proposal(jnp.argmax(logits, -1).astype(jnp.int32), None)

    def step(drafter, target, cache):
        cache = drafter.absorb(cache, taps, position[:, None] - width + jnp.arange(width), position)
        proposal = drafter.propose(target, cache, jnp.ones((1,), jnp.int32), position, argmax, width=width)
        return proposal.tokens, cache

    donated = jax.jit(step, donate_argnums=2)
    cache = drafter.init_cache(1, length)

    def run():
        nonlocal cache
        tokens, cache = donated(drafter, target, cache)
        tokens.block_until_ready()

    return _median(run)


def _round(target, drafter, width: int, length: int) -> float:
    """One round inside the compiled loop: a run of many, divided by their number."""
    prompt = jnp.ones((1, FLAGS.prompt_length), jnp.int32)
    settings, models = LoopSettings(width, ()), flatten(target, drafter)
    limit = jnp.array([length - width], jnp.int32)
    lengths = jnp.array([FLAGS.prompt_length], jnp.int32)

    def start():
        _, greedy = checked_options(Options(), 1, width)
        arguments = (prompt, lengths, limit, greedy)
        state, _ = prefill(target, drafter, *arguments, settings=settings, cache_length=length)
        return jax.block_until_ready(state)

    times = []
    for _ in range(FLAGS.repetitions + 1):
        state, clock = start(), time.perf_counter()
        state, _ = jax.block_until_ready(
            run_rounds(models, state, jnp.int32(FLAGS.rounds), jnp.int32(1), settings=settings)
        )
        times.append(1e3 * (time.perf_counter() - clock) / int(state.rounds[0]))
    return statistics.median(times[1:])


def _median(run) -> float:
    run()
    times = []
    for _ in range(FLAGS.repetitions):
        clock = time.perf_counter()
        for _ in range(FLAGS.rounds):
            run()
        times.append(1e3 * (time.perf_counter() - clock) / FLAGS.rounds)
    return statistics.median(times)


if __name__ == "__main__":
    app.run(main, flags_parser=parsed_flags)

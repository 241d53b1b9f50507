"""Whether the adaptive width keeps its promises: beside plain decoding and the fixed widths it chooses from.

    python benchmarks/adaptive_width.py --target smollm2-135m-instruct --drafter configs/drafters/smollm2 \\
        --prompts configs/data/smollm2_docstrings.heldout.jsonl.gz

The same prompts are decoded greedily, one by one, with the drafter as it is, and with proposals that are right in the
first k slots and wrong behind them, at the drafter's full cost: k = 0 never helps, k = width − 1 always does. The ways
of decoding take turns prompt by prompt, so that a machine whose speed drifts is as slow for one as for the others;
printed are sums over the prompts beside those of plain decoding, compilation left out. Every way decodes the first
prompt once before, which also tells the adaptive width what rounds cost. With --batch_size above 1 all prompts go in
one call, and the ways take turns call by call; of the rigged drafters only k = 0 is there.
"""

import collections
import dataclasses
import itertools
import statistics

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from tqdm import tqdm

from dflash_jax import generate, load_drafter, load_target
from dflash_jax.cli import parsed_flags
from dflash_jax.data.presets import read_prompts
from dflash_jax.data.prompts import encode_prompts
from dflash_jax.decoding.adaptive import candidate_widths
from dflash_jax.models.proposal import Proposal

LONGEST_PROMPT = 1024

FLAGS = flags.FLAGS
flags.DEFINE_string("target", "smollm2-135m-instruct", "Folder, hub id, or smollm2-135m-instruct.")
flags.DEFINE_string("drafter", None, "Drafter folder.", required=True)
flags.DEFINE_string("prompts", None, "JSON lines of prompts or chats.", required=True)
flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "Of both models' parameters.")
flags.DEFINE_integer("limit", 8, "Prompts.", lower_bound=1)
flags.DEFINE_integer("max_new_tokens", 96, "New tokens a prompt.", lower_bound=1)
flags.DEFINE_integer("rounds", 2, "How often every prompt is decoded in every way.", lower_bound=1)
flags.DEFINE_integer("batch_size", 1, "Rows decoded together.", lower_bound=1)
flags.DEFINE_list("right", None, "k of the rigged drafters; default: 0, 1 and width − 1, or 0 for batches.")


@jax.tree_util.register_pytree_node_class
class Rigged:
    """A drafter that does its work, and then says what a script and `right` make of it. One script for all rows."""

    def __init__(self, drafter, script_S: jax.Array, right: jax.Array):
        self.drafter, self.script_S, self.right = drafter, script_S, right
        self.tap_layers, self.max_width = drafter.tap_layers, drafter.max_width
        self.init_cache, self.absorb = drafter.init_cache, drafter.absorb

    def tree_flatten(self):
        return (self.drafter, self.script_S, self.right), None

    @classmethod
    def tree_unflatten(cls, _, leaves):
        return cls(*leaves)

    def propose(self, target, cache, anchor_B, position_B, draw, *, width: int) -> Proposal:
        own = self.drafter.propose(target, cache, anchor_B, position_B, draw, width=width)
        slots_V = jnp.arange(1, width)
        right_BV = self.script_S[position_B[:, None] + slots_V]
        # The drafter's own tokens are part of the wrong ones, so that they have to be computed.
        wrong_BV = (right_BV + 1 + own.tokens % 2) % target.config.vocab_size
        return Proposal(jnp.where(slots_V <= self.right, right_BV, wrong_BV).astype(own.tokens.dtype), None)


def main(_):
    if FLAGS.batch_size > 1 and any(right != "0" for right in FLAGS.right or ()):
        raise app.UsageError(f"--right={','.join(FLAGS.right)}: with --batch_size above 1 it can only be 0")
    target = load_target(FLAGS.target, dtype=FLAGS.dtype)
    drafter = load_drafter(FLAGS.drafter, target=target, dtype=FLAGS.dtype)
    conversations, report = read_prompts(FLAGS.prompts, limit=FLAGS.limit)
    encoded = encode_prompts(target.tokenizer, conversations, report, max_prompt_length=LONGEST_PROMPT)
    prompts = [prompt.ids for prompt in encoded]
    answers = [generate(target, [prompt], max_new_tokens=FLAGS.max_new_tokens)[0].tokens for prompt in prompts]
    W, rows = drafter.model.max_width, len(prompts)
    calls = [[row] for row in range(rows)] if FLAGS.batch_size == 1 else [list(range(rows))]
    calls = [([prompts[row] for row in call], [answers[row] for row in call]) for call in calls]
    rights = [int(right) for right in FLAGS.right or ([0, 1, W - 1] if FLAGS.batch_size == 1 else [0])]
    rigged = {
        f"right in {right}": dataclasses.replace(
            drafter, model=Rigged(drafter.model, _script(*calls[0], W), jnp.int32(right))
        )
        for right in rights
    }
    print(f"{jax.devices()[0].device_kind}, {FLAGS.dtype}, batch {FLAGS.batch_size}, greedy, {rows} prompts, ", end="")
    print(f"{FLAGS.max_new_tokens} new tokens each")
    for name, model in {"the drafter": drafter, **rigged}.items():
        _compare(name, target, model, calls)


def _compare(name: str, target, drafter, calls) -> None:
    """Prints seconds of every way to decode, over those of plain decoding, round by round."""
    ways = {"plain": None, **{f"width {width}": width for width in candidate_widths(drafter.model.max_width)[1:]}}
    ways["adaptive"] = "adaptive"
    seconds = {way: [0.0] * FLAGS.rounds for way in ways}
    tokens, rounds = collections.Counter(), collections.Counter()
    for way in ways:  # compiles what the first call needs; later ones are charged apart
        _decode(target, drafter, ways[way], *calls[0])
    for turn in tqdm(range(FLAGS.rounds * len(calls)), desc=name, leave=False):
        prompts, answers = calls[turn % len(calls)]
        for way, width in ways.items():
            results = _decode(target, drafter, width, prompts, answers)
            if [result.tokens for result in results] != answers:
                raise RuntimeError(f"{name}, {way}: the texts of call {turn % len(calls)} are not the target's own")
            seconds[way][turn // len(calls)] += results[0].stats.decode_seconds
            tokens[way] += sum(len(result.tokens) - 1 for result in results)  # the first one is the prefill's
            rounds[way] += sum(len(result.acceptance_lengths) for result in results)
    print(f"\n{name}\n  {'':10}  tokens a round   seconds   over plain, by round")
    for way in ways:
        over = [own / plain for own, plain in zip(seconds[way], seconds["plain"], strict=True)]
        print(f"  {way:10}  {tokens[way] / rounds[way]:14.2f}  {sum(seconds[way]):8.1f}   ", end="")
        print(f"{statistics.mean(over):.3f}  ({', '.join(f'{ratio:.3f}' for ratio in over)})")
    best = min(sum(seconds[way]) for way in ways if way != "adaptive")
    print(f"  adaptive takes {sum(seconds['adaptive']) / best:.3f} × the time of the best of the others")


def _decode(target, drafter, width, prompts, answers):
    options = {} if width is None else {"drafter": drafter, "width": width}
    if width is not None and isinstance(drafter.model, Rigged):
        drafter.model.script_S = _script(prompts, answers, drafter.model.max_width)
    return generate(target, prompts, max_new_tokens=FLAGS.max_new_tokens, batch_size=FLAGS.batch_size, **options)


def _script(prompts: list[list[int]], answers: list[list[int]], width: int) -> jax.Array:
    """Prompt and answer by position, or of several what no answer holds; of one length: one program serves all."""
    script_S = np.zeros(LONGEST_PROMPT + FLAGS.max_new_tokens + width, np.int32)
    if len(prompts) == 1:
        script_S[: len(prompts[0]) + len(answers[0])] = prompts[0] + answers[0]
    else:
        held = {token for answer in answers for token in answer}
        script_S[:] = next(token for token in itertools.count() if not held & {token + 1, token + 2})  # see propose
    return jnp.asarray(script_S)


if __name__ == "__main__":
    app.run(main, flags_parser=parsed_flags)

"""Decodes with a target and a DFlash drafter.

python infer.py --target smollm2-135m-instruct --drafter runs/smollm2_quickstart/drafter --prompt "What is a list?"
python infer.py … --compare                    also decodes without the drafter: speeds, acceptance, same text or not
python infer.py … --compare --require_same     exits with status 1 if the two texts differ

Wrong flags, files or checkpoints: status 2 and a message.
"""

import sys
from typing import Any

from absl import flags

from dflash_jax.cli import exit_with, run_command

FLAGS = flags.FLAGS
flags.DEFINE_string("target", None, "Folder, hub id, or smollm2-135m-instruct.", required=True)
flags.DEFINE_string("drafter", None, "Drafter folder or hub id; without it, plain autoregressive decoding.")
flags.DEFINE_string("prompt", None, "The user's message.", required=True)
flags.DEFINE_integer("max_new_tokens", 128, "Most tokens to produce.", lower_bound=0)
flags.DEFINE_float("temperature", 0.0, "0 is greedy.", lower_bound=0.0)
flags.DEFINE_integer("top_k", None, "Sample only from so many of the likeliest tokens; 0: all.", lower_bound=0)
flags.DEFINE_float("top_p", None, "Sample only from the likeliest tokens that together have this probability.")
flags.DEFINE_integer("seed", 0, "For sampling.", lower_bound=0)
flags.DEFINE_bool("draft_vocabulary", True, "Propose only the tokens that the drafter's folder lists, if it lists any.")
flags.DEFINE_string("width", None, "Block width, anchor included, or adaptive; default: the drafter's.")
flags.DEFINE_enum(
    "proposals",
    "argmax",
    ["argmax", "sampled"],
    "Propose the drafter's likeliest tokens, or draws of it.",
)
flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "Of both models' parameters.")
flags.DEFINE_integer("tensor_parallel", 1, "Devices to divide both models over.", lower_bound=1)
flags.DEFINE_bool("raw", False, "Take --prompt as it is, without the chat template.")
flags.DEFINE_bool("compare", False, "Also decode autoregressively, and report both.")
flags.DEFINE_bool("require_same", False, "Exit with status 1 when the two texts of --compare differ.")


def main() -> None:
    needed = (("compare", "drafter"), ("require_same", "compare"))
    for flag, other in needed:
        if FLAGS[flag].value and not FLAGS[other].value:
            exit_with(ValueError(f"--{flag} needs --{other}"))
    if not FLAGS.draft_vocabulary and not FLAGS.drafter:
        exit_with(ValueError("--nodraft_vocabulary needs --drafter"))
    if FLAGS.proposals == "sampled" and not FLAGS.drafter:
        exit_with(ValueError("--proposals=sampled needs --drafter"))
    if FLAGS.require_same and FLAGS.proposals == "sampled" and FLAGS.temperature > 0:
        exit_with(
            ValueError("--require_same needs --proposals=argmax: sampled proposals draw other texts, equally likely")
        )
    try:
        same = _run()
    except ValueError as error:
        exit_with(error)
    if FLAGS.require_same and not same:
        sys.exit(1)


def _run() -> bool:
    from dflash_jax import load_drafter, load_target, stream
    from dflash_jax.data.formats import check_text
    from dflash_jax.decoding.request import width_from_flag
    from dflash_jax.evaluation.compare import compare

    width = width_from_flag(FLAGS.width, drafted=bool(FLAGS.drafter))
    names = ("max_new_tokens", "temperature", "top_k", "top_p", "seed", "proposals")
    options = {name: FLAGS[name].value for name in names}
    _check_before_loading(width, options)
    placed: dict[str, Any] = {"dtype": FLAGS.dtype, "mesh": _mesh(FLAGS.tensor_parallel)}
    target = load_target(FLAGS.target, **placed)
    drafter = None
    if FLAGS.drafter:
        drafter = load_drafter(FLAGS.drafter, target=target, draft_vocabulary=FLAGS.draft_vocabulary, **placed)
    prompt = FLAGS.prompt
    if FLAGS.raw:
        if target.tokenizer is None:
            raise ValueError(f"target {target.source} has no tokenizer; --raw can't encode text")
        check_text(FLAGS.prompt, "--prompt")
        prompt = target.tokenizer.encode(FLAGS.prompt)
    text = stream(target, prompt, drafter=drafter, width=width, **options)
    print(_compiling(), file=sys.stderr, flush=True)
    for piece in text:
        print(piece, end="", flush=True)
    print()
    if not FLAGS.compare:
        return True
    if text.stats is not None:
        print(f"\nabove: {text.stats.compile_seconds:.1f} s compiling, the rest {text.stats.run_seconds:.1f} s")
    print("comparing: both ways are compiled, then timed …", file=sys.stderr, flush=True)
    comparison = compare(target, prompt, drafter, width=width, **options)
    print(f"\n{comparison.table()}")
    return comparison.same


def _compiling() -> str:
    """What to say before the first wait, which is mostly compilation."""
    import jax

    if jax.config.jax_compilation_cache_dir:  # pyright: ignore[reportAttributeAccessIssue]
        return "compiling what JAX_COMPILATION_CACHE_DIR does not hold yet …"
    return "compiling, which can take a minute or more, in every process unless JAX_COMPILATION_CACHE_DIR is set …"


def _check_before_loading(width, options: dict[str, Any]) -> None:
    """Raises ValueError for what two small files tell, before large ones are read."""
    import jax

    from dflash_jax.checkpoints.huggingface import read_drafter_config, read_target_config
    from dflash_jax.decoding.request import Options, checked_options

    models: list[Any] = [read_target_config(FLAGS.target)]
    trained = 1
    if FLAGS.drafter:
        models.append(read_drafter_config(FLAGS.drafter, models[0]))
        trained = models[1].block_size
    checked_options(Options(width=width, **options), 1, trained)
    devices, heads = FLAGS.tensor_parallel, [model.num_kv_heads for model in models]
    allowed = [n for n in range(1, min(heads) + 1) if not any(count % n for count in heads)]
    if devices not in allowed:
        raise ValueError(
            f"--tensor_parallel={devices}: must divide the key/value heads of the models "
            f"({', '.join(map(str, heads))}): {', '.join(map(str, allowed))}"
        )
    if devices > len(jax.devices()):
        raise ValueError(f"--tensor_parallel={devices}: there are {len(jax.devices())} devices")


def _mesh(devices: int):
    """The mesh for --tensor_parallel; None for one device."""
    import jax

    from dflash_jax.sharding import make_mesh

    return make_mesh(tensor=devices, devices=jax.devices()[:devices]) if devices > 1 else None


if __name__ == "__main__":
    run_command(main)

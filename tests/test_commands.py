"""The commands as a user runs them, one after the other: regenerate answers, train on them, decode with the drafter."""

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from absl.testing import flagsaver
from tiny_models import torch_target
from tiny_run import read_metrics, settings, write_config, write_rows
from tiny_tokenizer import tiny_tokenizer

import infer
from dflash_jax.cli import parsed_flags
from dflash_jax.data import chat
from dflash_jax.decoding.generate import Generation
from dflash_jax.decoding.stats import Stats, position_acceptance
from dflash_jax.evaluation.compare import Comparison

pytestmark = pytest.mark.usefixtures("compiled_programs")
ROOT = Path(__file__).parents[1]
PROMPT = "Name a colour."
THINGS = ("stone", "glass", "river", "chair", "light")
BUDGET = 24


def run(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8", check=False)


@dataclasses.dataclass(frozen=True)
class User:
    """A user's files; `trained` is what train.py said."""

    folder: Path
    twin: torch.nn.Module
    trained: subprocess.CompletedProcess

    @property
    def target(self) -> str:
        return f"--target={self.folder / 'target'}"

    @property
    def drafter(self) -> str:
        return f"--drafter={self.folder / 'run' / 'drafter'}"

    def infer(self, *flags: str) -> subprocess.CompletedProcess:
        return run("infer.py", self.target, f"--max_new_tokens={BUDGET}", *flags)

    def greedy(self, prompt: list[int]) -> str:
        """The text that torch decodes."""
        tokenizer = tiny_tokenizer("smollm2")
        with torch.no_grad():
            ids = self.twin.generate(
                torch.tensor([prompt]), max_new_tokens=BUDGET, do_sample=False, eos_token_id=tokenizer.eos_token_id
            )
        return tokenizer.decode(ids[0, len(prompt) :], skip_special_tokens=True)


def regenerate(folder: Path) -> tuple[Path, Path]:
    """Answers of the target to 20 prompts, four of them held out."""
    prompts, out = folder / "prompts.jsonl", folder / "answers.jsonl"
    things = [f"a {colour} {thing}" for colour in ("red", "blue", "green", "pale") for thing in THINGS]
    rows = [{"id": thing, "messages": [{"role": "user", "content": f"Tell me about {thing}."}]} for thing in things]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = [f"--target={folder / 'target'}", f"--prompts={prompts}", f"--out={out}", "--max_new_tokens=20"]
    made = run("-m", "dflash_jax.data.regenerate", *flags)
    assert made.returncode == 0, made.stderr
    answers = [json.loads(line) for line in out.read_text().splitlines()]
    return write_rows(folder / "chats.jsonl", answers[:16]), write_rows(folder / "heldout.jsonl", answers[16:])


@pytest.fixture(scope="module")
def user(tmp_path_factory) -> User:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("a user's folder")  # with a space in its name
    tokenizer = tiny_tokenizer("smollm2")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
    twin = torch_target("llama", tied=True, vocab_size=len(tokenizer) + 3, **sizes)
    twin.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    chats, heldout = regenerate(folder)
    experiment = settings(
        *(folder / "target", chats, folder / "run"),
        data__heldout_file=str(heldout),
        data__max_length=64,
        data__length_buckets=(64,),
        model__mask_token_id=len(tokenizer) + 1,  # in the padded tail of the embedding
        model__initialisation="target",
        evaluation__decode_batch_size=4,
    )
    config = write_config(folder / "experiment.py", experiment)
    trained = run("train.py", "--config", str(config), "--config.training.steps=12", "--config.logging.every_steps=4")
    return User(folder, twin, trained)


def test_train_says_what_it_does_and_leaves_a_drafter(user):
    assert user.trained.returncode == 0, user.trained.stderr
    lines = read_metrics(user.folder / "run")
    assert [(line["kind"], line["step"]) for line in lines] == [
        *(("train", step) for step in (4, 8, 12)),
        ("evaluation", 12),
    ]
    reached = lines[-1]["acceptance_length"]
    drafter = user.folder / "run" / "drafter"
    assert user.trained.stdout.endswith(f"drafter: {drafter} (12 steps, 0 skipped, acceptance length {reached:.2f})\n")
    assert sorted(path.name for path in drafter.iterdir()) == ["config.json", "model.safetensors", "training.json"]
    made_with = json.loads((drafter / "training.json").read_text())
    assert made_with["target"] == "target"  # without the path on this machine
    # write_rows copied the answers without the record of how they were made
    assert made_with["template_arguments"] is None
    for part in ("loss decay gamma", "16 rows", "12 steps of 4 rows × 6 anchors", "loss ", "tok/s"):
        assert part in user.trained.stderr
    assert "heckpoint" not in user.trained.stderr  # the libraries keep their diaries to themselves


def test_infer_streams_the_targets_own_greedy_text(user):
    expected = user.greedy(
        chat.render(tiny_tokenizer("smollm2"), [{"role": "user", "content": PROMPT}], add_generation_prompt=True)
    )
    plain = user.infer(f"--prompt={PROMPT}")
    assert (plain.returncode, plain.stdout) == (0, expected + "\n"), plain.stderr
    assert re.fullmatch("compiling, .* JAX_COMPILATION_CACHE_DIR .*…\n|compiling what .* hold yet …\n", plain.stderr)
    drafted = user.infer(f"--prompt={PROMPT}", user.drafter, "--compare", "--require_same", "--width=3")
    assert drafted.returncode == 0, drafted.stderr
    assert drafted.stdout.startswith(expected + "\n")
    table = {line[:18].strip(): line[18:].split() for line in drafted.stdout[len(expected) :].splitlines()}
    assert table["identical tokens"] == ["yes"]
    assert table["autoregressive"][0] == table["DFlash, width 3"][0]  # tokens
    assert float(table["acceptance length"][0]) >= 1
    assert len(table["accepted by slot"]) == 2  # a width of 3 proposes 2


def test_widths_of_plain_decoding_need_no_drafter(user, capsys):
    said = []
    for flags in ([], ["--width=adaptive"], ["--width=1"]):
        with flagsaver.flagsaver():
            run_infer(["infer.py", user.target, f"--prompt={PROMPT}", "--max_new_tokens=4", *flags])
        said.append(capsys.readouterr().out)
    assert said[0] and said == [said[0]] * 3


def test_raw_prompts_are_taken_as_they_are(user):
    text = "red blue green"
    expected = user.greedy(tiny_tokenizer("smollm2").encode(text))
    raw = user.infer(f"--prompt={text}", "--raw", user.drafter)
    assert (raw.returncode, raw.stdout) == (0, expected + "\n"), raw.stderr


WRONG_FLAGS = [
    (["--compare"], "--compare needs --drafter"),
    (["--width=2"], "--width=2 needs --drafter; without one nothing is proposed"),
    (["{drafter}", "--require_same"], "--require_same needs --compare"),
    (["--max_new_tokens=-1"], "--max_new_tokens=-1: -1 is not a non-negative integer"),
    (["--temperature=warm"], "--temperature=warm"),
    (["--top_p=1.5"], "top_p=1.5 must be a number above 0 and at most 1"),
    (["--top_k=-1"], "--top_k=-1"),
    (["--proposals=sampled"], "--proposals=sampled needs --drafter"),
    (["--nodraft_vocabulary"], "--nodraft_vocabulary needs --drafter"),
    (
        ["{drafter}", "--compare", "--require_same", "--proposals=sampled", "--temperature=1"],
        "--require_same needs --proposals=argmax",
    ),
    (["--dtype=int4"], "--dtype=int4: value should be one of <float32|bfloat16>"),
    (["--tempreature=1"], "Unknown command line flag 'tempreature'. Did you mean: temperature"),
    (["more"], "unknown arguments: more"),
    (["--target=absent"], "'absent' is neither an existing folder"),
    (["--drafter={target}"], "DFlashDraftModel"),
    (["{drafter}", "--width=9"], "width=9 must be 'adaptive' or between 1 and 4"),
    (["{drafter}", "--width=wide"], "--width=wide: give a number of slots, or adaptive"),
    (["--drafter=absent"], "'absent' is neither an existing folder, nor a hub id like 'org/name'; a drafter is"),
    (["--tensor_parallel=3"], "--tensor_parallel=3: must divide the key/value heads of the models (2): 1, 2"),
    (["{drafter}", "--tensor_parallel=4"], "--tensor_parallel=4: must divide the key/value heads of the models (2, 2)"),
    (["--tensor_parallel=2"], "--tensor_parallel=2: there are 1 devices"),
    (["--raw", "--prompt="], "is empty; decoding needs at least one token"),
]


def filled_in(user, flags: list[str]) -> list[str]:
    places = {"drafter": user.drafter, "target": user.folder / "target"}
    return [f"--prompt={PROMPT}", *(flag.format(**places) for flag in flags)]


def run_infer(line: list[str]) -> None:
    parsed_flags(line)
    infer.main()


@pytest.mark.parametrize(("flags", "message"), WRONG_FLAGS)
def test_wrong_flags_are_one_message_and_status_2(user, flags, message, capsys):
    """In this process: starting Python costs most of each case."""
    line = ["infer.py", user.target, f"--max_new_tokens={BUDGET}", *filled_in(user, flags)]
    with flagsaver.flagsaver(), pytest.raises(SystemExit) as left:
        run_infer(line)
    assert left.value.code == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.startswith("error: ")


@pytest.mark.parametrize(
    "flags",
    [["--top_p=1.5"], ["{drafter}", "--width=9"], ["--tensor_parallel=3"], ["--drafter={target}"]],
)
def test_the_target_is_not_loaded_for_wrong_flags(user, flags, monkeypatch):
    monkeypatch.setattr("dflash_jax.load_target", lambda *_, **__: pytest.fail("loaded"))
    with flagsaver.flagsaver(), pytest.raises(SystemExit):
        run_infer(["infer.py", user.target, *filled_in(user, flags)])


@pytest.mark.parametrize(
    ("flags", "message"),
    [(["--tempreature=1"], "Did you mean: temperature"), (["{drafter}", "--width=9"], "width=9 must be 'adaptive' or")],
)
def test_a_shell_sees_the_message_and_the_status(user, flags, message):
    failed = user.infer(*filled_in(user, flags))
    assert failed.returncode == 2
    assert message in failed.stderr
    assert failed.stderr.startswith("error: ")
    assert "Traceback" not in failed.stderr


def test_flags_that_are_needed_are_named():
    failed = run("infer.py")
    assert failed.returncode == 2
    assert "--target" in failed.stderr
    assert "--prompt" in failed.stderr


@pytest.mark.parametrize(("same", "status"), [(True, None), (False, 1)])
def test_require_same_fails_when_texts_differ(monkeypatch, same, status):
    monkeypatch.setattr(infer, "_run", lambda: same)
    infer.FLAGS(["infer.py", "--target=t", "--prompt=p"])
    with flagsaver.flagsaver(drafter="d", compare=True, require_same=True):
        if status is None:
            infer.main()
        else:
            with pytest.raises(SystemExit) as left:
                infer.main()
            assert left.value.code == status


def generation(rounds: list[tuple[int, int]], seconds: float, width: int) -> Generation:
    """13 tokens that took so many seconds, from (accepted, verified) of each round."""
    accepted, verified = map(list, zip(*rounds, strict=True))
    stats = Stats(0.25, 0.5, seconds, 0.0, 12, {width: len(rounds)}, position_acceptance(rounds))
    return Generation(list(range(13)), "", 7, accepted, verified, "length", stats)


def test_the_comparison_says_what_was_measured():
    plain = generation([(1, 1)] * 12, 6.0, width=1)
    drafted = generation([(4, 4), (2, 4), (3, 4), (3, 3)], 3.0, width=4)
    comparison = Comparison(drafted, plain, width=4)
    assert comparison.same
    table = {line[:18].strip(): line[18:].split() for line in comparison.table().splitlines()}
    assert table["autoregressive"] == ["13", "6.00", "2.0", "12", "0.250", "s"]
    assert table["DFlash, width 4"] == ["13", "3.00", "4.0", "4", "0.250", "s"]
    assert table["speedup"] == ["2.00"]
    assert table["acceptance length"][0] == "3.00"
    assert table["acceptance length"][-1] == "1.50"  # a round costs 0.75 s, a plain token 0.5 s
    assert table["accepted/drafted"] == ["0.67"]
    assert table["accepted by slot"] == ["1.00", "0.75", "0.33"]  # the last round had no room for slot 3
    assert table["identical tokens"] == ["yes"]

    mixed = dataclasses.replace(drafted.stats, rounds_by_width={2: 1, 4: 3})
    adaptive = Comparison(dataclasses.replace(drafted, stats=mixed), plain, width="adaptive")
    table = {line[:18].strip(): line[18:].split() for line in adaptive.table().splitlines()}
    assert table["DFlash, adaptive"] == ["13", "3.00", "4.0", "4", "0.250", "s"]
    assert table["accepted/drafted"] == ["0.80"]
    assert table["rounds by width"] == ["2:", "1", "4:", "3"]

    other = Comparison(dataclasses.replace(drafted, tokens=[0] * 13), plain, width=4)
    assert not other.same
    assert other.table().endswith("identical tokens   NO")
    drawn = dataclasses.replace(other, drawn=True)
    assert drawn.table().endswith("identical tokens   no: sampled proposals draw other texts, equally likely")
    assert dataclasses.replace(comparison, drawn=True).table().endswith("identical tokens   yes")

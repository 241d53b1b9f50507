"""The check for losslessness finds what it looks for: nothing, a first difference, its margin; and its status."""

import dataclasses
import json
import subprocess
import sys
import types
from pathlib import Path

import jax
import numpy as np
import pytest
from small_models import random_drafter, random_target

from dflash_jax.evaluation import lossless

ROOT = Path(__file__).parents[1]
TARGET = random_target()
PROMPTS = np.random.default_rng(0).integers(0, 59, (5, 7)).tolist()
OPTIONS = {"max_new_tokens": 9, "width": None, "batch_size": 2}


def test_a_lossless_loop_shows_no_difference(capsys):
    assert lossless.differences(TARGET, random_drafter(TARGET.config), PROMPTS, **OPTIONS) == []
    said = capsys.readouterr().err
    assert "plain: 100%" in said and "with the drafter: 100%" in said


def other_tokens(monkeypatch, changes: dict[int, tuple[int, list[int]]]) -> None:
    """Row → from which new token on it has others with the drafter, and which."""
    right = lossless.generate

    def changed(target, prompts, **options):
        rows = right(target, prompts, **options)
        for row, (first, tokens) in changes.items() if options.get("drafter") is not None else ():
            rows[row] = dataclasses.replace(rows[row], tokens=rows[row].tokens[:first] + tokens)
        return rows

    monkeypatch.setattr(lossless, "generate", changed)


def test_the_first_difference_is_found_with_its_margin(monkeypatch):
    drafter = random_drafter(TARGET.config)
    plain = [row.tokens for row in lossless.generate(TARGET, PROMPTS, max_new_tokens=9, batch_size=2)]
    other_tokens(monkeypatch, {1: (8, []), 3: (4, [1 + plain[3][4], 1 + plain[3][5]])})
    short, wrong = lossless.differences(TARGET, drafter, PROMPTS, **OPTIONS)
    assert (short.prompt, short.index, short.plain, short.drafted) == (1, 8, plain[1][8], None)
    assert short.apart == short.size == float("inf")
    assert (wrong.prompt, wrong.index, wrong.plain, wrong.drafted) == (3, 4, plain[3][4], plain[3][4] + 1)
    prefix = PROMPTS[3] + plain[3][:4]
    hidden_1TD, _, _ = jax.jit(TARGET.model.forward)(np.array([prefix]), np.arange(len(prefix))[None])
    logits_V = np.asarray(TARGET.model.logits(hidden_1TD[0, -1]))
    second, best = np.sort(logits_V)[-2:]
    assert wrong.margin == pytest.approx(best - second, abs=1e-4)
    assert wrong.apart == pytest.approx(best - logits_V[wrong.drafted], abs=1e-4)
    text = lossless.report([short, wrong], 5, epsilon=wrong.size / 2)
    assert "prompt 3: new token 4" in text and "ABOVE EPSILON" in text and "3 of 5 prompts identical" in text


def test_only_what_rounding_can_do_passes():
    """Not a token that the target ranks third where its two best are close, nor a text that ends early."""
    tie = lossless.Difference(0, 2, 7, 8, margin=0.2, apart=0.2)
    third = lossless.Difference(0, 2, 7, 9, margin=0.01, apart=0.4)
    neither = lossless.Difference(0, 2, 8, 9, margin=0.4, apart=0.01)
    ended = lossless.Difference(0, 2, 7, None, margin=0.01, apart=float("inf"))
    half = lossless.EPSILON["bfloat16"]
    assert lossless.passes([tie], half) and lossless.passes([], half) and lossless.passes([], None)
    for other in (third, neither, ended):
        assert not lossless.passes([tie, other], half)
    assert not lossless.passes([tie], lossless.EPSILON["float32"]) and lossless.passes([tie], 0.2)


@pytest.mark.parametrize(
    ("dtype", "size", "status"),
    [("float32", None, 0), ("float32", 0.0, 1), ("bfloat16", None, 0), ("bfloat16", 0.29, 0), ("bfloat16", 0.31, 1)],
)
def test_the_status_is_the_verdict(monkeypatch, capsys, tmp_path, dtype, size, status):
    """size: of a difference in the second usable row; None: there is none. The first row of the file is broken."""
    target = dataclasses.replace(TARGET, tokenizer=object())
    drafter, loaded = random_drafter(TARGET.config), []
    huggingface, prompts = "dflash_jax.checkpoints.huggingface", "dflash_jax.data.prompts"
    monkeypatch.setattr(f"{huggingface}.read_target_config", lambda _: TARGET.config)
    monkeypatch.setattr(f"{huggingface}.read_drafter_config", lambda *_: drafter.config)
    monkeypatch.setattr(f"{huggingface}.load_target", lambda _, dtype: loaded.append(dtype) or target)
    monkeypatch.setattr(f"{huggingface}.load_drafter", lambda _, target, dtype: loaded.append(dtype) or drafter)
    monkeypatch.setattr(f"{prompts}.chat_template.check_safe", lambda _: None)
    monkeypatch.setattr(f"{prompts}.chat.render", lambda _, messages, **__: [int(messages[0]["content"])])
    found = [] if size is None else [lossless.Difference(1, 4, 7, 8, size, size)]
    asked = []
    monkeypatch.setattr(lossless, "differences", lambda _, __, ids, **___: asked.extend(ids) or found)
    chats = [{"messages": [{"role": "user", "content": str(token)}]} for token in (5, 6, 7)]
    rows = ["{", *map(json.dumps, chats)]
    (tmp_path / "p.jsonl").write_text("\n".join(rows))
    flag = {"target": "t", "drafter": "d", "prompts": str(tmp_path / "p.jsonl"), "limit": 9, "max_new_tokens": 9}
    flag |= {"batch_size": 2, "width": None, "dtype": dtype, "epsilon": None}
    monkeypatch.setattr(lossless.flags, "FLAGS", types.SimpleNamespace(**flag))
    with pytest.raises(SystemExit) as left:
        lossless.main()
    assert left.value.code == status and loaded == [dtype, dtype] and asked == [[5], [6], [7]]
    said = capsys.readouterr()
    assert ("prompt 3: new token 4" in said.out) == (size is not None)  # the row of the file
    assert ("WRONG" in said.out or "ABOVE EPSILON" in said.out) == bool(status)
    assert said.out.endswith(": NOT lossless\n" if status else ": lossless\n")
    assert f"{3 - len(found)} of 3 prompts identical" in said.out and "1" in said.err and "JSON" in said.err


def test_a_bfloat16_loop_is_lossless_but_for_near_ties():
    target = random_target(factor=4.0)
    drafter = random_drafter(target.config)
    target, drafter = (
        dataclasses.replace(loaded, model=jax.tree.map(lambda leaf: leaf.astype("bfloat16"), loaded.model))
        for loaded in (target, drafter)
    )
    found = lossless.differences(target, drafter, PROMPTS, **OPTIONS | {"max_new_tokens": 40})
    assert lossless.passes(found, lossless.EPSILON["bfloat16"])


def test_a_width_beyond_the_trained_one_is_refused_before_anything_is_decoded(monkeypatch):
    drafter = random_drafter(TARGET.config)
    monkeypatch.setattr(lossless, "generate", lambda *_, **__: pytest.fail("decoded"))
    with pytest.raises(ValueError, match="width=9 must be 'adaptive' or between 1 and"):
        lossless.differences(TARGET, drafter, PROMPTS, **OPTIONS | {"width": 9})


def test_more_new_tokens_than_the_context_holds_are_refused(monkeypatch):
    nothing_loads(monkeypatch)
    context = TARGET.config.max_position_embeddings
    flag = types.SimpleNamespace(target="t", drafter="d", dtype="float32", width=None, max_new_tokens=context)
    with pytest.raises(ValueError, match=f"--max_new_tokens={context}: must be below {context}, the context that"):
        lossless._run(flag)


def test_a_width_is_refused_before_anything_is_loaded(monkeypatch):
    nothing_loads(monkeypatch)
    flag = types.SimpleNamespace(target="t", drafter="d", dtype="float32", width="5", max_new_tokens=9)
    with pytest.raises(ValueError, match="width=5 must be 'adaptive' or between 1 and 4"):
        lossless._run(flag)


def nothing_loads(monkeypatch) -> None:
    huggingface = "dflash_jax.checkpoints.huggingface"
    monkeypatch.setattr(f"{huggingface}.read_target_config", lambda _: TARGET.config)
    monkeypatch.setattr(f"{huggingface}.read_drafter_config", lambda *_: random_drafter(TARGET.config).config)
    for load in ("load_target", "load_drafter"):
        monkeypatch.setattr(f"{huggingface}.{load}", lambda *_, **__: pytest.fail("loaded"))


def test_wrong_files_end_with_status_2():
    command = [sys.executable, "-m", "dflash_jax.evaluation.lossless", "--target", "absent", "--drafter", "absent"]
    done = subprocess.run([*command, "--prompts", "absent"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "error: " in done.stderr and "absent" in done.stderr

"""The check for losslessness finds what it looks for: nothing, a first difference, its margin; and its status."""

import dataclasses
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


def test_the_first_difference_is_found_with_its_margin(monkeypatch):
    drafter = random_drafter(TARGET.config)
    right = lossless.generate

    def one_wrong(target, prompts, **options):
        rows = right(target, prompts, **options)
        if options.get("drafter") is not None:
            tokens = list(rows[3].tokens)
            tokens[4:6] = [1 + tokens[4], 1 + tokens[5]]
            rows[3] = dataclasses.replace(rows[3], tokens=tokens)
            rows[1] = dataclasses.replace(rows[1], tokens=rows[1].tokens[:-1])
        return rows

    monkeypatch.setattr(lossless, "generate", one_wrong)
    short, wrong = lossless.differences(TARGET, drafter, PROMPTS, **OPTIONS)
    plain = [row.tokens for row in right(TARGET, PROMPTS, max_new_tokens=9, batch_size=2)]
    assert (short.prompt, short.index, short.plain, short.drafted) == (1, 8, plain[1][8], None)
    assert (wrong.prompt, wrong.index, wrong.plain, wrong.drafted) == (3, 4, plain[3][4], plain[3][4] + 1)
    prefix = PROMPTS[3] + plain[3][:4]
    hidden_1TD, _, _ = jax.jit(TARGET.model.forward)(np.array([prefix]), np.arange(len(prefix))[None])
    second, best = np.sort(np.asarray(TARGET.model.logits(hidden_1TD[0, -1])))[-2:]
    assert wrong.margin == pytest.approx(best - second, abs=1e-4)
    text = lossless.report([short, wrong], 5, epsilon=wrong.margin / 2)
    assert "prompt 3: new token 4" in text and "ABOVE EPSILON" in text and "3 of 5 prompts identical" in text


def test_a_width_beyond_the_trained_one_is_refused_before_anything_is_decoded(monkeypatch):
    drafter = random_drafter(TARGET.config)
    monkeypatch.setattr(lossless, "generate", lambda *_, **__: pytest.fail("decoded"))
    with pytest.raises(ValueError, match="width=9 must be 'adaptive' or between 1 and"):
        lossless.differences(TARGET, drafter, PROMPTS, **OPTIONS | {"width": 9})


def test_more_new_tokens_than_the_context_holds_are_refused(monkeypatch):
    monkeypatch.setattr("dflash_jax.checkpoints.huggingface.load_target", lambda *_, **__: TARGET)
    monkeypatch.setattr("dflash_jax.checkpoints.huggingface.load_drafter", lambda *_, **__: pytest.fail("loaded"))
    context = TARGET.config.max_position_embeddings
    flag = types.SimpleNamespace(target="t", drafter="d", dtype="float32", max_new_tokens=context)
    with pytest.raises(ValueError, match=f"--max_new_tokens={context}: must be below {context}, the context that"):
        lossless._run(flag)


def test_wrong_files_end_with_status_2():
    command = [sys.executable, "-m", "dflash_jax.evaluation.lossless", "--target", "absent", "--drafter", "absent"]
    done = subprocess.run([*command, "--prompts", "absent"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "error: " in done.stderr and "absent" in done.stderr

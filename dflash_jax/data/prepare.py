"""Prepares chats for training: rendered, masked, tokenised and stored for one target, with a report on every row.

    python -m dflash_jax.data.prepare --target Qwen/Qwen3-8B --chats chats.jsonl.gz --out sets/chats
    python -m dflash_jax.data.prepare --target DIR --chats ultrachat --out sets/ultrachat \
        --template_arguments '{"enable_thinking": false}' --max_length 3072 --preview 2 --workers 8

--chats is a file, a folder, a hub id, or the name of a known set (data/presets.py), in any form of data/formats.py.
Regenerated chats and rows that are tokenised already are taken token for token. Train on the result with
--config.data.train_file=sets/chats. Rows are assigned to the splits "train" and "heldout" by a hash of how they begin,
so that chats with one prompt stand on the same side; a "split" in the row comes first.
"""

import dataclasses
import hashlib
import itertools
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from absl import flags

from dflash_jax.cli import exit_with, run_command
from dflash_jax.data import files, presets, records
from dflash_jax.data.chat_template import arguments_from_flag
from dflash_jax.data.prepared import PreparedRow, write_prepared
from dflash_jax.data.preview import preview, wants_colour
from dflash_jax.data.provenance import check_made_for, file_hash, meta_path, tokenizer_hash
from dflash_jax.data.report import ReadReport
from dflash_jax.data.rows import TOGETHER, Source, make_rows
from dflash_jax.data.turns import TurnRenderer
from dflash_jax.data.workers import map_in_order, spare_collector

IN_SPLIT = 'training rows in the split "{}"'
NO_HELDOUT = (
    'no chat fell to the split "heldout": raise --heldout (where rows name no split themselves), or train with '
    "--config.data.heldout_file='', which evaluates nothing"
)
_SPLIT_NAME = re.compile(r"(?!all$)[a-z][a-z0-9_]*")


@dataclasses.dataclass(frozen=True)
class PrepareSettings:
    """What decides the rows of a set.

    heldout: share of the chats that goes to the split "heldout". seed: of the hash that assigns them.
    strict: write nothing when a row is skipped. limit: rows read. template_arguments: those of serving.
    """

    max_length: int = 3072
    template_arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    heldout: float = 0.02
    seed: int = 0
    strict: bool = False
    limit: int | None = None


def prepare(
    chats: str,
    out: str | Path,
    target: Any,
    settings: PrepareSettings,
    *,
    preset: str | None = None,
    workers: int = 0,
    show: Callable[[Any, Any], None] = lambda tokenizer, row: None,
) -> ReadReport:
    """Writes a prepared set.

    Args:
      chats: a file, a folder, a hub id, or the name of a known set.
      out: folder to write into.
      target: a TargetDescription: tokenizer, embedding_rows, fingerprint, source.
      settings: see there.
      preset: name of the known set that a local file or folder is of.
      workers: processes that render and tokenise; 0: this one. The set is the same for any number.
      show: is given the tokenizer and every row.

    Returns:
      What happened to every row.

    Raises:
      BadRowsError: strict, and there are bad rows; nothing is written.
      ValueError: sources or settings are wrong, the chats were made for another target, or no row is left.
    """
    found = presets.find_training_preset(preset, chats)
    paths = presets.find_files(chats, found)
    hash_of_tokenizer = tokenizer_hash(target.tokenizer)
    _check_regenerated(paths, target.fingerprint, hash_of_tokenizer, settings.template_arguments)
    provenance = {
        "target": target.source,
        "target_fingerprint": target.fingerprint,
        "tokenizer_sha256": hash_of_tokenizer,
        **dataclasses.asdict(settings),
        "chats": chats,
        "files": {path.name: file_hash(path) for path in paths},
    }
    report = ReadReport(f"{chats} → {out}")
    renderer = TurnRenderer(target.tokenizer, template_arguments=settings.template_arguments)
    make = _RowMaker(renderer, target.embedding_rows, found.id_field, settings)

    def rows() -> Iterator[PreparedRow]:
        for path in paths:
            left = None if settings.limit is None else settings.limit - report.rows_in
            for made, part in map_in_order(make, _pieces(path, left), workers):
                report.include(part)
                for prepared in made:
                    report.note(IN_SPLIT.format(prepared.split))
                    show(target.tokenizer, prepared.row)
                    yield prepared
        records.check_strict(report, settings.strict)
        if not report.rows_out:
            raise ValueError(f"no row is left to train on\n{report.table()}")

    write_prepared(out, rows(), provenance)
    return report


@dataclasses.dataclass(frozen=True)
class _RowMaker:
    """A piece of a file, as (its name, numbered rows), to training rows and what happened to the piece's rows."""

    renderer: TurnRenderer
    embedding_rows: int
    id_field: str
    settings: PrepareSettings

    def __call__(self, piece: tuple[str, list[tuple[int, Any]]]) -> tuple[list[PreparedRow], ReadReport]:
        file, numbered = piece
        report, settings = ReadReport(file), self.settings
        made = make_rows(
            records.parse_rows(numbered, _parse, report, id_field=self.id_field),
            report,
            max_length=settings.max_length,
            embedding_rows=self.embedding_rows,
            renderer=self.renderer,
        )
        rows = [
            PreparedRow(row, split_of(source, settings.heldout, settings.seed), file, source.line)
            for source, several in made
            for row in several
        ]
        return rows, report


def _pieces(path: Path, limit: int | None) -> Iterator[tuple[str, list[tuple[int, Any]]]]:
    numbered = itertools.islice(files.read_rows(path), limit)
    while piece := list(itertools.islice(numbered, TOGETHER)):
        yield path.name, piece


def split_of(source: Source, heldout: float, seed: int) -> str:
    """The split of a chat: its own if it has one, else by a hash of its first prompt."""
    if source.split:
        return source.split
    if isinstance(source, records.TokenisedRow):
        supervised = source.loss_mask.nonzero()[0]
        beginning = source.tokens[: supervised[0] if len(supervised) else None].tobytes()
    else:
        first = itertools.takewhile(lambda message: message["role"] != "assistant", source.messages)
        beginning = json.dumps([message["content"] for message in first]).encode()
    digest = hashlib.sha256(str(seed).encode() + b"\x1f" + beginning).digest()
    return "heldout" if int.from_bytes(digest[:8], "big") < heldout * 2**64 else "train"


def _parse(row: Mapping[str, Any], line: int, name: str) -> Source:
    split = row.get("split")
    if split and not _SPLIT_NAME.fullmatch(split):
        raise records.RowError('"split" is not a name of small letters, digits and _')
    return records.training_row_of(row, line, name)


def _check_regenerated(paths: list[Path], fingerprint: str, tokenizer_sha256: str, arguments: Mapping) -> None:
    """Refuses regenerated chats whose answers are those of another target, or of other template arguments."""
    for path in paths:
        if not meta_path(path).is_file():
            continue
        made = json.loads(meta_path(path).read_text())
        check_made_for(made, str(path), target_fingerprint=fingerprint, tokenizer_sha256=tokenizer_sha256)
        if made.get("template_arguments", {}) != dict(arguments):
            raise ValueError(
                f"{path} was regenerated with template_arguments={made.get('template_arguments')}, and "
                f"--template_arguments={json.dumps(dict(arguments))}; they must be the same, as in serving"
            )


def _define_flags() -> None:
    # Not at import: importing this module must not claim flag names in other programs.
    default = PrepareSettings()
    flags.DEFINE_string("target", None, "Hugging Face folder or hub id, or smollm2-135m-instruct.", required=True)
    flags.DEFINE_string("chats", None, "File, folder, hub id, or name of a known set.", required=True)
    flags.DEFINE_string("out", None, "Folder to write into.", required=True)
    flags.DEFINE_enum("preset", None, list(presets.PRESETS), "The known set that a local file is of.")
    flags.DEFINE_integer("max_length", default.max_length, "Longest row, in tokens.", lower_bound=2)
    flags.DEFINE_string("template_arguments", "{}", 'Chat template variables, JSON: {"enable_thinking": false}.')
    flags.DEFINE_float("heldout", default.heldout, "Share of the chats held out.", lower_bound=0, upper_bound=1)
    flags.DEFINE_integer("seed", default.seed, "Of the hash that assigns chats to splits.")
    flags.DEFINE_bool("strict", default.strict, "Write nothing when there are bad rows.")
    flags.DEFINE_integer("limit", default.limit, "Read no more than so many rows.", lower_bound=1)
    flags.DEFINE_integer("workers", 0, "Processes that render and tokenise; 0: this one alone.", lower_bound=0)
    flags.DEFINE_integer("preview", 0, "Show so many rows, what is supervised in colour.", lower_bound=0)


def _run(flag: flags.FlagValues) -> str:
    values: dict[str, Any] = {name: flag[name].value for name in ("max_length", "heldout", "seed", "strict", "limit")}
    settings = PrepareSettings(template_arguments=arguments_from_flag(flag.template_arguments), **values)

    # Imported here: `data` itself knows no model, only its commands do; and wrong flags are told without the wait.
    from dflash_jax.checkpoints.target_files import describe_target

    left = iter(range(flag.preview))

    def show(tokenizer, row) -> None:
        if next(left, None) is not None:
            print(preview(tokenizer, row, colour=wants_colour(sys.stdout)), end="\n\n")

    target = describe_target(flag.target)
    spare_collector()
    report = prepare(flag.chats, flag.out, target, settings, preset=flag.preset, workers=flag.workers, show=show)
    nothing_held_out = settings.heldout > 0 and IN_SPLIT.format("heldout") not in report.notes
    return report.table() + f"\n{NO_HELDOUT}" * nothing_held_out


def main() -> None:
    """Runs the command that the flags describe; an error of the user is one message, not a traceback."""
    try:
        print(_run(flags.FLAGS))
    except (ValueError, OSError) as error:
        exit_with(error)


if __name__ == "__main__":
    _define_flags()
    run_command(main)

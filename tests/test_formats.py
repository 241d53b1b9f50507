"""Files and forms of rows: every kind and compression gives the same rows, every form the same messages."""

import gzip
import json

import pyarrow
import pyarrow.parquet
import pytest

from dflash_jax.data import files, formats
from dflash_jax.data.formats import RowError

MESSAGES = [{"role": "user", "content": "Naïve?\n🎈"}, {"role": "assistant", "content": "Yes."}]
ROWS = [{"id": f"r{i}", "messages": MESSAGES} for i in range(700)]


def write(path, rows):
    """Writes rows in the kind and compression that the name says."""
    kind, compression = files.kind_of(path)
    if kind == ".parquet":
        sink = pyarrow.BufferOutputStream()
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), sink, compression="zstd")
        data = sink.getvalue().to_pybytes()
    elif kind == ".json":
        data = json.dumps(rows, indent=2, ensure_ascii=False).encode()
    else:
        data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    if compression == ".gz":
        data = gzip.compress(data)
    elif compression == ".zst":
        data = pyarrow.compress(data, codec="zstd", asbytes=True)
    path.write_bytes(data)
    return path


def parsed(path):
    return [(n, json.loads(row) if isinstance(row, bytes) else row) for n, row in files.read_rows(path)]


@pytest.mark.parametrize("compression", ["", ".gz", ".zst"])
@pytest.mark.parametrize("kind", files.KINDS)
def test_every_kind_and_compression_gives_the_same_rows(kind, compression, tmp_path):
    path = write(tmp_path / f"chats.v1{kind}{compression}", ROWS)
    assert parsed(path) == list(enumerate(ROWS, start=1))


def test_json_may_hold_lines_and_an_empty_array(tmp_path):
    path = tmp_path / "chats.json"
    path.write_text('\n{"a": 1}\n\n{"a": 2}\n')
    assert [row for _, row in parsed(path)] == [{"a": 1}, {"a": 2}]
    path.write_text(" [ ]\n")
    assert parsed(path) == []


@pytest.mark.parametrize("text", ['[{"a": 1}, {"a"', '[{"a": 1} {"a": 2}]', '[{"a": 1}', '[{"a": 1},]'])
def test_broken_arrays_name_the_last_whole_row(text, tmp_path):
    path = tmp_path / "chats.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"chats\.json can't be read to its end: broken JSON in the array after row 1"):
        parsed(path)


@pytest.mark.parametrize("name", ["c.jsonl.gz", "c.jsonl.zst", "c.parquet", "c.json.zst"])
@pytest.mark.parametrize("damage", ["cut", "other"])
def test_damaged_files_are_named(name, damage, tmp_path):
    path = write(tmp_path / name, ROWS)
    path.write_bytes(path.read_bytes()[:-20] if damage == "cut" else b"{}\n" * 40)
    with pytest.raises(ValueError, match=rf"{name} can't be read to its end"):
        parsed(path)


def test_forms_of_rows_give_the_same_messages():
    system = {"role": "system", "content": "Be brief."}
    prompt, answer = (message["content"] for message in MESSAGES)
    parts = [{"type": "text", "text": prompt[:3]}, {"type": "text", "text": prompt[3:]}]
    forms = [
        {"messages": MESSAGES},
        {"messages": [{"role": "user", "content": parts}, MESSAGES[1]], "prompt": "unused"},
        {"conversations": [{"from": "human", "value": prompt}, {"from": "gpt", "value": answer}]},
        {"conversations": MESSAGES},
        {"conversation": [{"role": "human", "content": prompt}, {"role": "assistant", "content": answer}]},
        {"instruction": prompt, "input": "", "output": answer},
        {"instruction": prompt, "response": answer},
        {"prompt": prompt, "completion": answer},
        {"messages": None, "prompt": prompt, "response": answer},  # as Parquet gives a field that a row lacks
    ]
    for row in forms:
        assert formats.messages_of(row) == MESSAGES, row
    assert formats.messages_of({"prompt": prompt}) == MESSAGES[:1]
    assert formats.messages_of({"instruction": "Add.", "input": "1, 2"})[0]["content"] == "Add.\n\n1, 2"
    assert formats.messages_of({"prompt": prompt, "system": "Be brief."}) == [system, MESSAGES[0]]
    assert formats.messages_of({"messages": [system, *MESSAGES]}) == [system, *MESSAGES]
    assert formats.messages_of({"messages": [{"role": "system", "content": ""}, *MESSAGES]}) == MESSAGES


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"conversations": [{"from": "gpt", "value": "x"}]}, "'assistant' where 'user' is due"),
        ({"conversations": [{"from": "function_call", "value": "x"}]}, "role 'function_call'; allowed are"),
        ({"conversations": "x"}, '"conversations" is not a list'),
        ({"conversations": ["x"]}, r"messages\[0\] has no role"),
        ({"conversations": [{"from": "human", "value": None}]}, "no text content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "type 'image_url'; only text"),
        ({"instruction": 5}, "no text content"),
        ({"prompt": "x", "response": ""}, r"messages\[1\] has no text content"),
        ({"messages": [{"role": "system", "content": ""}]}, "no text content"),
    ],
)
def test_what_is_wrong_with_a_row_is_said(row, reason):
    with pytest.raises(RowError, match=reason):
        formats.messages_of(row)


def test_tokenised_rows():
    row = {"input_ids": [5, 6, 7]}
    assert formats.tokens_and_mask(row | {"loss_mask": [0, 1, True]}) == ([5, 6, 7], [False, True, True])
    assert formats.tokens_and_mask(row | {"labels": [-100, -100, 7]}) == ([5, 6, 7], [False, False, True])
    for fields, reason in [
        ({}, "doesn't say what the target wrote"),
        ({"loss_mask": [0, 1]}, "as long as"),
        ({"loss_mask": [0, 1, 2]}, "something else than 0 and 1"),
        ({"labels": [6, 7, -100]}, '"labels" differ'),
        ({"input_ids": [1.0]}, "not a list of token ids"),
        ({"input_ids": [2**31]}, "not a list of token ids"),
    ]:
        with pytest.raises(RowError, match=reason):
            formats.tokens_and_mask(row | fields)

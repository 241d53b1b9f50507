"""Reading chats: bad rows are skipped, counted and named; training rows lose nothing without a report."""

import gzip
import json

import numpy as np
import pytest
from tiny_tokenizer import tiny_tokenizer

from dflash_jax.data import records, rows
from dflash_jax.data.turns import TurnRenderer

USER = {"role": "user", "content": "Name a colour."}
ANSWER = {"role": "assistant", "content": "Blue."}
SYSTEM = {"role": "system", "content": "Be brief."}

BAD = {
    "[]": "a list and not an object",
    '{"messages": []}': '"messages" is empty',
    '{"messages": {"role": "user"}}': '"messages" is not a list',
    '{"text": "hello"}': 'none of the fields "messages", ',
    json.dumps({"messages": [ANSWER, USER]}): r"messages\[0\] has role 'assistant' where 'user' is due",
    json.dumps({"messages": [SYSTEM]}): "nothing but a system message",
    json.dumps({"messages": [USER, USER]}): r"messages\[1\] has role 'user' where 'assistant' is due",
    json.dumps({"messages": [USER, SYSTEM, USER]}): r"messages\[1\] has role 'system' where 'assistant' is due",
    '{"messages": [{"role": "user", "content": "cut of': "broken JSON",
    "[" * 100_000: "broken JSON",
    json.dumps({"messages": [{"role": "tool", "content": "x"}]}): "allowed are system, user, assistant",
    json.dumps({"messages": [{"role": "user", "content": "  "}]}): r"messages\[0\] has no text content",
    json.dumps({"messages": [{"role": "user", "content": ["x"]}]}): r"messages\[0\] has no text content",
    json.dumps({"messages": ["hello"]}): r"messages\[0\] has no role",
    json.dumps({"id": ["x"], "messages": [USER]}): '"id" is neither',
    json.dumps({"id": "fine", "messages": [USER]}): "occurs twice",
    json.dumps(
        {"messages": [{"role": "user", "content": "cut \ud83d"}]}
    ): r"messages\[0\] holds half a character, '\\ud83d'",
    json.dumps(
        {"messages": [USER, {**ANSWER, "reasoning_content": "\ud83d"}]}
    ): r"messages\[1\] holds half a character",
    json.dumps({"id": "\ud83d", "messages": [USER]}): r'"id" holds half a character',
}


def _write(path, lines):
    data = "\n".join(lines).encode() + b"\n"
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def _chat(prompt_ids, answer_ids, name="a"):
    return records.Chat(7, name, None, [USER, ANSWER], prompt_ids, answer_ids, "stop")


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_bad_rows_are_skipped_counted_and_named(tmp_path, suffix):
    lines = [json.dumps({"id": "fine", "split": "train", "messages": [SYSTEM, USER]}), *BAD, ""]
    lines += [json.dumps({"messages": [USER, ANSWER, USER]})]
    path = _write(tmp_path / f"chats{suffix}", lines)
    kept, report = records.read_prompts(path)
    assert [(row.line, row.id, row.split) for row in kept] == [
        (1, "fine", "train"),
        (len(BAD) + 3, f"line-{len(BAD) + 3}", None),
    ]
    assert report.rows_in == len(BAD) + 2 == report.rows_out + len(report.skipped)
    assert [row.line for row in report.skipped] == list(range(2, len(BAD) + 2))
    for row, reason in zip(report.skipped, BAD.values(), strict=True):
        with pytest.raises(records.RowError, match=reason):
            raise records.RowError(row.reason)


def test_limit_stops_reading(tmp_path):
    path = _write(tmp_path / "chats.jsonl", ["[]", *[json.dumps({"messages": [USER]})] * 3])
    kept, report = records.read_prompts(path, limit=2)
    assert (len(kept), report.rows_in, len(report.skipped)) == (1, 2, 1)


def test_one_row_of_another_encoding_does_not_stop_the_reading(tmp_path):
    path = tmp_path / "chats.jsonl"
    path.write_bytes(b'{"messages": "\xff"}\n' + json.dumps({"messages": [USER]}).encode())
    kept, report = records.read_prompts(path)
    assert len(kept) == 1 and str(report.skipped[0]) == "row 1: not UTF-8 text"


def test_strict_raises_and_names_the_rows(tmp_path):
    path = _write(tmp_path / "chats.jsonl", [json.dumps({"messages": [USER]}), "[]", "{"])
    with pytest.raises(records.BadRowsError, match=r"(?s)2 bad rows.*row 2: a list.*row 3: broken JSON"):
        records.read_prompts(path, strict=True)
    fine = _write(tmp_path / "fine.jsonl", [json.dumps({"messages": [USER]})])
    assert len(records.read_prompts(fine, strict=True)[0]) == 1


def test_table_counts_reasons_and_lists_no_more_than_twenty_rows(tmp_path):
    path = _write(tmp_path / "chats.jsonl", [json.dumps({"messages": [USER]}), *["[]"] * 25, "{"])
    table = records.read_prompts(path)[1].table()
    lines = [" ".join(line.split()) for line in table.splitlines()]
    assert lines[1:3] == ["rows read 27", "rows kept 1"]
    assert lines[3:5] == [
        'skipped: a list and not an object with "messages" 25 rows 2, 3, 4, 5, 6, …',
        "skipped: broken JSON 1 row 27",
    ]
    assert sum(line.startswith("row ") for line in lines) == 20 and lines[-1] == "… and 6 more"


def test_answer_at_the_end_of_a_prompt_row_is_dropped_and_needed_in_a_conversation(tmp_path):
    path = _write(tmp_path / "c.jsonl", [json.dumps({"messages": [USER, ANSWER]}), json.dumps({"messages": [USER]})])
    assert [row.messages for row in records.read_prompts(path)[0]] == [[USER], [USER]]
    report = records.ReadReport("c.jsonl")
    kept = records.iterate(path, records.training_row_of, report)
    assert [row.messages for row in kept] == [[USER, ANSWER]]
    assert str(report.skipped[0]) == "row 2: the last message is not the assistant's"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"prompt_ids": None}, '"prompt_ids" is not a list of token ids'),
        ({"prompt_ids": [True]}, '"prompt_ids" is not a list of token ids'),
        ({"answer_ids": []}, '"answer_ids" is not a list of token ids'),
        ({"answer_ids": [-1]}, '"answer_ids" is not a list of token ids'),
        ({"answer_ids": [2**31]}, '"answer_ids" is not a list of token ids'),
        ({"finish_reason": "error"}, '"finish_reason" is neither "stop" nor "length"'),
        ({"messages": [USER]}, "the last message is not the assistant's"),
    ],
)
def test_regenerated_rows_are_checked(tmp_path, change, reason):
    row = {"messages": [USER, ANSWER], "prompt_ids": [1, 2], "answer_ids": [3], "finish_reason": "stop"} | change
    kept, report = records.read_chats(_write(tmp_path / "c.jsonl", [json.dumps(row)]))
    assert [r.reason for r in report.skipped] == ([reason] if reason else [])
    assert [(r.prompt_ids, r.answer_ids) for r in kept] == ([] if reason else [([1, 2], [3])])


def test_files_that_cannot_be_read_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"no file .*absent\.jsonl"):
        records.read_prompts(tmp_path / "absent.jsonl")
    with pytest.raises(ValueError, match=r"chats\.csv is not a \.jsonl"):
        records.read_prompts(tmp_path / "chats.csv")
    whole = gzip.compress(b'{"messages": []}\n' * 1000)
    for name, data in {"cut": whole[:-20], "other": b"{}\n", "damaged": whole[:20] + b"\0\0\0" + whole[23:]}.items():
        path = tmp_path / f"{name}.jsonl.gz"
        path.write_bytes(data)
        with pytest.raises(ValueError, match=rf"{name}\.jsonl\.gz can't be read to its end"):
            records.read_prompts(path)


def test_training_rows_are_prompt_and_answer_ids_unchanged():
    (row,), report = rows.rows_from_regenerated([_chat([5, 6, 7], [8, 9])], max_length=10)
    np.testing.assert_array_equal(row.tokens, [5, 6, 7, 8, 9])
    np.testing.assert_array_equal(row.loss_mask, [False, False, False, True, True])
    assert row.tokens.dtype == np.int32 and row.loss_mask.dtype == bool
    assert (report.rows_in, report.rows_out, report.truncated, report.skipped) == (1, 1, 0, [])


def test_rows_that_truncation_leaves_without_two_supervised_tokens_are_dropped_and_counted():
    lengths = {"kept": 2, "cut": 3, "one": 4, "none": 5}
    chats = [_chat([1] * n, [2, 3, 4], name) for name, n in lengths.items()] + [_chat([1], [2], "short")]
    kept, report = rows.rows_from_regenerated(chats, max_length=5)
    assert [(row.id, int(row.loss_mask.sum())) for row in kept] == [("kept", 3), ("cut", 2)]
    assert (report.rows_in, report.rows_out, report.truncated) == (5, 2, 1)
    assert [(row.id, row.line) for row in report.skipped] == [("one", 7), ("none", 7), ("short", 7)]
    assert report.skipped[0].reason == "fewer than 2 supervised tokens in a row in its first 5 tokens"
    assert report.skipped[2].reason == "fewer than 2 supervised tokens in a row"
    with pytest.raises(ValueError, match="max_length=1 "):
        rows.rows_from_regenerated(chats, max_length=1)


def test_ids_beyond_the_embedding_are_reported():
    kept, report = rows.rows_from_regenerated(
        [_chat([1], [2, 99]), _chat([1], [2, 100], "b"), _chat([1], [2, 2**31 - 1], "c")],
        max_length=5,
        embedding_rows=100,
    )
    assert [row.id for row in kept] == ["a"]
    assert [(row.id, "embedding of 100 rows" in row.reason) for row in report.skipped] == [("b", True), ("c", True)]


def test_rows_from_text_render_the_chat_and_report_what_the_template_refuses():
    tokenizer = tiny_tokenizer("qwen3")
    refusal = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    tokenizer.chat_template = refusal + tokenizer.chat_template
    chats = [
        records.Conversation(1, "a", None, [USER, ANSWER]),
        records.Conversation(2, "b", None, [SYSTEM, USER, ANSWER]),
        records.Conversation(3, "c", None, [USER, ANSWER, USER, ANSWER]),
        records.TokenisedRow(4, "d", None, np.arange(5), np.arange(5) > 2),
        _chat([1], [2, 3]),
    ]
    report = records.ReadReport("x", rows_in=len(chats))
    off = {"enable_thinking": False}
    renderer = TurnRenderer(tokenizer, template_arguments=off)
    made = list(rows.make_rows(chats, report, max_length=100, embedding_rows=1000, renderer=renderer))
    assert [[row.id for row in found] for _, found in made] == [["a"], ["c.0", "c.1"], ["d"], ["a"]]
    for _, found in made[:2]:
        assert tokenizer.decode(found[0].tokens[found[0].loss_mask]) == "Blue.<|im_end|>"
    assert made[2][1][0].tokens.tolist() == [0, 1, 2, 3, 4] and made[2][1][0].loss_mask.sum() == 2
    assert str(report.skipped[0]).startswith("row 2 (b): the chat template of 'tiny-qwen3'")
    assert "no system role" in report.skipped[0].reason
    assert report.rows_in == report.rows_out + len(report.skipped) == 5
    assert report.notes == {rows.REWRITTEN: 1}
    with pytest.raises(ValueError, match=r"row 1 \(a\) is text"):
        list(rows.make_rows(chats[:1], report, max_length=100))


def test_rows_that_differ_from_serving_are_noted_and_answers_beyond_the_cut_counted():
    tokenizer = tiny_tokenizer("qwen3")
    chats = [records.Conversation(1, "a", None, [USER, ANSWER, USER, ANSWER])]
    report = records.ReadReport("x", rows_in=1)
    ((_, (row,)),) = rows.make_rows(chats, report, max_length=100, renderer=TurnRenderer(tokenizer))
    assert report.notes == {rows.NOT_AS_SERVED: 1} and row.id == "a"
    report = records.ReadReport("x", rows_in=1)
    off = TurnRenderer(tokenizer, template_arguments={"enable_thinking": False})
    short, long = (len(row.tokens) for row in off.tokenise([off.render(chats[0].messages)])[0])
    ((_, (row,)),) = rows.make_rows(chats, report, max_length=(short + long) // 2, renderer=off)
    assert [n for text, n in report.notes.items() if text.startswith("answers left out: fewer than 2")] == [1]
    assert (report.rows_out, len(report.lengths), report.supervised) == (1, 1, int(row.loss_mask.sum()))

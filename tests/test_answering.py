"""Prompts answered into a file: each once, whatever kills the run; the file says what the target said."""

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from answer_runs import SETTINGS, answer_all
from tiny_tokenizer import tiny_tokenizer

from dflash_jax.data import answering, chat, records
from dflash_jax.data.answer_log import Answer, AnswerLog
from dflash_jax.data.chat_template import ChatTemplateError
from dflash_jax.data.prompts import encode_prompts, row_seed


class StubEngine:
    """Answers a group with the last prompt tokens reversed, then end of turn; every fifth is cut off by the budget."""

    def __init__(self, tokenizer, fail_after: int | None = None):
        self.stop = tokenizer.convert_tokens_to_ids("<|im_end|>")
        self.batches: list[list[list[int]]] = []
        self.fail_after = fail_after

    def __call__(self, prompts, seeds):
        if len(self.batches) == self.fail_after:
            raise KeyboardInterrupt
        assert len(prompts) == len(seeds)
        self.batches.append(prompts)
        return [
            Answer(ids[:2:-1][:6], "length") if sum(ids) % 5 == 0 else Answer([*ids[:2:-1][:4], self.stop], "stop")
            for ids in prompts
        ]


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer("qwen2_5")


def _regenerate(folder: Path, tokenizer, generate, batch_size=1, seed=0, **options):
    """Has prompts answered in groups, of four at a batch size of 1."""
    engine = answering.in_groups(generate, batch_size=batch_size, seed=seed)
    return answer_all(folder, tokenizer, engine, **options)


def test_rows_are_in_input_order_and_say_what_the_engine_said(tmp_path, tokenizer):
    engine = StubEngine(tokenizer)
    table = _regenerate(tmp_path, tokenizer, engine, count=23)
    chats, report = records.read_chats(tmp_path / "chats.jsonl.gz", strict=True)
    assert [row.id for row in chats] == [f"p{i}" for i in range(23)]
    assert {row.finish_reason for row in chats} == {"stop", "length"} and report.rows_out == 23
    for row in chats:
        serving = chat.render(tokenizer, row.messages[:-1], add_generation_prompt=True)
        assert row.prompt_ids == serving
        ((answer, reason, _),) = StubEngine(tokenizer)([serving], [0])
        assert (row.answer_ids, row.finish_reason) == (answer, reason)
        assert row.messages[-1]["content"] == tokenizer.decode(answer, skip_special_tokens=True)
        assert row.split == "train"
    meta = json.loads((tmp_path / "chats.jsonl.gz.meta.json").read_text())
    assert meta["template_arguments"] == {"enable_thinking": False} and meta["counts"]["rows_out"] == 23
    assert meta["counts"]["answer_tokens"] == sum(len(row.answer_ids) for row in chats)
    assert f"{meta['counts']['answer_tokens']:,} answer tokens" in table and "token ids from the engine: 23" in table
    assert meta["counts"]["ids_from"] == {"engine": 23}
    assert not list(tmp_path.glob("*.part")) and not list(tmp_path.glob("*.tmp"))


def test_groups_are_full_and_hold_neighbours_in_length():
    lengths = [7, 1, 5, 3, 9, 2, 8, 4, 6, 10]
    assert answering.GROUP_BATCHES == 4
    assert [[lengths[row] for row in group] for group in answering.plan_groups(lengths, 1)] == [
        [1, 2, 3, 4],
        [5, 6, 7, 8],
        [9, 10],
    ]
    window = 3 * answering.WINDOW_BATCHES
    many = answering.plan_groups([(i * 7919) % 101 for i in range(3 * window + 5)], 3)
    assert sorted(row for group in many for row in group) == list(range(3 * window + 5))
    assert {len(group) for group in many[:-1]} == {12} and len(many[-1]) == 5
    assert all(len({row // window for row in group}) == 1 for group in many)


def test_resuming_repeats_and_loses_nothing(tmp_path, tokenizer):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir()
    cut.mkdir()
    _regenerate(whole, tokenizer, StubEngine(tokenizer))
    first = StubEngine(tokenizer, fail_after=3)
    with pytest.raises(KeyboardInterrupt):
        _regenerate(cut, tokenizer, first)
    second = StubEngine(tokenizer)
    said = []
    _regenerate(cut, tokenizer, second, say=said.append)
    assert said[0] == "12 of 23 rows were answered before"
    answered = [tuple(ids) for engine in (first, second) for batch in engine.batches for ids in batch]
    assert len(answered) == len(set(answered)) == 23
    for name in ("chats.jsonl.gz", "chats.jsonl.gz.meta.json"):
        assert (cut / name).read_bytes() == (whole / name).read_bytes()


def test_another_batch_size_resumes_too(tmp_path, tokenizer):
    with pytest.raises(KeyboardInterrupt):
        _regenerate(tmp_path, tokenizer, StubEngine(tokenizer, fail_after=2), batch_size=1)
    engine = StubEngine(tokenizer)
    _regenerate(tmp_path, tokenizer, engine, batch_size=2)
    assert sum(map(len, engine.batches)) == 23 - 8
    assert len(records.read_chats(tmp_path / "chats.jsonl.gz", strict=True)[0]) == 23


def test_log_recovers_from_a_cut_at_any_byte(tmp_path):
    path = tmp_path / "log.part"
    batches = [[("a", Answer([1, 2], "stop")), ("b", Answer([3], "length", "text"))], [("é", Answer([4], "stop"))]]
    with AnswerLog(path, SETTINGS) as log:
        for batch in batches:
            log.append(batch)
    data = path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(data) if byte == 10]
    for size in range(len(data) + 1):
        path.write_bytes(data[:size])
        complete = max(sum(end <= size for end in ends) - 1, 0)
        with AnswerLog(path, SETTINGS) as log:
            assert log.answers == {name: answer for batch in batches[:complete] for name, answer in batch}
            for batch in batches[complete:]:
                log.append(batch)
        assert path.read_bytes() == data


def test_log_of_before_answers_said_where_their_ids_come_from(tmp_path):
    path = tmp_path / "log.part"
    AnswerLog(path, SETTINGS).__exit__()
    with path.open("a") as file:
        file.write('{"answers": [["a", [1, 2], "stop"]]}\n')
    with AnswerLog(path, SETTINGS) as log:
        assert log.answers == {"a": Answer([1, 2], "stop", "engine")}


def test_log_refuses_other_settings_other_files_and_a_second_owner(tmp_path):
    path = tmp_path / "log.part"
    with AnswerLog(path, SETTINGS), pytest.raises(ValueError, match="in use by another process"):
        AnswerLog(path, SETTINGS)
    with pytest.raises(ValueError, match=r"max_new_tokens was 8 and is now 9; seed was None and is now 1\. Delete it"):
        AnswerLog(path, SETTINGS | {"max_new_tokens": 9, "seed": 1})
    other = tmp_path / "other.part"
    for content in ('{"messages": []}\n', "hello\n", "[1]\n"):
        other.write_text(content)
        with pytest.raises(ValueError, match=r"other\.part is not a log of answers"):
            AnswerLog(other, SETTINGS)
        assert other.read_text() == content


def test_finished_file_is_left_alone_or_refused(tmp_path, tokenizer):
    _regenerate(tmp_path, tokenizer, StubEngine(tokenizer))
    data = (tmp_path / "chats.jsonl.gz").read_bytes()
    engine = StubEngine(tokenizer)
    assert "already complete" in _regenerate(tmp_path, tokenizer, engine)
    with pytest.raises(
        ValueError, match=r"chats\.jsonl\.gz exists and was made with other settings: max_new_tokens was 8"
    ):
        _regenerate(tmp_path, tokenizer, engine, settings=SETTINGS | {"max_new_tokens": 9})
    (tmp_path / "chats.jsonl.gz.meta.json").unlink()
    with pytest.raises(ValueError, match=r"meta\.json does not"):
        _regenerate(tmp_path, tokenizer, engine)
    assert engine.batches == [] and (tmp_path / "chats.jsonl.gz").read_bytes() == data


def test_prompts_that_cannot_be_used_and_empty_answers_are_reported(tmp_path, tokenizer):
    path = tmp_path / "prompts.jsonl"
    contents = {"fine": "Say red.", "long": "word " * 300, "mute": "Say nothing.", "lost": "?"}
    rows = [{"id": name, "messages": [{"role": "user", "content": c}]} for name, c in contents.items()]
    path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, []]))
    conversations, report = records.read_prompts(path)
    prompts = encode_prompts(tokenizer, conversations, report, max_prompt_length=200, system="Be brief.")
    assert tokenizer.decode(prompts[0].ids).startswith("<|im_start|>system\nBe brief.<|im_end|>")
    stop = tokenizer.eos_token_id

    def engine(prompts, answered):
        yield [("lost", answering.NoAnswer("the engine gave up")), ("mute", Answer([stop], "stop"))]
        yield [("fine", Answer([70, stop], "stop"))]

    out = tmp_path / "out.jsonl"
    table = answering.answer_into(out, prompts, report, engine, tokenizer, SETTINGS, say=lambda line: None)
    assert [row.id for row in records.read_chats(out, strict=True)[0]] == ["fine"]
    assert report.rows_in == 5 == report.rows_out + len(report.skipped)
    assert {(row.line, row.id) for row in report.skipped} == {(2, "long"), (3, "mute"), (4, "lost"), (5, None)}
    assert "longer than 200 tokens" in table and "no text" in table and "finished by stop: 1" in table
    assert "row 4 (lost): the engine gave up" in table


def test_no_answer_at_all_writes_no_file(tmp_path, tokenizer):
    def engine(prompts, answered):
        yield [(prompt.name, answering.NoAnswer("the engine gave up")) for prompt in prompts]

    with pytest.raises(ValueError, match=r"no prompt was answered\n(.*\n)*.*the engine gave up"):
        answer_all(tmp_path, tokenizer, engine)
    assert not (tmp_path / "chats.jsonl.gz").exists()


def test_no_usable_prompt_and_an_unsafe_template_are_errors(tmp_path, tokenizer):
    with pytest.raises(ValueError, match="no prompt is left"):
        answering.answer_into(tmp_path / "o.jsonl", [], records.ReadReport("x"), None, tokenizer, {})
    unsafe = tiny_tokenizer("qwen3", "{{ ''.__class__ }}")
    with pytest.raises(ChatTemplateError, match="__class__"):
        encode_prompts(unsafe, [], records.ReadReport("x"), max_prompt_length=9)


def test_row_seed_depends_on_the_row_and_the_seed_alone(tmp_path, tokenizer):
    assert row_seed(1, "a") == row_seed(1, "a") != row_seed(1, "b") != row_seed(2, "a")
    assert all(0 <= row_seed(0, str(i)) < 2**31 for i in range(100))
    seen: dict[tuple, set] = {}

    class Recorder(StubEngine):
        def __call__(self, prompts, seeds):
            for ids, seed in zip(prompts, seeds, strict=True):
                seen.setdefault(tuple(ids), set()).add(seed)
            return super().__call__(prompts, seeds)

    _regenerate(tmp_path, tokenizer, Recorder(tokenizer), batch_size=1, out="a.jsonl", seed=1)
    _regenerate(tmp_path, tokenizer, Recorder(tokenizer), batch_size=7, out="b.jsonl", seed=1)
    assert all(len(seeds) == 1 for seeds in seen.values()) and len(set.union(*seen.values())) == 23
    _regenerate(tmp_path, tokenizer, Recorder(tokenizer), out="c.jsonl", seed=2)
    assert all(len(seeds) == 2 for seeds in seen.values())


_SLOW_RUN = """
import sys, time
from pathlib import Path
sys.path.insert(0, {tests!r})
import test_answering as t
tokenizer = t.tiny_tokenizer("qwen2_5")
class Slow(t.StubEngine):
    def __call__(self, prompts, seeds):
        time.sleep(0.05)
        return super().__call__(prompts, seeds)
t._regenerate(Path(sys.argv[1]), tokenizer, Slow(tokenizer), count=80)
"""


def test_killed_process_loses_and_repeats_no_row(tmp_path, tokenizer):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir()
    cut.mkdir()
    _regenerate(whole, tokenizer, StubEngine(tokenizer), count=80)
    part = cut / "chats.jsonl.gz.part"
    command = [sys.executable, "-c", _SLOW_RUN.format(tests=str(Path(__file__).parent)), str(cut)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    process = subprocess.Popen(command, env=environment)
    _wait_for(lambda: part.exists() and part.read_bytes().count(b"\n") >= 5, process)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    kept = part.read_bytes()
    assert not (cut / "chats.jsonl.gz").exists()
    part.write_bytes(kept + b'{"answers": [["p1", [1, 2')  # what a kill in the middle of a write leaves
    engine = StubEngine(tokenizer)
    _regenerate(cut, tokenizer, engine, count=80)
    assert sum(map(len, engine.batches)) == 80 - 4 * (kept.count(b"\n") - 1)
    for name in ("chats.jsonl.gz", "chats.jsonl.gz.meta.json"):
        assert (cut / name).read_bytes() == (whole / name).read_bytes()
    assert len(gzip.decompress((cut / "chats.jsonl.gz").read_bytes()).splitlines()) == 80


def _wait_for(condition, process, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, "the run ended before it could be killed"
        assert time.monotonic() < deadline, "the run wrote nothing"
        time.sleep(0.01)

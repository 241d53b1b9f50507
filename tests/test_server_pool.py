"""Answers by servers: each prompt once, whatever servers do; what fails is retried, reported, or ends the run."""

import collections
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from answer_runs import SETTINGS, answer_all
from stub_server import CLOSE, STALL, StubServer, completion, spoken
from tiny_tokenizer import tiny_tokenizer

from dflash_jax.data import answering, records, server_pool
from dflash_jax.data.answer_log import AnswerLog
from dflash_jax.data.completions import Completions
from dflash_jax.data.http_json import Failure, RequestFailed
from dflash_jax.data.server_pool import Patience, ServerPool, ServersFailed, find_model, server_url

COUNT = 23
FILES = ("chats.jsonl.gz", "chats.jsonl.gz.meta.json")
TOKENIZER = tiny_tokenizer("qwen2_5")
QUICK = Patience(timeout=5.0, retries=6, first_wait=0.002)


def _right(body, before=0):
    return completion(TOKENIZER, spoken(TOKENIZER, body["prompt"]))


def _reply(**fields):
    return {"choices": [{"text": " fine", "finish_reason": "stop", **fields}]}


def _pool(*urls, concurrency=4, patience=QUICK, say=None, **options) -> ServerPool:
    completions = Completions("tiny", TOKENIZER, len(TOKENIZER), (TOKENIZER.eos_token_id,), max_new_tokens=40)
    say = say or (lambda line: None)
    return ServerPool(urls, completions, concurrency=concurrency, patience=patience, say=say, **options)


def _dead_url() -> str:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{one.getsockname()[1]}"


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """The files of a run in which nothing went wrong, one request at a time."""
    folder = tmp_path_factory.mktemp("whole")
    with StubServer(_right) as server:
        answer_all(folder, TOKENIZER, _pool(server.url, concurrency=1), count=COUNT)
    return folder


def _same_files(one: Path, other: Path) -> bool:
    return all((one / name).read_bytes() == (other / name).read_bytes() for name in FILES)


def test_rows_are_in_input_order_and_say_what_the_server_said(whole):
    chats, _ = records.read_chats(whole / FILES[0], strict=True)
    assert [row.id for row in chats] == [f"p{i}" for i in range(COUNT)]
    for row in chats:
        said = spoken(TOKENIZER, row.prompt_ids)
        assert (row.answer_ids, row.finish_reason) == (said.tokens, said.finish_reason)
    assert {row.finish_reason for row in chats} == {"stop", "length"}
    assert json.loads((whole / FILES[1]).read_text())["counts"]["ids_from"] == {"server": COUNT}


def test_requests_run_at_a_time_and_the_order_of_answers_does_not_matter(whole, tmp_path):
    def script(body, before):
        deadline = time.monotonic() + 10
        while server.busiest < 4 and time.monotonic() < deadline:
            time.sleep(0.002)
        time.sleep(sum(body["prompt"]) % 7 / 500)
        return _right(body)

    with StubServer(script) as server:
        answer_all(tmp_path, TOKENIZER, _pool(server.url, key="abc", seed=3), count=COUNT)
    assert server.busiest == 4 and server.keys == {"Bearer abc"}
    assert _same_files(tmp_path, whole)
    chats, _ = records.read_chats(whole / FILES[0])
    assert sorted(server.prompts) == sorted(tuple(row.prompt_ids) for row in chats)
    assert len({body["seed"] for body in server.requests}) == COUNT


def test_an_answer_is_kept_while_others_are_still_awaited(tmp_path):
    part = tmp_path / "chats.jsonl.gz.part"
    kept: list[int] = []

    def script(body, before):
        if server.prompts[0] == tuple(body["prompt"]):
            deadline = time.monotonic() + 10
            while part.read_text().count('["p') < COUNT - 1 and time.monotonic() < deadline:
                time.sleep(0.005)
            kept.append(part.read_text().count('["p'))
        return _right(body)

    with StubServer(script) as server:
        answer_all(tmp_path, TOKENIZER, _pool(server.url, concurrency=2), count=COUNT)
    assert kept == [COUNT - 1]


FAILURES = {
    "500": (500, {}, {"error": {"message": "out of memory"}}),
    "503, not JSON": (503, {}, b"<html>"),
    "429": (429, {"Retry-After": "0"}, {}),
    "connection closed": CLOSE,
    "no answer": STALL,
    "body cut short": b'{"choices": [{"te',
    "not JSON": b"<html>hello</html>",
    "not UTF-8": b"\xff\xfe\xfa",
    "another object": {"error": "busy"},
    "a list": [1, 2],
    "no choice": {"choices": []},
    "choices of another type": {"choices": "none"},
    "a choice of another type": {"choices": ["text"]},
    "no text": _reply(text=None),
    "aborted": _reply(finish_reason="abort"),
    "unfinished": _reply(finish_reason=None),
    "ids that are text": _reply(token_ids=["a"]),
    "ids that are no list": _reply(token_ids={"0": 1}),
    "truth values": _reply(token_ids=[True, False]),
    "an id beyond the vocabulary": _reply(token_ids=[10**6]),
    "a negative id": _reply(token_ids=[-1]),
    "more than asked for": _reply(token_ids=[70] * 41),
    "another text": _reply(token_ids=[70, 71, 72]),
    "another prompt": _reply(token_ids=TOKENIZER(" fine")["input_ids"], prompt_token_ids=[1, 2]),
    "nothing": _reply(text="", token_ids=[], finish_reason="length"),
}


def test_every_failure_is_retried_and_leaves_no_trace(whole, tmp_path):
    failures = list(FAILURES)
    firsts: dict[tuple, int] = {}

    def script(body, before):
        number = firsts.setdefault(tuple(body["prompt"]), len(firsts))
        return FAILURES[failures[number % len(failures)]] if before == 0 else _right(body)

    patience = Patience(timeout=0.5, retries=6, first_wait=0.002)
    count = len(failures)
    undisturbed = tmp_path / "undisturbed"
    undisturbed.mkdir()
    with StubServer(_right) as server:
        answer_all(undisturbed, TOKENIZER, _pool(server.url), count=count)
    with StubServer(script) as server:
        answer_all(tmp_path, TOKENIZER, _pool(server.url, concurrency=8, patience=patience), count=count)
    assert len(firsts) == count and min(collections.Counter(server.prompts).values()) == 2
    assert _same_files(tmp_path, undisturbed)


@pytest.mark.parametrize("name", ["500", "429", "not JSON", "no choice", "an id beyond the vocabulary", "aborted"])
def test_a_prompt_that_always_fails_is_reported_by_its_row(name, tmp_path):
    reasons = {
        "500": "HTTP status 500 (Internal Server Error)",
        "429": "HTTP status 429 (Too Many Requests)",
        "not JSON": "an answer that is not JSON",
        "no choice": "a reply without an answer",
        "an id beyond the vocabulary": "token ids outside the vocabulary",
        "aborted": "an answer that was broken off",
    }

    def script(body, before):
        return FAILURES[name] if "blue 7." in TOKENIZER.decode(body["prompt"]) else _right(body)

    with StubServer(script) as server:
        patience = Patience(timeout=5.0, retries=3, first_wait=0.002)
        table = answer_all(tmp_path, TOKENIZER, _pool(server.url, patience=patience), count=10)
    assert f"row 8 (p7): {reasons[name]}" in table
    assert [row.id for row in records.read_chats(tmp_path / FILES[0])[0]] == [f"p{i}" for i in range(10) if i != 7]
    assert json.loads((tmp_path / FILES[1]).read_text())["counts"]["skipped"] == {reasons[name]: 1}
    assert len(server.requests) == 9 + 4


def test_a_refused_prompt_is_not_asked_again(tmp_path):
    said: list[str] = []

    def script(body, before):
        refused = "green 1." in TOKENIZER.decode(body["prompt"])
        return (400, {}, {"error": {"message": "too long by 9"}}) if refused else _right(body)

    with StubServer(script) as server:
        table = answer_all(tmp_path, TOKENIZER, _pool(server.url, say=said.append), count=5)
    assert "row 2 (p1): HTTP status 400 (Bad Request)" in table and len(server.requests) == 5
    assert said == ["gave up prompt p1: HTTP status 400 (Bad Request): too long by 9"]


def test_a_server_that_refuses_everything_ends_the_run(tmp_path):
    with StubServer(lambda body, before: (404, {}, {"message": "no such model"})) as server:
        with pytest.raises(ServersFailed, match=r"127\.0\.0\.1:\d+ refuses every request: .*404.*no such model"):
            answer_all(tmp_path, TOKENIZER, _pool(server.url))
        assert len(server.requests) <= 4


def test_many_failing_prompts_in_a_row_end_the_run(tmp_path):
    reply = (422, {}, {"message": "seed: unknown field"})
    message = r"20 prompts in a row failed, p\d+ the last: HTTP status 422"
    with StubServer(lambda body, before: reply) as server, pytest.raises(ServersFailed, match=message):
        answer_all(tmp_path, TOKENIZER, _pool(server.url), count=40)
    assert not (tmp_path / FILES[0]).exists()


def test_a_dead_server_is_left_out_while_another_works(whole, tmp_path):
    dead, said = _dead_url(), []
    with StubServer(_right) as server:
        answer_all(tmp_path, TOKENIZER, _pool(dead, server.url, say=said.append), count=COUNT)
    assert _same_files(tmp_path, whole)
    assert len(said) == 1 and said[0].startswith(f"{dead} failed 3 times in a row; left out for 10 s: the connection")


def test_a_rested_server_gets_one_request_and_all_after_it_was_answered():
    pool = _pool("http://a", "http://b")
    a, b = pool._servers
    for _ in range(server_pool.FAILURES_TO_REST):
        a.in_flight += 1
        pool._give_back(a, RequestFailed("x"))
    assert [pool._take() for _ in range(3)] == [b] * 3
    a.rests_until = time.monotonic()
    assert pool._take() is a  # to try it
    assert [pool._take() for _ in range(2)] == [b] * 2
    pool._give_back(a, RequestFailed("x"))
    assert a.rests_until - time.monotonic() > server_pool.SHORTEST_REST
    a.rests_until = time.monotonic()
    assert pool._take() is a
    pool._give_back(a, None)
    assert [pool._take() for _ in range(5)] == [a] * 5  # b has five in flight


def test_waits_double_are_uneven_and_obey_the_server():
    pool = _pool("http://a", patience=Patience(first_wait=1.0))
    failure = RequestFailed("x")
    for number, longest in enumerate([1, 2, 4, 8, 16, 32, 60, 60]):
        waits = [pool._wait_before_retry(number, failure) for _ in range(50)]
        assert all(longest / 2 <= wait <= longest for wait in waits) and len(set(waits)) > 1
    for asked, waits in ((90.0, 90.0), (1e9, Patience.timeout)):
        assert pool._wait_before_retry(0, RequestFailed("x", kind=Failure.BUSY, retry_after=asked)) == waits


def test_no_server_left_keeps_the_answers_and_the_next_run_goes_on(whole, tmp_path):
    def script(body, before):
        if server.prompts.index(tuple(body["prompt"])) < 9:
            return _right(body)
        server.models = (500, {}, {})
        return CLOSE

    patience = Patience(timeout=5.0, retries=2, first_wait=0.1)
    with StubServer(script) as server, pytest.raises(ServersFailed, match="no server answers any more: the connection"):
        answer_all(tmp_path, TOKENIZER, _pool(server.url, patience=patience), count=COUNT)
    with AnswerLog(tmp_path / "chats.jsonl.gz.part", SETTINGS) as log:
        kept = len(log.answers)
    assert kept == 9 and not (tmp_path / FILES[0]).exists()
    with StubServer(_right) as server:
        answer_all(tmp_path, TOKENIZER, _pool(server.url), count=COUNT)
    assert len(server.requests) == COUNT - kept
    assert _same_files(tmp_path, whole)


_RUN = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
import test_server_pool as t
t.answer_all(Path(sys.argv[1]), t.TOKENIZER, t._pool(sys.argv[2]), count={count})
"""


def test_killed_process_loses_and_repeats_no_row(whole, tmp_path):
    killed = threading.Event()

    def script(body, before):
        if server.prompts.index(tuple(body["prompt"])) >= 12:
            killed.wait(60)
        return _right(body)

    part = tmp_path / "chats.jsonl.gz.part"
    code = _RUN.format(tests=str(Path(__file__).parent), count=COUNT)
    with StubServer(script) as server:
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
        process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path), server.url], env=environment)
        deadline = time.monotonic() + 60
        while not (part.exists() and part.read_text().count('["p') == 12):
            assert process.poll() is None, "the run ended before it could be killed"
            assert time.monotonic() < deadline, "twelve answers were not kept"
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        killed.set()
    with AnswerLog(part, SETTINGS) as log:
        kept = set(log.answers)
    assert len(kept) == 12
    with StubServer(_right) as server:
        answer_all(tmp_path, TOKENIZER, _pool(server.url), count=COUNT)
    assert len(server.requests) == COUNT - 12
    assert _same_files(tmp_path, whole)


def test_the_model_is_the_only_one_or_the_one_named():
    models = [{"id": "big", "max_model_len": 900}, {"id": "tiny"}]
    said: list[str] = []
    with StubServer(_right) as one, StubServer(_right, models=models) as two:
        assert find_model([one.url], None) == ("tiny", None)
        assert find_model([two.url, _dead_url()], "big", say=said.append) == ("big", 900)
        assert len(said) == 1 and "does not answer yet" in said[0]
        with pytest.raises(ServersFailed, match="--server_model is needed unless there is exactly one .* big, tiny"):
            find_model([one.url, two.url], None)
        with pytest.raises(ServersFailed, match="--server_model=small: the servers have tiny"):
            find_model([one.url], "small")
    with StubServer(_right, models=["tiny"]) as odd, pytest.raises(ServersFailed, match="no list of models"):
        find_model([odd.url], None)
    with pytest.raises(ServersFailed, match="no server answers: http://127.* the connection failed"):
        find_model([_dead_url()], None)


def test_addresses():
    for text in ("http://a:8000", "http://a:8000/", "http://a:8000/v1", "http://a:8000/v1/"):
        assert server_url(text) == "http://a:8000"
    for text in ("a:8000", "localhost", "ftp://a", "http://"):
        with pytest.raises(ValueError, match="is no address like http://localhost:8000"):
            server_url(text)


def test_progress_says_rows_tokens_and_time_left(tmp_path, monkeypatch):
    monkeypatch.setattr(answering, "PROGRESS_SECONDS", 0.0)
    said: list[str] = []
    with StubServer(_right) as server:
        answer_all(tmp_path, TOKENIZER, _pool(server.url), count=COUNT, say=said.append)
    assert said[-1].startswith(f"{COUNT}/{COUNT} rows") and said[-1].endswith("0 min 0 s left")
    assert all("rows/s" in line and "tokens/s" in line for line in said)

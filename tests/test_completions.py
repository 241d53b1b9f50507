"""What is asked of a server and what its reply means: token ids as it sampled them, or those of its text."""

import contextlib
import email.utils
import time

import pytest
from stub_server import StubServer, completion, spoken
from tiny_tokenizer import tiny_tokenizer
from tokenizers import normalizers

from dflash_jax.data.answer_log import Answer
from dflash_jax.data.completions import Completions
from dflash_jax.data.http_json import Failure, RequestFailed, fetch_json

TOKENIZER = tiny_tokenizer("llama3")
EOT, END = (TOKENIZER.convert_tokens_to_ids(token) for token in ("<|eot_id|>", "<|end_of_text|>"))
SPECIAL = TOKENIZER.convert_tokens_to_ids("<|start_header_id|>")
FINE = TOKENIZER("I am fine.", add_special_tokens=False)["input_ids"]
PROMPT = [5, 6, 7]


def _completions(**fields) -> Completions:
    options = {"max_new_tokens": 30, **fields}
    return Completions("tiny", TOKENIZER, len(TOKENIZER) + 3, (END, EOT), **options)


def _reply(ids, text="I am fine.", reason="stop", **fields):
    return {
        "choices": [{"text": text, "finish_reason": reason, **({} if ids is None else {"token_ids": ids}), **fields}]
    }


def test_request_holds_every_setting_lest_the_server_takes_its_own():
    body = _completions(temperature=0.7, top_p=0.9, top_k=20).request(PROMPT, 17)
    assert body["prompt"] == PROMPT and body["stop_token_ids"] == [END, EOT] and body["return_token_ids"] is True
    wanted = {"model": "tiny", "max_tokens": 30, "temperature": 0.7, "top_p": 0.9, "top_k": 20, "seed": 17}
    neutral = {"min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    assert body.items() >= (wanted | neutral).items()
    assert _completions().request(PROMPT, 0).items() >= {"temperature": 0.0, "top_p": 1.0, "top_k": -1}.items()
    body = _completions(fields={"return_token_ids": None, "top_k": 0, "priority": 1}).request(PROMPT, 0)
    assert "return_token_ids" not in body and body["top_k"] == 0 and body["priority"] == 1


def test_sampled_ids_are_taken_as_they_are():
    # Not the ids that the tokenizer would make of the text.
    odd = [token for letter in "I am fine." for token in TOKENIZER(letter, add_special_tokens=False)["input_ids"]]
    assert odd != FINE and TOKENIZER.decode(odd) == "I am fine."
    completions = _completions()
    assert completions.answer(_reply([*odd, EOT]), PROMPT) == Answer([*odd, EOT], "stop", "server")
    assert completions.answer(_reply(odd, reason="length"), PROMPT) == Answer(odd, "length", "server")
    assert completions.answer(_reply([*odd, EOT], prompt_token_ids=PROMPT), PROMPT).tokens == [*odd, EOT]


@pytest.mark.parametrize(
    ("ids", "fields", "expected"),
    [
        (FINE, {}, ([*FINE, EOT], "stop")),  # servers may leave the stop token out; the usual one is the tokenizer's
        (FINE, {"stop_reason": END}, ([*FINE, END], "stop")),
        (FINE, {"matched_stop": END}, ([*FINE, END], "stop")),
        (FINE, {"stop_reason": "a text", "matched_stop": None}, ([*FINE, EOT], "stop")),
        ([*FINE, END], {"reason": "length"}, ([*FINE, END], "stop")),  # the budget's last token was a stop token
        ([*FINE, END, *FINE], {"text": "I am fine.I am fine.", "reason": "length"}, ([*FINE, END], "stop")),
        ([], {"text": ""}, ([EOT], "stop")),
        ([SPECIAL, *FINE], {"text": "I am fine."}, ([SPECIAL, *FINE, EOT], "stop")),
        ([SPECIAL, *FINE], {"text": " <|start_header_id|>I am fine."}, ([SPECIAL, *FINE, EOT], "stop")),
        ([*FINE, EOT], {"text": "I am fine.<|eot_id|>"}, ([*FINE, EOT], "stop")),
    ],
)
def test_an_answer_ends_at_its_first_stop_token_and_holds_it(ids, fields, expected):
    assert _completions().answer(_reply(ids, **fields), PROMPT) == (*expected, "server")


@pytest.mark.parametrize(
    ("text", "reason", "expected"),
    [
        ("I am fine.", "stop", ([*FINE, EOT], "stop")),
        ("I am fine.", "length", (FINE, "length")),
        ("I am fine.<|end_of_text|>", "stop", ([*FINE, END], "stop")),
        ("<|start_header_id|>I am fine.", "stop", ([SPECIAL, *FINE, EOT], "stop")),
        ("I am fine.\ufffd", "length", (FINE, "length")),  # a character cut in its middle
        ("", "stop", ([EOT], "stop")),
    ],
)
def test_without_ids_the_text_is_tokenised(text, reason, expected):
    assert _completions().answer(_reply(None, text, reason), PROMPT) == (*expected, "text")


def test_a_text_that_gives_no_ids_is_refused():
    with pytest.raises(RequestFailed, match="bytes that are no character"):
        _completions().answer(_reply(None, "I \ufffd am fine."), PROMPT)
    with pytest.raises(RequestFailed, match="without tokens"):
        _completions().answer(_reply(None, "", "length"), PROMPT)
    lossy = tiny_tokenizer("llama3")
    lossy.backend_tokenizer.normalizer = normalizers.Lowercase()
    with pytest.raises(RequestFailed, match="changes when it is tokenised and decoded"):
        Completions("tiny", lossy, 400, (EOT,), 30).answer(_reply(None), PROMPT)
    with pytest.raises(RequestFailed, match="outside the vocabulary: "):
        Completions("tiny", TOKENIZER, 40, (EOT,), 30).answer(_reply(None), PROMPT)


def test_an_answer_that_ends_by_no_stop_token_of_the_target_is_refused():
    with pytest.raises(RequestFailed, match=r"without a stop token of the target: by \[9, None\]"):
        Completions("tiny", TOKENIZER, 400, (), 30).answer(_reply(FINE, stop_reason=9), PROMPT)


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        ({"choices": [{}, {}]}, "a reply without an answer"),
        (_reply(FINE, text=["I am fine."]), "a reply without text"),
        (_reply(FINE, reason="content_filter"), "an answer that was broken off"),
        (_reply([True, False]), "token ids that are not integers"),
        (_reply([70.0]), "token ids that are not integers"),
        (_reply("I am fine."), "token ids that are not integers"),
        (_reply([len(TOKENIZER) + 3]), "token ids outside the vocabulary"),
        (_reply([-1]), "token ids outside the vocabulary"),
        (_reply([*PROMPT, *FINE]), "ids that say something else than the text"),
        (_reply(FINE, prompt_token_ids=[0, *PROMPT]), "a server that read another prompt"),
        (_reply(FINE * 9, text="I am fine." * 9), "an answer beyond its budget"),
    ],
)
def test_garbage_has_a_name(reply, reason):
    with pytest.raises(RequestFailed) as caught:
        _completions().answer(reply, PROMPT)
    assert caught.value.reason == reason and caught.value.kind is Failure.SERVER


def test_a_whole_answer_is_what_was_said():
    for prompt in ([1, 2], [1, 4]):
        said = spoken(TOKENIZER, prompt)
        assert _completions().answer(completion(TOKENIZER, said), prompt) == said
        assert _completions().answer(completion(TOKENIZER, said, ids=False), prompt) == said._replace(ids_from="text")


def _failure(reply, timeout=5.0) -> RequestFailed:
    with StubServer(lambda body, before: reply) as server, pytest.raises(RequestFailed) as caught:
        fetch_json(f"{server.url}/v1/completions", {"prompt": []}, timeout=timeout)
    return caught.value


@pytest.mark.parametrize(
    ("status", "kind"),
    [(500, "SERVER"), (503, "SERVER"), (429, "BUSY"), (408, "BUSY"), (400, "REQUEST"), (413, "REQUEST"), (401, "ALL")],
)
def test_status_says_what_to_do(status, kind):
    failure = _failure((status, {}, {"error": {"message": "the\n reason"}}))
    assert failure.kind is Failure[kind] and failure.reason.startswith(f"HTTP status {status}")
    assert str(failure).endswith(": the reason") and failure.retry_after == 0.0


def test_messages_of_every_shape_are_shown():
    shapes = {
        "plain": b"plain",
        "top": {"message": "top"},
        "text": {"error": "text"},
        "[1]": [1],
        "": b"",
        "x" * 300: b"x" * 900,
    }
    for shown, content in shapes.items():
        assert str(_failure((500, {}, content))).partition("): ")[2] == shown


def test_retry_after_is_seconds_or_a_date():
    assert _failure((429, {"Retry-After": "7"}, {})).retry_after == 7.0
    date = email.utils.formatdate(time.time() + 100, usegmt=True)
    assert 90 < _failure((429, {"Retry-After": date}, {})).retry_after <= 100
    for odd in ("soon", "-5", "", email.utils.formatdate(0)):
        assert _failure((429, {"Retry-After": odd}, {})).retry_after == 0.0


def test_an_answer_that_trickles_in_is_not_waited_for_beyond_the_timeout():
    class Trickle(StubServer):
        def _handler(self):
            class Handler(super()._handler()):
                def _send(self, reply):
                    self.send_response(200)
                    self.end_headers()
                    with contextlib.suppress(OSError):
                        for _ in range(200):
                            self.wfile.write(b" ")
                            time.sleep(0.02)

            return Handler

    start = time.monotonic()
    with Trickle(lambda body, before: {}) as server, pytest.raises(RequestFailed, match=r"no answer in 0\.2 s"):
        fetch_json(f"{server.url}/v1/completions", {"prompt": []}, timeout=0.2)
    assert time.monotonic() - start < 2

"""An OpenAI-compatible server in a thread of the test, which answers as it is told to."""

import collections
import contextlib
import http.server
import json
import socket
import threading
from collections.abc import Callable
from typing import Any

from dflash_jax.data.answer_log import Answer

CLOSE = object()
STALL = object()

# (body of the request, how often its prompt has come before) → an object for JSON, bytes to send as they are, a status
# with headers and an object, CLOSE (the connection), or STALL (until the server ends).
Script = Callable[[dict, int], Any]


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64


class StubServer:
    """A context manager. `requests` are the bodies that came, `busiest` is how many were handled at a time at most."""

    def __init__(self, script: Script, *, models: list[dict] | None = None):
        self.script = script
        self.models = {"data": [{"id": "tiny"}] if models is None else models}
        self.requests: list[dict] = []
        self.keys: set[str | None] = set()
        self.busiest = self.busy = 0
        self.ended = threading.Event()
        self._seen: collections.Counter[tuple[int, ...]] = collections.Counter()
        self._lock = threading.Lock()
        self._server = _Server(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self):
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *exception) -> None:
        self.ended.set()
        self._server.shutdown()
        self._server.server_close()

    @property
    def prompts(self) -> list[tuple[int, ...]]:
        """Of the requests, in the order in which they came."""
        return [tuple(body["prompt"]) for body in self.requests]

    def reply(self, body: dict) -> Any:
        """What the script says to a request."""
        prompt = tuple(body["prompt"])
        with self._lock:
            before = self._seen[prompt]
            self._seen[prompt] += 1
            self.requests.append(body)
            self.busy += 1
            self.busiest = max(self.busiest, self.busy)
        try:
            reply = self.script(body, before)
            if reply is STALL:
                self.ended.wait()
            return reply
        finally:
            with self._lock:
                self.busy -= 1

    def _handler(self):
        stub = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                stub.keys.add(self.headers.get("Authorization"))
                self._send(stub.models if self.path == "/v1/models" else (404, {}, {}))

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                stub.keys.add(self.headers.get("Authorization"))
                self._send(stub.reply(body) if self.path == "/v1/completions" else (404, {}, {}))

            def _send(self, reply: Any) -> None:
                if reply is CLOSE or reply is STALL:
                    with contextlib.suppress(OSError):
                        self.connection.shutdown(socket.SHUT_RDWR)
                    return
                status, headers, content = reply if isinstance(reply, tuple) else (200, {}, reply)
                data = content if isinstance(content, bytes) else json.dumps(content).encode()
                with contextlib.suppress(OSError):  # the client may have given up
                    self.send_response(status)
                    for name, value in {**headers, "Content-Length": str(len(data))}.items():
                        self.send_header(name, value)
                    self.end_headers()
                    self.wfile.write(data)

            def log_message(self, *arguments) -> None:
                pass

        return Handler


def spoken(tokenizer, prompt_ids: list[int]) -> Answer:
    """What the stub's model says to a prompt: every fifth answer is cut off by the budget."""
    tokens = tokenizer(f"I am {sum(prompt_ids)} fine.", add_special_tokens=False)["input_ids"]
    if sum(prompt_ids) % 5 == 0:
        return Answer(tokens[:5], "length", "server")
    return Answer([*tokens, tokenizer.eos_token_id], "stop", "server")


def completion(tokenizer, answer: Answer, *, ids: bool = True) -> dict:
    """An answer as vLLM returns it, the stop token in the ids, not in the text; or as servers do that give no ids."""
    said = answer.tokens[:-1] if answer.finish_reason == "stop" else answer.tokens
    choice = {"index": 0, "text": tokenizer.decode(said), "finish_reason": answer.finish_reason, "stop_reason": None}
    return {"object": "text_completion", "choices": [choice | ({"token_ids": answer.tokens} if ids else {})]}

"""Answers by OpenAI-compatible servers: many requests at a time, retried, spread over the servers that work.

A request goes to the server with the fewest in flight. After three failures in a row a server rests, longer each time
it fails again; then it gets one request, and more once that is answered. A prompt that fails at every try is given up
where a server still works, and ends the run where none does: answers are kept, and the same command goes on from there.
"""

import collections
import dataclasses
import queue
import random
import threading
import time
from collections.abc import Callable, Container, Generator, Sequence
from urllib.parse import urlsplit

from dflash_jax.data.answer_log import Answer
from dflash_jax.data.answering import NoAnswer, Outcomes
from dflash_jax.data.completions import Completions
from dflash_jax.data.http_json import Failure, RequestFailed, fetch_json
from dflash_jax.data.prompts import EncodedPrompt, row_seed

FAILURES_TO_REST = 3
SHORTEST_REST, LONGEST_REST = 10.0, 300.0  # seconds
LONGEST_WAIT = 60.0  # seconds between two tries; where the server asks for more, up to the timeout
MOST_GIVEN_UP = 20  # prompts in a row; then it is not the prompts
_PROBE_SECONDS = 10.0


class ServersFailed(ValueError):
    """No server answers, or none as it should; the message names what to change."""


@dataclasses.dataclass(frozen=True)
class Patience:
    """Seconds to wait for an answer, how often a failed request is repeated, and seconds before the first repeat."""

    timeout: float = 600.0
    retries: int = 6
    first_wait: float = 1.0


@dataclasses.dataclass
class _Server:
    url: str
    in_flight: int = 0
    failures: int = 0  # in a row
    rests_until: float = 0.0


def server_url(text: str) -> str:
    """The address of a server without /v1.

    Raises:
      ValueError: it is no http or https address.
    """
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"--server={text} is no address like http://localhost:8000")
    return text.rstrip("/").removesuffix("/v1").rstrip("/")


def find_model(
    urls: Sequence[str], wanted: str | None, *, key: str | None = None, say: Callable[[str], None] = print
) -> tuple[str, int | None]:
    """Asks the servers what they serve.

    Args:
      urls: of the servers; some may be down.
      wanted: name of the model; None: the only one they have.
      key: as for `fetch_json`.
      say: is told of servers that don't answer.

    Returns:
      The model's name, and the shortest context that a server says it has, in tokens.

    Raises:
      ServersFailed: none answers, the wanted model isn't there, or none is wanted and there isn't exactly one.
    """
    lengths: dict[str, list[int]] = {}
    silent = []
    for url in urls:
        try:
            for model in fetch_json(f"{url}/v1/models", timeout=_PROBE_SECONDS, key=key)["data"]:
                length = model.get("max_model_len")
                lengths.setdefault(str(model["id"]), []).extend([length] if isinstance(length, int) else [])
        except RequestFailed as failure:
            silent.append(f"{url}: {failure}")
        except (TypeError, KeyError, AttributeError):
            silent.append(f"{url}: no list of models at /v1/models")
    if len(silent) == len(urls):
        raise ServersFailed("no server answers: " + "; ".join(silent))
    for reason in silent:
        say(f"does not answer yet: {reason}")
    names = ", ".join(sorted(lengths)) or "none"
    if wanted is None and len(lengths) != 1:
        raise ServersFailed(f"--server_model is needed unless there is exactly one model; the servers have {names}")
    model = next(iter(lengths)) if wanted is None else wanted
    if model not in lengths:
        raise ServersFailed(f"--server_model={model}: the servers have {names}")
    return model, min(lengths[model], default=None)


class ServerPool:
    """An engine for `answer_into`, over one or more servers of the same model."""

    def __init__(
        self,
        urls: Sequence[str],
        completions: Completions,
        *,
        concurrency: int,
        seed: int = 0,
        patience: Patience | None = None,
        key: str | None = None,
        say: Callable[[str], None] = print,
    ):
        """
        Args:
          urls: as `server_url` gives them.
          completions: what is asked and how answers are checked.
          concurrency: requests in flight at most, over all servers.
          seed: for sampling; each prompt has its own, from this and its id.
          patience: the default if None.
          key: sent as a bearer token.
          say: is told of failing servers and of prompts that are given up; called in any thread.
        """
        self._servers = [_Server(url) for url in urls]
        self._completions = completions
        self._concurrency = concurrency
        self._seed = seed
        self._patience = patience or Patience()
        self._key = key
        self._say = say
        self._lock = threading.Lock()

    def __call__(self, prompts: Sequence[EncodedPrompt], answered: Container[str]) -> Generator[Outcomes]:
        """Yields outcomes as they come: of all that have come since the last time.

        Raises:
          ServersFailed: no server answers any more, all refuse every request, or MOST_GIVEN_UP prompts in a row failed.
        """
        todo = collections.deque(prompt for prompt in prompts if prompt.name not in answered)
        left, given_up = len(todo), 0
        results: queue.SimpleQueue = queue.SimpleQueue()
        stopped = threading.Event()
        for _ in range(min(self._concurrency, left)):
            # Daemons: a request that hangs must not keep the program from ending.
            threading.Thread(target=self._work, args=(todo, results, stopped), daemon=True).start()
        try:
            while left:
                outcomes, error = _all_of(results)
                if outcomes:
                    yield outcomes
                if error is not None:
                    raise error
                left -= len(outcomes)
                for name, outcome in outcomes:
                    given_up = given_up + 1 if isinstance(outcome, NoAnswer) else 0
                    if isinstance(outcome, NoAnswer) and given_up == MOST_GIVEN_UP:
                        raise ServersFailed(f"{given_up} prompts in a row failed, {name} the last: {outcome.reason}")
        finally:
            stopped.set()

    def _work(
        self, todo: collections.deque[EncodedPrompt], results: queue.SimpleQueue, stopped: threading.Event
    ) -> None:
        while not stopped.is_set():
            try:
                prompt = todo.popleft()
            except IndexError:
                return
            try:
                results.put((prompt.name, self._ask(prompt, stopped)))
            except Exception as error:  # in a thread nobody else would hear of it
                results.put(error)
                return

    def _ask(self, prompt: EncodedPrompt, stopped: threading.Event) -> Answer | NoAnswer:
        """Tries until there is an answer or the tries are used up."""
        retries = 0
        while True:
            outcome = self._try(prompt)
            if isinstance(outcome, Answer):
                return outcome
            if outcome.kind is Failure.REQUEST or retries == self._patience.retries:
                break
            if stopped.wait(self._wait_before_retry(retries, outcome)):
                return NoAnswer("the run has ended")
            retries += 1
        if outcome.kind is not Failure.REQUEST and not any(self._works(server) for server in self._servers):
            raise ServersFailed(f"no server answers any more: {outcome}. Answers are kept: run the same command again")
        self._say(f"gave up prompt {prompt.name}: {outcome}")
        return NoAnswer(outcome.reason)

    def _try(self, prompt: EncodedPrompt) -> Answer | RequestFailed:
        """One request to one server."""
        body = self._completions.request(prompt.ids, row_seed(self._seed, prompt.name))
        server, failure = self._take(), None
        try:
            reply = fetch_json(f"{server.url}/v1/completions", body, timeout=self._patience.timeout, key=self._key)
            return self._completions.answer(reply, prompt.ids)
        except RequestFailed as error:
            failure = error
            if error.kind is Failure.ALL:
                raise ServersFailed(f"{server.url} refuses every request: {error}") from error
            return error
        finally:
            self._give_back(server, failure)

    def _wait_before_retry(self, number: int, failure: RequestFailed) -> float:
        """Seconds before retry `number` (from 0): doubled each time, and uneven, lest all come back at once."""
        wait = min(self._patience.first_wait * 2**number, LONGEST_WAIT) * random.uniform(0.5, 1.0)
        return max(wait, min(failure.retry_after, self._patience.timeout))

    def _take(self) -> _Server:
        """The best server for a request, which is counted as in flight until it is given back."""

        def badness(server: _Server) -> tuple:
            now = time.monotonic()
            on_trial = server.failures >= FAILURES_TO_REST
            unusable = server.rests_until > now or (on_trial and server.in_flight > 0)
            return unusable, server.in_flight, server.rests_until

        with self._lock:
            server = min(self._servers, key=badness)
            server.in_flight += 1
            return server

    def _give_back(self, server: _Server, failure: RequestFailed | None) -> None:
        """Ends a request; a failure that is the server's own counts against it."""
        with self._lock:
            server.in_flight -= 1
            if failure is None or failure.kind is not Failure.SERVER:
                server.failures, server.rests_until = 0, 0.0
                return
            if server.rests_until > time.monotonic():  # sent before it began to rest
                return
            server.failures += 1
            more = server.failures - FAILURES_TO_REST
            if more < 0:
                return
            rest = min(SHORTEST_REST * 2**more, LONGEST_REST)
            server.rests_until = time.monotonic() + rest
        others = f"; left out for {rest:.0f} s" if len(self._servers) > 1 else ""
        self._say(f"{server.url} failed {server.failures} times in a row{others}: {failure}")

    def _works(self, server: _Server) -> bool:
        """Whether a server still says what it serves."""
        try:
            fetch_json(f"{server.url}/v1/models", timeout=min(_PROBE_SECONDS, self._patience.timeout), key=self._key)
        except RequestFailed as failure:
            return failure.kind is not Failure.SERVER
        return True


def _all_of(results: queue.SimpleQueue) -> tuple[Outcomes, Exception | None]:
    """The outcomes in a queue, and an error if one is there; waits until there is something."""
    items = [results.get()]
    while not results.empty():
        items.append(results.get())
    errors = [item for item in items if isinstance(item, Exception)]
    return [item for item in items if not isinstance(item, Exception)], errors[0] if errors else None

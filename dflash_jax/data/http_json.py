"""JSON over HTTP by the standard library; a failure says what kind it is, since that decides what to do about it."""

import email.utils
import enum
import http.client
import json
import time
import urllib.error
import urllib.request
from typing import Any

_SHOWN = 300  # characters of a server's message


class Failure(enum.Enum):
    """What a failed request says about the next one."""

    SERVER = "this server may fail the next one too: no connection, no answer in time, status 5xx, garbage"
    BUSY = "the server works, and asks to be asked later: status 408, 425, 429"
    REQUEST = "this request would fail again: status 400, 413, 422"
    ALL = "every request would fail: any other status, such as 401 or 404"


class RequestFailed(Exception):
    """A request without a usable answer.

    reason: short, the same for all failures of a sort. detail: what else is known. retry_after: seconds asked for.
    """

    def __init__(self, reason: str, detail: str = "", kind: Failure = Failure.SERVER, retry_after: float = 0.0):
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.kind = kind
        self.retry_after = retry_after


def fetch_json(url: str, body: Any = None, *, timeout: float, key: str | None = None) -> Any:
    """What a server answers to a GET, or with a body to a POST, of JSON. Proxies are those of the environment.

    Args:
      url: http or https.
      body: what to send, JSON-able.
      timeout: seconds until the whole answer must be there.
      key: sent as a bearer token.

    Raises:
      RequestFailed: there is no answer, or it is no JSON.
    """
    headers = {"Accept": "application/json", "Content-Type": "application/json"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    deadline = time.monotonic() + timeout
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=timeout) as response:
            content = _read_until(response, deadline)
    except urllib.error.HTTPError as error:
        raise _status_failure(error) from error
    except TimeoutError as error:
        raise RequestFailed(f"no answer in {timeout:g} s") from error
    except (OSError, http.client.HTTPException) as error:
        cause = getattr(error, "reason", error)  # urllib wraps what happens before the answer
        if isinstance(cause, TimeoutError):
            raise RequestFailed(f"no answer in {timeout:g} s") from error
        raise RequestFailed("the connection failed", f"{type(cause).__name__}: {cause}") from error
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise RequestFailed("an answer that is not JSON", repr(content[:80])) from error


def _read_until(response: http.client.HTTPResponse, deadline: float) -> bytes:
    """The body; the socket's own timeout would start anew at every byte."""
    parts = []
    while part := response.read1(1 << 16):
        parts.append(part)
        if time.monotonic() > deadline:
            raise TimeoutError
    return b"".join(parts)


def _status_failure(error: urllib.error.HTTPError) -> RequestFailed:
    if error.code >= 500:
        kind = Failure.SERVER
    elif error.code in (408, 425, 429):
        kind = Failure.BUSY
    elif error.code in (400, 413, 422):
        kind = Failure.REQUEST
    else:
        kind = Failure.ALL
    reason = f"HTTP status {error.code} ({error.reason})"
    return RequestFailed(reason, _message(error), kind, _seconds(error.headers.get("Retry-After")))


def _message(error: urllib.error.HTTPError) -> str:
    """What the server says about its error, shortened."""
    try:
        text = error.read(1 << 16).decode(errors="replace")
    except (OSError, http.client.HTTPException):
        return ""
    try:
        content = json.loads(text)
        inner = content.get("error", content)
        text = inner["message"] if isinstance(inner, dict) else inner
    except (ValueError, KeyError, AttributeError, RecursionError):
        pass  # not in the usual form: shown as it is
    return " ".join(str(text).split())[:_SHOWN]


def _seconds(retry_after: str | None) -> float:
    """Seconds that a Retry-After header asks for, given as a number or a date; 0 where it is neither."""
    if retry_after is None:
        return 0.0
    try:
        if retry_after.strip().isdigit():
            return float(retry_after)
        return max(email.utils.parsedate_to_datetime(retry_after).timestamp() - time.time(), 0.0)
    except ValueError:
        return 0.0

"""The service as commands speak to it: plain HTTP, for a command is to start at once and openai takes half a second."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from app.commands.terminal import CommandFailed

if TYPE_CHECKING:
    import httpx2  # takes a while to import, and no list of commands needs it

DEFAULT_URL = "http://127.0.0.1:8000/v1"
_CONNECT_S, _ANSWER_S = 10.0, 600.0
_SILENCE_S = 60.0  # of a stream that has a heartbeat
_UNAUTHORIZED, _NO_MORE_BYTES = 401, 416
_BUSY = (429, 503)  # the server has done nothing: the same request may be sent again
_LONGEST_WAIT_S = 5.0


class Busy(CommandFailed):
    """The service has too much to do, or stops; the same request may do better in a while."""


class Away(CommandFailed):
    """Nothing answers."""


class Broken(CommandFailed):
    """The connection ended before the answer did; what was not read may be had by asking again."""


class Client:
    """The API under one address; paths begin after `/v1`, answers are what their JSON holds."""

    def __init__(self, http: httpx2.Client) -> None:
        self._http = http

    def get(self, path: str, **params: object) -> Any:
        """Return the answer to a GET; parameters that are None are left out."""
        return self._ask("GET", path, params=_query_params(params))

    def post(self, path: str, body: object = None, headers: Mapping[str, str] | None = None, **params: object) -> Any:
        """Create or change; `body` is sent as JSON."""
        return self._ask("POST", path, params=_query_params(params), headers=headers, json=body)

    def delete(self, path: str, **params: object) -> Any:
        """Delete."""
        return self._ask("DELETE", path, params=_query_params(params))

    def send(self, path: str, file: Path, fields: Mapping[str, str] | None = None, **params: object) -> Any:
        """Upload a file, read while it is sent, with the fields of the form before it."""
        with file.open("rb") as content:
            parts = {"file": (file.name, content, "application/octet-stream")}
            return self._ask("POST", path, params=_query_params(params), data=dict(fields or {}), files=parts)

    def text(self, path: str, accept: str) -> str:
        """Return an answer that is no JSON."""
        return self._answer("GET", path, headers={"accept": accept}).text

    def pages(self, path: str, limit: int, **params: object) -> Iterator[Any]:
        """Yield up to `limit` rows of a list that comes in pages."""
        left, after = limit, None
        while left > 0:
            found = self.get(path, limit=min(left, 100), after=after, **params)
            yield from found["data"]
            left -= len(found["data"])
            if not found.get("has_more") or not found["data"]:
                return
            after = found["data"][-1]["id"]

    @contextmanager
    def stream(self, path: str, headers: Mapping[str, str]) -> Iterator[httpx2.Response]:
        """Open an answer whose bytes are read by the caller; what the service refuses is `CommandFailed`.

        416, there are no more bytes than the caller has, is an answer like others.
        """
        plain = {"accept-encoding": "identity", **headers}
        with _wire(), self._http.stream("GET", _route(path), headers=plain) as answer:
            if answer.is_error and answer.status_code != _NO_MORE_BYTES:
                answer.read()
                raise _refusal_error(answer)
            yield answer

    @contextmanager
    def events(self, path: str, body: object = None, **headers: str) -> Iterator[httpx2.EventSource]:
        """Open server-sent events: those that a GET follows, or with a body the answer to a POST."""
        method = "GET" if body is None else "POST"
        timeout = (_CONNECT_S, _ANSWER_S if body else _SILENCE_S, _ANSWER_S, _ANSWER_S)
        events = self._http.sse(_route(path), method=method, json=body, headers=headers, timeout=timeout)
        with _wire(), events as source:
            if source.response.is_error:
                source.response.read()
                raise _refusal_error(source.response)
            yield source

    def _ask(self, method: str, path: str, **options: Any) -> Any:
        answer = self._answer(method, path, **options)
        try:
            return answer.json()
        except ValueError:
            raise _stranger(answer) from None

    def _answer(self, method: str, path: str, **options: Any) -> httpx2.Response:
        """Ask, and once more where the service was busy."""
        with _wire():
            answer = self._http.request(method, _route(path), **options)
            may_again = answer.headers.get("x-should-retry") != "false" and "files" not in options
            if answer.status_code in _BUSY and may_again:
                time.sleep(min(float(answer.headers.get("retry-after", 1)), _LONGEST_WAIT_S))
                answer = self._http.request(method, _route(path), **options)
        if answer.is_error:
            raise _refusal_error(answer)
        return answer


@contextmanager
def connect() -> Iterator[Client]:
    """Yield a client of the service at SPARD_BASE_URL; a failed connection is raised as `CommandFailed`."""
    import httpx2

    url, key = service_url(), api_key()
    headers, timeout = {"authorization": f"Bearer {key}"}, httpx2.Timeout(_ANSWER_S, connect=_CONNECT_S)
    with (
        _wire(),
        httpx2.Client(base_url=f"{url}/", headers=headers, timeout=timeout, follow_redirects=True) as http,
    ):
        yield Client(http)


@contextmanager
def _wire() -> Iterator[None]:
    """Say in our words what becomes of connections."""
    import httpx2

    url = service_url()
    try:
        yield
    except (httpx2.InvalidURL, httpx2.UnsupportedProtocol):
        raise CommandFailed(f"SPARD_BASE_URL is no address: {url!r}; it is like {DEFAULT_URL}.") from None
    except httpx2.ConnectError:
        raise Away(f"Nothing answers at {url}; start it with `spard up`, or set SPARD_BASE_URL.") from None
    except httpx2.TransportError as error:
        raise Broken(f"The connection to {url} broke: {error or type(error).__name__}.") from None


def api_key() -> str:
    """Return the caller's key."""
    key = os.environ.get("SPARD_API_KEY")
    if not key:
        raise CommandFailed("Set SPARD_API_KEY to your key; `spard up` or `spard keys first` shows the first one.")
    if not (key.isascii() and key.isprintable()):
        raise CommandFailed("SPARD_API_KEY holds characters that no key has; copy it again, in one line.")
    return key


def service_url() -> str:
    """Return the address of the API; `/v1` is added to one without a path."""
    url = os.environ.get("SPARD_BASE_URL", DEFAULT_URL).rstrip("/")
    return f"{url}/v1" if urlsplit(url).path in ("", "/") else url


def get(path: str, **params: object) -> Any:
    """Return what one of the service's endpoints answers with."""
    with connect() as client:
        return client.get(path, **params)


def _route(path: str) -> str:
    """Return the path below `/v1`; refuse what would lead out of its place."""
    route = path.lstrip("/")
    if not {"", ".", ".."}.isdisjoint(route.split("/")):
        raise CommandFailed("An id is neither empty nor a path; `list` shows the ids.")
    return route


def _query_params(params: Mapping[str, object]) -> dict[str, str | list[str]]:
    return {name: _as_text(value) for name, value in params.items() if value is not None}


def _as_text(value: object) -> str | list[str]:
    """Return a parameter as the address has it; one with several values is a list."""
    if isinstance(value, list):
        return [str(each) for each in value]
    return str(value).lower() if isinstance(value, bool) else str(value)


def _refusal_error(answer: httpx2.Response) -> CommandFailed:
    """Return what the service says of a request that it refused, in one line."""
    if answer.status_code == _UNAUTHORIZED:
        return CommandFailed(f"{service_url()} does not know this key; check SPARD_API_KEY.")
    kind = Busy if answer.status_code in _BUSY else CommandFailed
    try:
        return kind(str(answer.json()["error"]["message"]))
    except (ValueError, KeyError, TypeError):
        return _stranger(answer)


def _stranger(answer: httpx2.Response) -> CommandFailed:
    """Return what to say of an answer that is not in the service's words."""
    what = f"{service_url()} answered {answer.status_code} and no word of SPARD's"
    return CommandFailed(f"{what}; check SPARD_BASE_URL, it is like {DEFAULT_URL}.")

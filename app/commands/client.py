"""The HTTP client of the commands, with resumable downloads; it does not use openai, whose import takes half a second.

The bytes of a download go to a partial file, which gets its final name once it is complete and checked. The partial
file's name contains the object's ETag. The next attempt asks for the rest of exactly that object (RFC 9110, Range and
If-Range), and gets the whole object if it has changed.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from app.commands.terminal import CommandFailed, warn

if TYPE_CHECKING:
    import httpx2  # slow to import, and `spard --help` does not need it


DEFAULT_URL = "http://127.0.0.1:8000/v1"
_CONNECT_S, _ANSWER_S = 10.0, 600.0
_SILENCE_S = 60.0  # longest silence of an event stream, which has heartbeats
_UNAUTHORIZED, _NO_MORE_BYTES = 401, 416
_BUSY = (429, 503)  # the server has done nothing, so the request may be sent again
_WAIT_S, _LONGEST_WAIT_S = 1.0, 5.0  # before the second try: where the answer names no wait, and at most


class Busy(CommandFailed):
    """The service is busy or stopping; the same request may succeed later."""


class Away(CommandFailed):
    """Nothing listens at the service's address."""


class Broken(CommandFailed):
    """The connection ended before the answer did; a further request may get the rest."""


class Client:
    """A client of the API; paths are relative to `/v1`, and methods return parsed JSON.

    Every method raises CommandFailed, with the service's message, for an error status: `Busy` for 429 and 503, `Away`
    and `Broken` for connections.

        with connect() as client:
            client.get("models")["data"]
    """

    def __init__(self, http: httpx2.Client) -> None:
        self._http = http

    def get(self, path: str, **params: object) -> Any:
        """Send a GET and return its JSON; query parameters that are None are left out."""
        return self._ask("GET", path, params=_query_params(params))

    def post(self, path: str, body: object = None, headers: Mapping[str, str] | None = None, **params: object) -> Any:
        """Send a POST with a JSON body and return its JSON."""
        return self._ask("POST", path, params=_query_params(params), headers=headers, json=body)

    def delete(self, path: str, **params: object) -> Any:
        """Send a DELETE and return its JSON."""
        return self._ask("DELETE", path, params=_query_params(params))

    def send(self, path: str, file: Path, fields: Mapping[str, str] | None = None, **params: object) -> Any:
        """Upload a file as a multipart form, streamed from disk, after the form's `fields`; return the JSON."""
        with file.open("rb") as content:
            parts = {"file": (file.name, content, "application/octet-stream")}
            return self._ask("POST", path, params=_query_params(params), data=dict(fields or {}), files=parts)

    def text(self, path: str, accept: str) -> str:
        """Send a GET and return its body as text, in the media type `accept`."""
        return self._answer("GET", path, headers={"accept": accept}).text

    def pages(self, path: str, limit: int, **params: object) -> Iterator[Any]:
        """Yield up to `limit` rows of a paginated list."""
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
        """Send a GET and yield the response with its body unread, not compressed.

        Raises CommandFailed for error statuses other than 416, which tells a resumed download that it is complete.
        """
        # A `Range` counts bytes of the body as sent: only without compression are they bytes of the file.
        plain = {"accept-encoding": "identity", **headers}
        with _wire(), self._http.stream("GET", _route(path), headers=plain) as answer:
            if answer.is_error and answer.status_code != _NO_MORE_BYTES:
                answer.read()
                raise _refusal_error(answer)
            yield answer

    @contextmanager
    def events(self, path: str, body: object = None, **headers: str) -> Iterator[httpx2.EventSource]:
        """Open a stream of server-sent events, by a GET, or by a POST if there is a body."""
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
        """Send a request, and once more if the service was busy and the request can be repeated."""
        with _wire():
            answer = self._http.request(method, _route(path), **options)
            may_again = answer.headers.get("x-should-retry") != "false" and "files" not in options
            if answer.status_code in _BUSY and may_again:
                # Imported here: every command's help loads this module, and `spard.config` takes long to import.
                from spard.config.patience import parse_retry_header

                asked_s = parse_retry_header(answer.headers.get("retry-after"))
                time.sleep(min(_WAIT_S if asked_s is None else asked_s, _LONGEST_WAIT_S))
                answer = self._http.request(method, _route(path), **options)
        if answer.is_error:
            raise _refusal_error(answer)
        return answer


@contextmanager
def connect() -> Iterator[Client]:
    """Yield a client of the service at SPARD_BASE_URL with the key SPARD_API_KEY.

    Connection errors are raised as `Away`, `Broken` or CommandFailed.
    """
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
    """Translate connection errors inside the block to CommandFailed."""
    import httpx2

    url = service_url()
    try:
        yield
    except (httpx2.InvalidURL, httpx2.UnsupportedProtocol):
        raise CommandFailed(f"SPARD_BASE_URL is not a valid address: {url!r}; example: {DEFAULT_URL}.") from None
    except httpx2.ConnectError:
        raise Away(f"Nothing answers at {url}; start it with `spard up`, or set SPARD_BASE_URL.") from None
    except httpx2.TransportError as error:
        raise Broken(f"The connection to {url} broke: {error or type(error).__name__}.") from None


def api_key() -> str:
    """Return the key SPARD_API_KEY; raise CommandFailed if it is missing or malformed."""
    key = os.environ.get("SPARD_API_KEY")
    if not key:
        raise CommandFailed("Set SPARD_API_KEY to your key; `spard up` or `spard keys first` shows the first one.")
    if not (key.isascii() and key.isprintable()):
        raise CommandFailed("SPARD_API_KEY holds characters that no key has; copy it again, in one line.")
    return key


def service_url() -> str:
    """Return the API's URL from SPARD_BASE_URL, with `/v1` added if it has no path."""
    url = os.environ.get("SPARD_BASE_URL", DEFAULT_URL).rstrip("/")
    return f"{url}/v1" if urlsplit(url).path in ("", "/") else url


def get(path: str, **params: object) -> Any:
    """Send one GET to the service and return its JSON."""
    with connect() as client:
        return client.get(path, **params)


def _route(path: str) -> str:
    """Return a path relative to `/v1`; raise CommandFailed for empty, `.` or `..` parts, which a bad id can produce."""
    route = path.lstrip("/")
    if not {"", ".", ".."}.isdisjoint(route.split("/")):
        raise CommandFailed("An id is neither empty nor a path; `list` shows the ids.")
    return route


def _query_params(params: Mapping[str, object]) -> dict[str, str | list[str]]:
    return {name: _as_text(value) for name, value in params.items() if value is not None}


def _as_text(value: object) -> str | list[str]:
    """Return a query parameter as text; one with several values as a list."""
    if isinstance(value, list):
        return [str(each) for each in value]
    return str(value).lower() if isinstance(value, bool) else str(value)


def _refusal_error(answer: httpx2.Response) -> CommandFailed:
    """Return the exception for an error status, with the service's own message."""
    if answer.status_code == _UNAUTHORIZED:
        return CommandFailed(f"{service_url()} does not know this key; check SPARD_API_KEY.")
    kind = Busy if answer.status_code in _BUSY else CommandFailed
    try:
        return kind(str(answer.json()["error"]["message"]))
    except (ValueError, KeyError, TypeError):
        return _stranger(answer)


def _stranger(answer: httpx2.Response) -> CommandFailed:
    """Return the exception for an answer that is not SPARD's, as from another server or a proxy."""
    what = f"{service_url()} answered {answer.status_code}, but not as a SPARD service does"
    return CommandFailed(f"{what}; check SPARD_BASE_URL; example: {DEFAULT_URL}.")


# Download objects.

_PART = re.compile(r"\.([0-9A-Za-z-]{1,128})\.part")
_NO_TAG = "untagged"  # a partial file without an ETag, which cannot be resumed
_DIGEST = re.compile(r"[0-9a-f]{64}")
_WAITS_S = (1.0, 2.0, 4.0)
_CHUNK_BYTES = 1 << 20
_PART_OF_IT = 206


@dataclass(frozen=True, slots=True)
class Download:
    """A downloaded file; `resumed_at` is the size of the partial file before the last request."""

    path: Path
    bytes: int
    sha256: str
    resumed_at: int


def download(client: Client, url: str, path: Path, check: Callable[[Path], None] = lambda _: None) -> Download:
    """Download an object to `path`, resuming a partial download.

    `check` gets the complete partial file and raises CommandFailed if it is not acceptable; the file is then removed.
    Raises CommandFailed also for a wrong SHA-256 and if `path` cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part, resumed_at = _fetch(client, url, path)
        digest = _digest(part)
        _compare(part, path, digest)
        _check_part(part, check)
        saved = Download(path, part.stat().st_size, digest, resumed_at)
        os.replace(part, path)
    except OSError as error:
        raise CommandFailed(f"{path} cannot be written: {error.strerror or error}.") from None
    return saved


def _fetch(client: Client, url: str, path: Path) -> tuple[Path, int]:
    """Return the complete partial file, and its size before the last request; retry up to three times."""
    waits = iter(_WAITS_S)
    while True:
        try:
            return _once(client, url, path)
        except (Broken, Busy) as error:
            if (wait_s := next(waits, None)) is None:
                raise
            warn(f"{error} Going on in {wait_s:g} s.")
            time.sleep(wait_s)


def _once(client: Client, url: str, path: Path) -> tuple[Path, int]:
    """Make one request for the missing bytes; return the complete file and its size before the request.

    Raises `Broken` if the connection ends early; what came is kept.
    """
    old = next((each for each in _parts(path) if each.stat().st_size and _part_tag(each, path) != _NO_TAG), None)
    rest = {"range": f"bytes={old.stat().st_size}-", "if-range": f'"{_part_tag(old, path)}"'} if old else {}
    with client.stream(url, rest) as answer:
        if old and answer.status_code == _NO_MORE_BYTES:
            return old, old.stat().st_size  # the partial file is complete already
        is_rest = answer.status_code == _PART_OF_IT
        part = old if old and is_rest else path.with_name(f"{path.name}.{_tag(answer)}.part")
        for other in _parts(path):
            if other != old or not is_rest:
                other.unlink()
        start = part.stat().st_size if is_rest else 0
        length = answer.headers.get("content-length")
        total = start + int(length) if length else None
        with part.open("ab" if is_rest else "wb") as file, _bar(path.name, start, total) as advance:
            for chunk in answer.iter_raw(_CHUNK_BYTES):
                file.write(chunk)
                advance(len(chunk))
    if total is not None and part.stat().st_size < total:
        raise Broken(f"{part.stat().st_size} of {total} bytes came.")
    return part, start


@contextmanager
def _bar(name: str, start: int, total: int | None) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on standard error if it is a terminal; yield a function that adds bytes to it."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Progress(*columns, console=console, disable=not sys.stderr.isatty(), transient=True) as progress:
        task = progress.add_task(name, total=total, completed=start)
        yield lambda n: progress.advance(task, n)


def _parts(path: Path) -> list[Path]:
    """Return the partial files of earlier attempts, newest first."""
    found = [each for each in path.parent.glob("*.part") if each.name.startswith(path.name) and _part_tag(each, path)]
    return sorted(found, key=lambda each: each.stat().st_mtime, reverse=True)


def _part_tag(part: Path, path: Path) -> str:
    match = _PART.fullmatch(part.name.removeprefix(path.name))
    return match.group(1) if match else ""


def _tag(answer: httpx2.Response) -> str:
    """Return a response's ETag if it is valid in a file name, else `untagged`."""
    tag = answer.headers.get("etag", "").strip('"')
    return tag if _PART.fullmatch(f".{tag}.part") else _NO_TAG


def _digest(part: Path) -> str:
    with part.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _compare(part: Path, path: Path, digest: str) -> None:
    """Compare a file with its ETag if that is a SHA-256, as in our API but not in S3; raise CommandFailed."""
    tag = _part_tag(part, path)
    if _DIGEST.fullmatch(tag) and tag != digest:
        part.unlink()
        raise CommandFailed("What came has another SHA-256 than the service says, and was removed; try again.")


def _check_part(part: Path, check: Callable[[Path], None]) -> None:
    try:
        check(part)
    except CommandFailed:
        part.unlink(missing_ok=True)
        raise

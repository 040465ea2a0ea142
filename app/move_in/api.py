"""Call an OpenAI-compatible API with retries for rate limits, 5xx and broken connections."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from threading import Event
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from app.move_in.ledger import MoveInFailed, Record, shown_url, without_keys
from spard.config.patience import Patience, parse_retry_header

if TYPE_CHECKING:
    from openai import APIStatusError, OpenAI

T = TypeVar("T")
Source = Literal["openai", "azure", "together"]
MOST_ASKED_S = 300.0  # longest wait that an API's `Retry-After` may ask for
_JITTER = 0.25
_TIMEOUTS = (408, 429)
_NOT_IMPLEMENTED = 501


class Broken(Exception):
    """An answer is incomplete or malformed; the request is retried."""


@dataclass(slots=True)
class Api:
    """An API with retries.

    client        the openai client, with its own retries turned off
    key_variable  the environment variable of its key, for messages
    patience      how long to retry
    tell          called with a line for each wait
    stopping      set when the command is stopped, which ends all waits
    source        whose API it is
    deployments   the name under which a model answers, where it is not the model's own, as at Azure
    """

    client: OpenAI
    key_variable: str
    patience: Patience = field(default_factory=lambda: Patience(limit_s=600))
    tell: Callable[[str], None] = lambda line: None
    stopping: Event = field(default_factory=Event)
    source: Source = "openai"
    deployments: Mapping[str, str] = field(default_factory=dict)
    _has_answered: bool = False

    @property
    def url(self) -> str:
        """The base URL without user, password and query."""
        return shown_url(str(self.client.base_url))

    def call(self, request: Callable[[], T]) -> T:
        """Call `request`, retrying on errors that may pass, and return its result.

        Raises `MoveInFailed` when the retries are used up, nothing ever answered, or the key is refused; other errors
        of the client pass through.
        """
        waits = self.patience.waits()
        while True:
            try:
                found = request()
            except Exception as error:  # of the client or of its HTTP library
                self._has_answered |= _status(error) is not None
                wait_s = next(waits, None)
                if not self._is_worth_waiting(error) or wait_s is None:
                    raise self._final(error) from None
                wait_s = max(wait_s * random.uniform(1, 1 + _JITTER), min(_asked_s(error), MOST_ASKED_S))
                self.tell(f"{_why(error)}; trying again in {wait_s:.0f} s")
                self.wait(wait_s)
            else:
                self._has_answered = True
                return found

    def wait(self, seconds: float) -> None:
        """Wait; raise `MoveInFailed` if the command is stopped meanwhile."""
        if self.stopping.wait(seconds):
            raise MoveInFailed("The command was stopped.")

    def get(self, path: str, **params: str | int) -> Record:
        """Send a GET and return its JSON object."""
        return self._object(lambda: self.client.get(path, cast_to=object, options={"params": params}))

    def post(self, path: str, body: Record, **headers: str) -> Record:
        """Send a POST and return its JSON object; keywords become headers, as `idempotency_key=` Idempotency-Key."""
        named = {name.replace("_", "-").title(): value for name, value in headers.items()}
        return self._object(lambda: self.client.post(path, body=body, cast_to=object, options={"headers": named}))

    def chat(self, body: Record) -> Record:
        """Send a chat request in OpenAI's form, with the names that this API has for the model and the limit."""
        sent = body | {"model": self.deployments.get(body["model"], body["model"])}
        if self.source == "together" and "max_completion_tokens" in sent:
            sent["max_tokens"] = sent.pop("max_completion_tokens")
        return self.post("/chat/completions", sent)

    def pages(self, path: str, limit: int) -> Iterator[Record]:
        """Yield all objects of a paginated list."""
        after, seen = "", set[str]()
        while True:
            page = self.get(path, limit=limit, **({"after": after} if after else {}))
            data = page.get("data") or []
            yield from data
            if not data or page.get("has_more") is False:
                return
            # The last id is the cursor. One that comes a second time means that the server ignores `after`.
            after = str(data[-1]["id"])
            if after in seen:
                if "has_more" not in page:
                    return  # a server without pagination sends the first page again
                raise MoveInFailed(f"{self.url}{path} sends the same page again and again.")
            seen.add(after)

    def _object(self, request: Callable[[], object]) -> Record:
        def whole() -> Record:
            found = request()
            if not isinstance(found, dict):
                raise Broken("an answer is no JSON object")
            return found

        return self.call(whole)

    def _is_worth_waiting(self, error: Exception) -> bool:
        # Until something has answered, the URL is more likely wrong than the server away, so it fails at once.
        return is_passing(error) and (self._has_answered or isinstance(error, Broken))

    def _final(self, error: Exception) -> Exception:
        """Return the exception to raise after the last try: a MoveInFailed for errors that callers cannot handle."""
        status = _status(error)
        if status == 401:
            return MoveInFailed(f"{self.url} does not know this key; check {self.key_variable}.")
        if not is_passing(error):
            if getattr(error, "code", None) == "insufficient_quota":
                return MoveInFailed(f"{self.url}: the account has no quota left; nothing that was done is lost.")
            return error
        if not self._has_answered and status is None:
            return MoveInFailed(f"Nothing answers at {self.url}.")
        again = "run the same command again, it goes on where this one stopped"
        return MoveInFailed(f"{self.url}: {_why(error)}, for {self.patience.limit_s:.0f} s; {again}.")


def is_passing(error: Exception) -> bool:
    """Return True if the same request may succeed later."""
    from openai import APIConnectionError  # takes half a second to import

    if isinstance(error, APIConnectionError | Broken):
        return True
    status = _status(error)
    if status is None:  # the HTTP library's own error, in the middle of a download
        return any(kind.__name__ == "TransportError" for kind in type(error).__mro__)
    is_ours = status in _TIMEOUTS or (status >= 500 and status != _NOT_IMPLEMENTED)
    return is_ours and getattr(error, "code", None) != "insufficient_quota"


def refusal(error: APIStatusError) -> Record:
    """Return an API's refusal as the ledger stores it: status, code and message, without keys."""
    body: Any = error.body if isinstance(error.body, dict) else {}
    message = " ".join(without_keys(str(body.get("message") or error)).split())
    return {"status": error.status_code, "code": body.get("code"), "message": message}


def _status(error: Exception) -> int | None:
    found = getattr(error, "status_code", None)
    return found if isinstance(found, int) else None


def _why(error: Exception) -> str:
    status = _status(error)
    if isinstance(error, Broken):
        return str(error)
    return {None: "the connection broke", 429: "too many requests"}.get(status, f"the server answers {status}")


def _asked_s(error: Exception) -> float:
    """Return the wait that an error's `Retry-After` asks for, in seconds; 0 without one."""
    response = getattr(error, "response", None)
    return 0.0 if response is None else parse_retry_header(response.headers.get("retry-after")) or 0.0

"""Checks of a customer's side: the address, the service behind it, and the key."""

from __future__ import annotations

import os
from collections.abc import Iterator
from urllib.parse import urlsplit

import httpx2

from app.commands import client
from app.commands.doctor import Finding, note, ok, problem
from app.commands.terminal import CommandFailed

_WAIT_S = 5.0
_LIKE = f"export SPARD_BASE_URL={client.DEFAULT_URL}, with the host and port of your service"


def checks() -> Iterator[Finding]:
    """Check the address, then the service that answers there, then the key."""
    url = client.service_url()
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        yield problem("address", f"SPARD_BASE_URL is no address: {url!r}.", _LIKE)
        return
    if parts.path.rstrip("/").rsplit("/", 1)[-1] != "v1":
        yield problem("address", f"{url} does not end with /v1, as the API's address does.", _LIKE)
        return
    yield ok("address", url)
    yield from _service(url)
    yield _key(url)


def _service(url: str) -> Iterator[Finding]:
    root = url.removesuffix("/v1")
    try:
        alive = httpx2.get(f"{root}/healthz", timeout=_WAIT_S)
        ready = httpx2.get(f"{root}/readyz", timeout=_WAIT_S)
    except (httpx2.TransportError, httpx2.InvalidURL) as error:
        cure = "start the service there with `spard up`, or correct SPARD_BASE_URL"
        yield problem("service", f"Nothing answers at {root}: {error or type(error).__name__}.", cure)
        return
    if _word(alive, "status") != "ok":
        yield problem("service", f"What answers at {root} is no SPARD service.", _LIKE)
    elif ready.is_error:
        why = _word(ready, "error", "message") or f"it answers {ready.status_code}"
        yield problem("service", f"The service runs but is not ready: {why}", "run `spard doctor` on its machine")
    else:
        yield ok("service", f"{root} is alive and ready")
        yield from (note("service", f"Tell the provider: {each}") for each in _warnings(ready))


def _key(url: str) -> Finding:
    make = "ask the provider for a key, or make one: `spard keys create PROJECT NAME`, `spard keys first`"
    try:
        headers = {"authorization": f"Bearer {client.api_key()}"}
    except CommandFailed as error:
        return problem("key", str(error), f"export SPARD_API_KEY=sk-spard-...; {make}")
    try:
        found = httpx2.get(f"{url}/models", headers=headers, timeout=_WAIT_S)
    except (httpx2.TransportError, httpx2.InvalidURL):
        return Finding("key", "note", f"{_masked_key()} is set, but cannot be checked while no service answers")
    if found.status_code == httpx2.codes.UNAUTHORIZED:
        return problem(
            "key", f"The service does not know {_masked_key()}: mistyped, expired, revoked or of another.", make
        )
    if found.is_error:
        why = _word(found, "error", "message") or str(found.status_code)
        return problem("key", f"{_masked_key()} cannot list models: {why}", make)
    return ok("key", f"{_masked_key()} is good")


def _masked_key() -> str:
    return f"SPARD_API_KEY ({os.environ.get('SPARD_API_KEY', '')[:12]}...)"


def _warnings(answer: httpx2.Response) -> list[str]:
    """Return the warnings in a service's readiness answer."""
    try:
        warnings = answer.json()["warnings"]
    except (ValueError, KeyError, TypeError):
        return []
    return [str(each) for each in warnings] if isinstance(warnings, list) else []


def _word(answer: httpx2.Response, *keys: str) -> str | None:
    """Return the value at a path of keys in an answer's JSON, as text; None if there is none."""
    try:
        found = answer.json()
        for key in keys:
            found = found[key]
    except (ValueError, KeyError, TypeError):
        return None
    return str(found)

"""Probe a judge's endpoint with the standard library only: the judge's own client loads torch."""

from __future__ import annotations

import json
import os
from http.client import HTTPException
from urllib.error import HTTPError
from urllib.request import HTTPRedirectHandler, Request, build_opener

from spard.config import JudgeSpec

_OPENAI = "https://api.openai.com/v1"
_PASSING = (408, 409, 429)  # statuses that may go away after a while, as 5xx may


class _StaysHere(HTTPRedirectHandler):
    """Follows no redirect, because the API key must reach only the configured server."""

    def redirect_request(self, *_: object) -> None:
        """Return None, so that the redirect is raised as an error."""


_OPENER = build_opener(_StaysHere)


def answers(spec: JudgeSpec, key: str | None) -> bool:
    """Return True if an `llm` judge answers a request for one token.

    Errors that waiting cannot cure, such as a wrong key, count as an answer: the next job reports them.
    """
    asked = {"model": spec.model, "messages": [{"role": "user", "content": "Is the sky blue?"}], "max_tokens": 1}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key or 'none'}"}
    address = spec.base_url or os.environ.get("OPENAI_BASE_URL") or _OPENAI  # the judge's client reads it too
    url = f"{address.rstrip('/')}/chat/completions"
    request = Request(url, json.dumps(asked).encode(), headers)  # noqa: S310 - the provider's own address
    try:
        with _OPENER.open(request, timeout=spec.timeout_s):
            return True
    except HTTPError as error:
        return error.code < 500 and error.code not in _PASSING
    except (OSError, HTTPException):
        return False

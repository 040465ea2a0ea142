"""A chat model behind an OpenAI-compatible endpoint."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from openai import (
    APIStatusError,
    AuthenticationError,
    BadRequestError,
    DefaultHttpxClient,
    NotFoundError,
    OpenAI,
    OpenAIError,
    PermissionDeniedError,
    UnprocessableEntityError,
)

from spard.config import JudgeSpec
from spard.config.patience import parse_retry_header
from spard.errors import JudgeUnavailable

log = logging.getLogger(__name__)

MAX_ANSWER_TOKENS = 1024
MAX_REASONED_TOKENS = 8192  # limit where the reasoning before an answer counts too
_MAX_QUOTED = 200  # characters of an endpoint's message that ours quotes

_OF_TEXTS = re.compile(r"(messages|prompt|input|content)\b")  # parameters with the judged text
_LIMITS = ("max_tokens", "max_completion_tokens")
_TOO_LONG = re.compile(r"context", re.IGNORECASE)  # "maximum context length", "context_length_exceeded"


@dataclass(slots=True)
class Dialect:
    """The optional arguments that an endpoint accepts, learned from its error messages for the lifetime of the client.

    OpenAI's reasoning models refuse `max_tokens`, and any temperature but their own.
    """

    arguments: dict[str, Any] = field(default_factory=lambda: {"max_tokens": MAX_ANSWER_TOKENS, "temperature": 0})

    def drop(self, name: str) -> bool:
        """Stop sending an argument, or replace it by its successor; return False if neither is possible."""
        if name == "max_tokens":
            kept = {key: value for key, value in self.arguments.items() if key != name}
            self.arguments = kept | {"max_completion_tokens": MAX_REASONED_TOKENS}
        elif name == "temperature":
            self.arguments = {key: value for key, value in self.arguments.items() if key != name}
        else:
            return False
        log.warning("the judge's endpoint refuses %s, and is asked without it from now on", name)
        return True


@dataclass(frozen=True, slots=True)
class Endpoint:
    """`spard.evaluation.judges.llm.Chat` over HTTP.

    The client retries calls that time out, are throttled or fail with 5xx.
    """

    client: OpenAI
    model: str
    dialect: Dialect = field(default_factory=Dialect, compare=False)

    def complete(self, system: str, user: str) -> str:
        """Return the answer, at temperature 0 if the endpoint accepts that; empty if it declines the text.

        If the endpoint refuses an argument, the call is repeated without it. Raises `JudgeUnavailable` if it does not
        answer, or refuses a required argument; the latter is permanent, because the judge's set-up is wrong and not the
        text.
        """
        # Each round drops one more argument, so the loop ends.
        while True:
            sent = self.dialect.arguments
            try:
                answer = self.client.chat.completions.create(
                    model=self.model,
                    messages=[{"role": "system", "content": system}, {"role": "user", "content": user}],
                    **sent,
                )
                return answer.choices[0].message.content or ""
            except (BadRequestError, UnprocessableEntityError) as error:
                name = refused_argument(error, sent)
                if name is None:
                    log.warning("the judge's endpoint declined a text: %s", error.status_code)
                    return ""
                was_dropped = name in sent and name not in self.dialect.arguments  # by another thread in the meantime
                if not was_dropped and (name not in sent or not self.dialect.drop(name)):
                    raise _setup_error(error, name) from error
            except (OpenAIError, ValueError, AttributeError, IndexError, TypeError) as error:
                raise _unavailable(error) from error


def refused_argument(error: APIStatusError, sent: Mapping[str, object]) -> str | None:
    """Return the argument that an endpoint refuses; None if it declines the text itself.

    It may decline a text for a content filter, or because it is too long; some servers then name `max_tokens`.
    """
    words = _words(error)
    name = error.param or next((each for each in sent if re.search(rf"['\"`]{each}['\"`]", words)), None)
    if name is None or (_OF_TEXTS.match(name) and not name.endswith("role")):
        return None
    return None if name in _LIMITS and _TOO_LONG.search(f"{error.code} {words}") else name


def _setup_error(error: APIStatusError, name: str) -> JudgeUnavailable:
    told = " ".join(_words(error).split())[:_MAX_QUOTED]
    return JudgeUnavailable(
        f"The judge's endpoint refuses {name!r}, whatever it is asked: {told} Set up the judge for that model, or take "
        "another model.",
        "judge",
        is_passing=False,
    )


def _words(error: APIStatusError) -> str:
    """Return the endpoint's error message; empty if the body is not in OpenAI's form."""
    return str(error.body.get("message") or "") if isinstance(error.body, dict) else ""


def _unavailable(error: Exception) -> JudgeUnavailable:
    """Return the error, marked as permanent if an operator must fix a key, an address or a permission."""
    return JudgeUnavailable(
        f"The judge's endpoint did not answer: {type(error).__name__}.",
        "judge",
        is_passing=not isinstance(error, AuthenticationError | PermissionDeniedError | NotFoundError)
        and not (isinstance(error, APIStatusError) and error.response.is_redirect),
        retry_after_s=parse_retry_header(error.response.headers.get("retry-after"))
        if isinstance(error, APIStatusError)
        else None,
    )


def open_chat(spec: JudgeSpec, key: str | None = None) -> Endpoint:
    """Open a judge's endpoint with the given key, or else the one in the environment.

    Without any, a placeholder is sent.
    """
    key = key or os.environ.get(spec.api_key_env) or "none"
    http = DefaultHttpxClient(follow_redirects=False)  # judged texts must reach only the configured server
    client = OpenAI(
        api_key=key, base_url=spec.base_url, timeout=spec.timeout_s, max_retries=spec.retries, http_client=http
    )
    return Endpoint(client, spec.model)

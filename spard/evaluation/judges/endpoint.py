"""A chat model behind an OpenAI-compatible endpoint."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

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
from spard.errors import JudgeUnavailable

log = logging.getLogger(__name__)

MAX_ANSWER_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class Endpoint:
    """`spard.evaluation.judges.llm.Chat` over HTTP.

    The client repeats calls that time out, are throttled or fail with 5xx.
    """

    client: OpenAI
    model: str

    def complete(self, system: str, user: str) -> str:
        """Ask at temperature 0; a text that the endpoint declines is answered with an empty string."""
        try:
            answer = self.client.chat.completions.create(
                model=self.model,
                messages=[{"role": "system", "content": system}, {"role": "user", "content": user}],
                temperature=0,
                max_tokens=MAX_ANSWER_TOKENS,
            )
            return answer.choices[0].message.content or ""
        except (BadRequestError, UnprocessableEntityError) as error:
            log.warning("the judge's endpoint declined a text: %s", error.status_code)
            return ""
        except (OpenAIError, ValueError, AttributeError, IndexError, TypeError) as error:
            raise _unavailable(error) from error


def _unavailable(error: Exception) -> JudgeUnavailable:
    """Tell what passes from what somebody has to mend: a key, an address, a right."""
    return JudgeUnavailable(
        f"The judge's endpoint did not answer: {type(error).__name__}.",
        "judge",
        is_passing=not isinstance(error, AuthenticationError | PermissionDeniedError | NotFoundError)
        and not (isinstance(error, APIStatusError) and error.response.is_redirect),
        retry_after_s=_asked_to_wait_s(error) if isinstance(error, APIStatusError) else None,
    )


def _asked_to_wait_s(error: APIStatusError) -> float | None:
    """Return the header Retry-After in seconds; None where it is a date or there is none."""
    text = error.response.headers.get("retry-after", "")
    return float(text) if text.isascii() and text.isdigit() else None


def open_chat(spec: JudgeSpec, key: str | None = None) -> Endpoint:
    """Open a judge's endpoint, with the key from the environment if none is given; no key at all is a placeholder."""
    key = key or os.environ.get(spec.api_key_env) or "none"
    http = DefaultHttpxClient(follow_redirects=False)  # what is judged is for the named server alone
    client = OpenAI(
        api_key=key, base_url=spec.base_url, timeout=spec.timeout_s, max_retries=spec.retries, http_client=http
    )
    return Endpoint(client, spec.model)

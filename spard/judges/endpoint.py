"""A chat model behind an OpenAI-compatible endpoint."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

from openai import BadRequestError, OpenAI, OpenAIError, UnprocessableEntityError

from spard.config import JudgeSpec
from spard.errors import JudgeUnavailable

log = logging.getLogger(__name__)

MAX_ANSWER_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class Endpoint:
    """`spard.judges.llm.Chat` over HTTP; the client repeats calls that time out, are throttled or fail with 5xx."""

    client: OpenAI
    model: str

    def complete(self, system: str, user: str) -> str:
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
            raise JudgeUnavailable(f"The judge's endpoint did not answer: {type(error).__name__}.", "judge") from error


def open_chat(spec: JudgeSpec) -> Endpoint:
    """The endpoint of a judge; servers without keys get a word in its place."""
    key = os.environ.get(spec.api_key_env) or "none"
    client = OpenAI(api_key=key, base_url=spec.base_url, timeout=spec.timeout_s, max_retries=spec.retries)
    return Endpoint(client, spec.model)

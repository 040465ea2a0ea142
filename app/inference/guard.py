"""The guard: a moderation endpoint, named by the policy, that checks requests and replies.

If it does not answer, the request is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from app.errors import InvalidRequest, Unavailable
from app.inference.clients import NO_KEY, Clients
from app.inference.protocol import Ask
from app.policies.schemas import GuardRule
from app.settings import Settings

FILTERED: Literal["content_filter"] = (
    "content_filter"  # OpenAI's word, for a reply that ends so and for a request that is refused
)
_OPTIONS: Any = {"max_retries": 1, "timeout": 30}


@dataclass(frozen=True, slots=True)
class Guard:
    """The guard of a request: the policy's rule, the endpoint's key, and the HTTP clients of this process."""

    rule: GuardRule
    key: str
    clients: Clients

    async def check_input(self, ask: Ask) -> None:
        """Raise `InvalidRequest` (`content_filter`) if the endpoint flags any text of the request."""
        texts = [text for text in _read(ask) if text]
        if self.rule.input and texts and await self.flags(texts):
            message = "The request was flagged by the provider's moderation, and is not answered."
            raise InvalidRequest(message, code="content_filter", param="messages")

    async def flags(self, texts: Sequence[str]) -> bool:
        """Return True if the endpoint flags one of the texts; raise `guard_unavailable` if it does not answer."""
        found = await self.moderate({"input": list(texts)})
        try:
            return any(result["flagged"] for result in found["results"])  # type: ignore[index]
        except (KeyError, TypeError):
            raise _away() from None

    async def moderate(self, body: dict[str, object]) -> object:
        """Send a moderation request and return the endpoint's answer; raise `guard_unavailable` without one."""
        from openai import APIError  # takes half a second to import, and few policies name a guard

        asked = {"model": self.rule.model, **body}
        try:
            async with self.clients.open_client(self.rule.base_url, self.key) as client:
                return await client.post("/moderations", cast_to=object, body=asked, options=_OPTIONS)
        except APIError:
            raise _away() from None


def open_guard(rule: GuardRule | None, settings: Settings, clients: Clients) -> Guard | None:
    """Return the guard for a policy's rule, or None without a rule."""
    if rule is None:
        return None
    return Guard(rule, settings.policy_key("guard", rule.base_url) or NO_KEY, clients)


def _read(ask: Ask) -> Iterator[str]:
    """Yield all texts that the model reads: each turn with its calls, the prompt, each tool, and the reply's schema."""
    for message in ask["messages"] or []:
        turn = [message.get("content"), message.get("name"), message.get("tool_call_id")]
        yield _texts([*turn, *map(_call, message.get("tool_calls", []))])
    yield ask["prompt"] or ""
    yield from map(_texts, ask["tools"])
    yield _texts(ask["json_schema"])


def _call(call: dict[str, object]) -> object:
    """Return a call with its arguments parsed, as chat templates see them.

    JSON can spell one text in many ways, with escapes for example, which could hide it from the guard.
    """
    match call:
        case {"function": {"arguments": str(arguments), **function}}:
            with suppress(ValueError, RecursionError):
                return [call.get("id"), function, json.loads(arguments)]
    return call


def _texts(value: object) -> str:
    """Return all strings in a JSON value, field names included, one a line."""
    found, left = list[str](), [value]
    while left:
        match left.pop():
            case str(text):
                found.append(text)
            case dict(fields):
                left += reversed([part for field in fields.items() for part in field])
            case list(items):
                left += reversed(items)
    return "\n".join(found)


def _away() -> Unavailable:
    return Unavailable(
        "The moderation endpoint does not answer, so the request is refused; try again.", code="guard_unavailable"
    )

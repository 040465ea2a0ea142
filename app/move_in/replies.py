"""Ask a model each prompt several times and store each reply at once, so a crash loses only the running requests."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import TypedDict

from app.move_in.api import Api, refusal
from app.move_in.ledger import Ledger, MoveInFailed, Record
from app.move_in.prompts import Prompt

_GONE = (403, 404, 410)


class Plan(TypedDict):
    """The plan for a model: prompt ids, sampling settings, replies to each prompt, and the prompts' source."""

    prompts: list[str]
    sampling: Record
    replies: int
    source: str


class ModelGone(Exception):
    """The API refuses the model to this key; the message is the API's own."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: the reply of this number to a prompt."""

    model: str
    prompt_id: str
    sampling: Record
    number: int

    def key(self) -> str:
        """Return the request's key in the ledger."""
        text = json.dumps([self.model, self.prompt_id, self.sampling, self.number], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def body(self, prompt: Prompt) -> Record:
        """Return the request body; the reply's number is added to the seed, if there is one."""
        body = {"model": self.model, "messages": prompt["messages"], **self.sampling}
        if prompt["tools"]:
            body["tools"] = prompt["tools"]
        if "seed" in body:
            body["seed"] += self.number
        return body


def asks(model: str, plan: Plan) -> Iterator[Ask]:
    """Yield all requests of a plan: the first reply to each prompt, then the second, and so on."""
    for number in range(plan["replies"]):
        for prompt_id in plan["prompts"]:
            yield Ask(model, prompt_id, plan["sampling"], number)


def missing(ledger: Ledger, kind: str, model: str, plan: Plan, *, again: bool = False) -> list[Ask]:
    """Return the plan's requests that were not answered or refused; with `again`, also the refused ones."""
    known = ledger.all(kind)
    return [
        each for each in asks(model, plan) if (entry := known.get(each.key())) is None or (again and "refused" in entry)
    ]


def ask_all(api: Api, ledger: Ledger, kind: str, todo: list[Ask], *, at_once: int, tell: Callable[[int], None]) -> None:
    """Send requests, `at_once` in parallel, store each reply or refusal, and call `tell` with the number done.

    Raises `ModelGone` if the API refuses the model itself.
    """
    prompts: Mapping[str, Prompt] = {key: ledger.get("prompt", key) for key in {each.prompt_id for each in todo}}
    pool = ThreadPoolExecutor(at_once)
    try:
        running = {pool.submit(_answer, api, each, prompts[each.prompt_id]): each for each in todo}
        for done, future in enumerate(as_completed(running), 1):
            ask, answer = running[future], future.result()
            ledger.put(kind, ask.key(), {"model": ask.model, "prompt": ask.prompt_id, "number": ask.number, **answer})
            tell(done)
    except (KeyboardInterrupt, MoveInFailed):
        api.stopping.set()  # ends the waits of the other threads
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _answer(api: Api, ask: Ask, prompt: Prompt) -> Record:
    from openai import APIStatusError

    try:
        return {"response": api.chat(ask.body(prompt))}
    except APIStatusError as error:
        if error.status_code in _GONE:
            raise ModelGone(refusal(error)["message"]) from None
        return {"refused": refusal(error)}


def reply_text(response: Record) -> str | None:
    """Return a reply's text, with tool calls as JSON with sorted keys; None if it has no message."""
    choices = response.get("choices")
    message = choices[0].get("message") if isinstance(choices, list) and choices else None
    if not isinstance(message, dict):
        return None
    parts = [str(message.get("content") or message.get("refusal") or "").strip()]
    for call in message.get("tool_calls") or []:
        function = call.get("function") or {}
        parts.append(
            json.dumps(
                {"call": function.get("name"), "arguments": _parse_arguments(function.get("arguments"))}, sort_keys=True
            )
        )
    return "\n".join(part for part in parts if part)


def _parse_arguments(arguments: object) -> object:
    try:
        return json.loads(str(arguments))
    except ValueError:
        return arguments

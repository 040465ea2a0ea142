"""Ask a model all prompts of a plan, each several times, and store each reply at once: a crash loses few requests."""

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


# Ask a model all prompts of a plan: golden replies of old models, and replies of new ones.

GOLDEN, NEW = "golden", "new"
_TELL_EVERY = 25  # replies between two lines of progress
_CHARACTERS = 4  # per token, roughly


@dataclass(frozen=True, slots=True)
class Cost:
    """The rough cost of the requests that a plan still needs."""

    requests: int
    input_tokens: int
    output_tokens: int | None  # upper bound; None: without a limit

    def __str__(self) -> str:
        most = f"at most {self.output_tokens}" if self.output_tokens is not None else "an unknown number of"
        return f"{self.requests} requests, about {self.input_tokens} tokens in, {most} tokens out"


def cost(todo: list[Ask], prompts: dict[str, Prompt]) -> Cost:
    """Return the cost of requests, counting four characters as a token."""
    sizes = {key: len(json.dumps([each["messages"], each["tools"]])) // _CHARACTERS for key, each in prompts.items()}
    most = [each.sampling.get("max_completion_tokens") for each in todo]
    limit = None if None in most else sum(each for each in most if each is not None)
    return Cost(len(todo), sum(sizes[each.prompt_id] for each in todo), limit)


def ask_plan(
    api: Api,
    ledger: Ledger,
    kind: str,
    model: str,
    plan: Plan,
    *,
    at_once: int,
    again: bool,
    tell: Callable[[str], None],
) -> bool:
    """Send a plan's missing requests to a model and store the replies; return True if all are answered.

    kind     `GOLDEN` or `NEW`, under which the ledger stores the replies
    at_once  requests at the same time
    again    repeat refused requests too
    """
    todo = missing(ledger, kind, model, plan, again=again)

    def progress(done: int) -> None:
        if done % _TELL_EVERY == 0 or done == len(todo):
            tell(f"{model}: {done} of {len(todo)} replies")

    try:
        ask_all(api, ledger, kind, todo, at_once=at_once, tell=progress)
    except ModelGone as error:
        tell(f"{model} does not answer: {error}")
        return False
    refused = len(missing(ledger, kind, model, plan, again=True))
    if refused:
        tell(f"{model}: {refused} requests were refused; ask them again with --again")
    return refused == 0

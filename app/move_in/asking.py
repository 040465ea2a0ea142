"""Ask a model all prompts of a plan: golden replies of old models, and replies of new ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from app.move_in.api import Api
from app.move_in.ledger import Ledger
from app.move_in.prompts import Prompt
from app.move_in.replies import Ask, ModelGone, Plan, ask_all, missing

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

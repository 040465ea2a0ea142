"""Measure if the customer's task is learned, on a few rows that are not trained on; no suite is needed.

The losses on these rows are measured as on validation rows (`spard.pipeline.train.validate`). This module asks both
models a few of the rows' requests: the base model before the training, because full fine-tuning overwrites it, and the
trained model afterward. Each request has its row's system prompt, earlier turns and tools; replies are greedy.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypedDict

from spard.data.chat import render_conversation
from spard.data.held_out_rows import ASKED, HeldOutRows, hold_out_rows
from spard.data.rows import Example, is_learned, prompt_text
from spard.models.generate import complete
from spard.pipeline import costs
from spard.pipeline.context import Context
from spard.release.task_check import TaskCheck

_BASE, _TRAINED = "task_replies_base", "task_replies"
_SHOWN_CHARS = 4000  # of each text that is kept


class TaskReply(TypedDict):
    """A request of a row with the row's answer and both models' replies; `turns` are those before the request."""

    line: int
    turns: int
    system: str | None
    prompt: str
    expected: str
    base: str
    trained: str


@dataclass(frozen=True, slots=True)
class TaskRows:
    """The rows on which a run measures if its task is learned; both models answer the requests of the rows `asked`."""

    check: TaskCheck
    asked: Sequence[Example] = ()


def hold_back(
    context: Context, examples: Sequence[Example], trained: Sequence[int], suspicious: Collection[int]
) -> HeldOutRows:
    """Choose rows to hold out of the `trained` ones, none of them suspicious; the same in every attempt and rank.

    The choice is empty if the run asks for no such rows or has a validation file.
    """
    most = context.run.held_out_rows
    if not most or context.run.validation_file is not None:
        return HeldOutRows()
    requests = [prompt_text(each) for each in examples]
    eligible = [place for place in trained if place not in suspicious]
    return hold_out_rows(requests, eligible, most, context.recipe.seed, len(trained))


def from_training_file(context: Context, examples: Sequence[Example], held: HeldOutRows) -> TaskRows | None:
    """Return the check on held-out rows of the training file; None if the run asks for no check."""
    if not context.run.held_out_rows:
        return None
    if held.why_none:
        context.report.event(held.why_none, {})
        return TaskRows(TaskCheck("none", why_none=held.why_none))
    asked = [examples[place] for place in held.asked if _fits(context, examples[place])]
    is_pairs, count = context.recipe.dpo is not None, len(held.places)
    word = "row is" if count == 1 else "rows are"
    told = f"{count} {word} held out of the training, to show on them whether the task is learned"
    context.report.event(told, {"lines": [examples[place].line for place in held.places]})
    return TaskRows(TaskCheck("held_out", count, len(asked), is_pairs), asked)


def from_validation_file(context: Context, rows: Sequence[Example]) -> TaskRows | None:
    """Return the check on evenly spaced rows of the validation file; None if the run asks for no check."""
    if not context.run.held_out_rows:
        return None
    fitting = [each for each in rows if _fits(context, each)]
    count = min(ASKED, len(fitting))
    asked = [fitting[i * len(fitting) // count] for i in range(count)]
    return TaskRows(TaskCheck("validation_file", len(rows), count, context.recipe.dpo is not None), asked)


def ask_base(context: Context, rows: TaskRows | None) -> None:
    """Ask the base model and store its replies, unless an earlier attempt has stored them."""
    if not rows or not rows.asked:
        return
    kept = context.outputs.read(_BASE)
    if kept is None or kept["lines"] != _lines(rows):
        _ask(context, rows, context.base.model, _BASE, None)


def ask_trained(context: Context, rows: TaskRows | None, model: Any) -> None:
    """Ask the trained model under the system prompt that it is served with, and store its replies."""
    if rows and rows.asked:
        _ask(context, rows, model, _TRAINED, context.system_prompt)


def kept_replies(context: Context, rows: TaskRows | None) -> list[TaskReply]:
    """Return each request with both replies; each text is cut to `_SHOWN_CHARS` characters."""
    base, trained = context.outputs.read(_BASE), context.outputs.read(_TRAINED)
    if rows is None or base is None or trained is None:
        return []
    both = zip(rows.asked, base["replies"], trained["replies"], strict=True)
    return [_reply(row, *replies) for row, *replies in both]


def _ask(context: Context, rows: TaskRows, model: Any, name: str, system: str | None) -> None:
    tokenizer = context.base.tokenizer
    with costs.counted_replies(context, "task"), context.time_stage("task"):
        whom = "the base model" if name == _BASE else "the trained model"
        tell = partial(context.report.activity, f"asking {whom} {len(rows.asked)} requests of the file's rows")
        asked = [_render(tokenizer, each, system) for each in rows.asked]
        replies = complete(model, tokenizer, asked, context.recipe.audit.max_new_tokens, tell=tell)
        context.report.count(len(replies))
    context.outputs.write(name, {"lines": _lines(rows), "replies": replies})


def _lines(rows: TaskRows) -> list[int]:
    return [each.line for each in rows.asked]


def _render(tokenizer: Any, row: Example, system: str | None) -> list[int]:
    """Return the tokens of a row up to its last learned answer."""
    return render_conversation(tokenizer, row.messages[: _answer_place(row)], system, row.tools)


def _fits(context: Context, row: Example) -> bool:
    """Return True if the model's positions suffice for a row's request with the serving prompt, and a whole reply."""
    positions = int(getattr(context.base.model.config.get_text_config(), "max_position_embeddings", 2**31))
    asked = _render(context.base.tokenizer, row, context.system_prompt)
    return len(asked) + context.recipe.audit.max_new_tokens <= positions


def _answer_place(row: Example) -> int:
    return max(i for i, message in enumerate(row.messages) if is_learned(message))


def _reply(row: Example, base: str, trained: str) -> TaskReply:
    place = _answer_place(row)
    before, answer = row.messages[:place], row.messages[place]
    system = "\n".join(each["content"] for each in before if each["role"] == "system")
    turns = [each for each in before if each["role"] != "system"]
    expected = answer["content"] or json.dumps(answer.get("tool_calls", ()), ensure_ascii=False)
    return {
        "line": row.line,
        "turns": max(0, len(turns) - 1),
        "system": _cut(system) or None,
        "prompt": _cut(turns[-1]["content"] if turns else ""),
        "expected": _cut(expected),
        "base": _cut(base),
        "trained": _cut(trained),
    }


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]} [...]"

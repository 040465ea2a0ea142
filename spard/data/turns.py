"""Access to the turns of a row: its last request and answer, the turns before the request, system prompts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from spard.data.rows import Example, Message, is_learned


def last_request(row: Example) -> str:
    """Return the last request; empty if there is none."""
    return next((str(turn["content"]) for turn in reversed(row.messages) if turn["role"] == "user"), "")


def last_answer(row: Example) -> str:
    """Return the last answer, preceded by its reasoning if there is any; empty if there is none."""
    last = next((turn for turn in reversed(row.messages) if turn["role"] == "assistant"), {"content": ""})
    return "\n\n".join(str(part) for part in (last.get("reasoning_content"), last["content"]) if part)


def up_to_answers(row: Example) -> Iterator[Example]:
    """Yield the row truncated after each learned answer, and finally the whole row."""
    ends = [i for i, turn in enumerate(row.messages, start=1) if is_learned(turn) and turn["content"]]
    yield from (replace(row, messages=row.messages[:end]) for end in ends[:-1])
    yield row


def system_prompt(row: Example) -> tuple[Message, ...]:
    """Return the system prompt, wherever it is; several are merged, since most templates reject a second one."""
    return _as_one(row.messages)


def leading_system(row: Example) -> tuple[Message, ...]:
    """Return the system prompt before the last request; several are merged."""
    return _as_one(row.messages[: max(0, _last_request(row))])


def trailing_system(row: Example) -> tuple[Message, ...]:
    """Return the system prompts between the last request and its answer."""
    return tuple(turn for turn in row.messages[_last_request(row) + 1 :] if turn["role"] == "system")


def has_earlier_turns(row: Example) -> bool:
    """Return True if there is a user turn before the last request."""
    return [turn["role"] for turn in row.messages].count("user") > 1


def earlier_turns(row: Example) -> tuple[Message, ...]:
    """Return all turns before the last request, including a system prompt, with weight 0 on the answers."""
    before = row.messages[: max(0, _last_request(row))]
    # These turns are context for another request and must not be learned again.
    return tuple(turn | {"weight": 0} if turn["role"] == "assistant" else turn for turn in before)


def _as_one(turns: Iterable[Message]) -> tuple[Message, ...]:
    found = tuple(turn for turn in turns if turn["role"] == "system")
    whole = "\n\n".join(str(turn["content"]) for turn in found)
    return ({"role": "system", "content": whole},) if len(found) > 1 else found


def _last_request(row: Example) -> int:
    return max((i for i, turn in enumerate(row.messages) if turn["role"] == "user"), default=-1)

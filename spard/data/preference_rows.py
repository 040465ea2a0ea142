"""Preference pairs, in OpenAI's current form (`preferred_output`) and in its first schema.

A pair is a conversation with a preferred and a non-preferred answer. Each answer is checked as the chat row that it
forms with the conversation, which gives the same codes; pointers refer to positions in the pair.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from spard.data.chat_rows import chat_row_problems, unknown_keys
from spard.data.problems import Problem, error, warning

Message = dict[str, Any]

_NEW = ("preferred_output", "non_preferred_output")
_OLD = ("preferred_completion", "non_preferred_completion")
ANSWERS = (*_NEW, *_OLD)
INPUT_KEYS = frozenset({"messages", "tools", "parallel_tool_calls"})
_HINT = 'write {"input": {"messages": [...]}, "preferred_output": [...], "non_preferred_output": [...]}'
_ANSWER = '[{"role": "assistant", "content": "..."}]'


def is_preference(row: Mapping[str, object]) -> bool:
    """Return True if a row is meant as a preference pair, even an invalid one."""
    has_input = isinstance(row.get("input"), dict) and not row.keys() & {"messages", "prompt"}
    return has_input or not row.keys().isdisjoint(ANSWERS)


def preference_row_problems(row: Mapping[str, object]) -> Iterator[Problem]:
    """Yield the problems of a row for which `is_preference` is True."""
    names = _names(row)
    yield from unknown_keys(row, frozenset({"input", *names}), "")
    asked = row.get("input")
    if not isinstance(asked, dict):
        yield error("/input", "message_missing_key", '"input" must be an object with "messages"', _HINT)
        return
    yield from unknown_keys(asked, INPUT_KEYS, "/input")
    if not isinstance(asked.get("messages"), list) or not asked["messages"]:
        message = '"input.messages" must be a list of at least one message'
        yield error("/input/messages", "missing_messages_list", message, _HINT)
        return
    wrong = [problem for name in names for problem in _output(row, name)]
    yield from wrong
    if not wrong:
        yield from _conversations(row, names)


def preferred_chat(row: Mapping[str, Any]) -> tuple[dict[str, Any], Message]:
    """Return a valid pair as a chat row that ends in the preferred answer, and the non-preferred answer.

    Earlier assistant turns get weight 0.
    """
    preferred, other = (row[name][0] for name in _names(row))
    turns = [turn | {"weight": 0} if turn["role"] == "assistant" else turn for turn in row["input"]["messages"]]
    return _chat(row, [*turns, preferred]), other


def _names(row: Mapping[str, object]) -> tuple[str, str]:
    """Return the names of both answers in the row's spelling."""
    return _OLD if row.keys() & set(_OLD) and not row.keys() & set(_NEW) else _NEW


def _output(row: Mapping[str, object], name: str) -> Iterator[Problem]:
    """Check that there is exactly one answer and that it is from the assistant."""
    found = row.get(name)
    if name not in row:
        yield error(f"/{name}", "message_missing_key", f'"{name}" is missing', _HINT)
    elif not isinstance(found, list) or len(found) != 1:
        yield error(f"/{name}", "data_type", f'"{name}" must be a list of one message', _ANSWER)
    elif not isinstance(found[0], dict) or found[0].get("role") != "assistant":
        message = f'the message of "{name}" must be from the assistant'
        yield error(f"/{name}/0/role", "example_missing_assistant_message", message, _ANSWER)
    elif "weight" in found[0]:
        yield error(f"/{name}/0/weight", "message_unrecognized_key", "an answer of a pair has no weight", "remove it")


def _conversations(row: Mapping[str, Any], names: tuple[str, str]) -> Iterator[Problem]:
    """Check both conversations; problems of the shared part are reported once."""
    turns = row["input"]["messages"]
    last = f"/messages/{len(turns)}"
    for i, name in enumerate(names):
        for problem in chat_row_problems(_chat(row, [*turns, row[name][0]])):
            is_own = problem.pointer == last or problem.pointer.startswith(f"{last}/")
            if is_own:
                yield replace(problem, pointer=f"/{name}/0{problem.pointer.removeprefix(last)}")
            # Problems of the shared conversation appear for both answers; the first report is enough.
            elif i == 0:
                yield replace(problem, pointer=f"/input{problem.pointer}")
    if row[names[0]] == row[names[1]]:
        message = "both answers are the same, so there is nothing to prefer"
        yield warning(f"/{names[1]}", "identical_outputs", message, "remove the row, or give another answer")


def _chat(row: Mapping[str, Any], messages: list[Any]) -> dict[str, Any]:
    return {name: value for name, value in row["input"].items() if name in INPUT_KEYS} | {"messages": messages}

"""Converts turns and tools of other formats to OpenAI's: shared by the conversions of all formats.

Nothing is dropped silently: data without a place in OpenAI's format raises `NotConvertible`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from spard.data.chat_rows import MESSAGE_KEYS, ROLES
from spard.data.jsonl import without_nulls
from spard.data.strict_json import BadJson, parse

Message = dict[str, Any]

SPEAKERS = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bard": "assistant",
    "bing": "assistant",
    "function_call": "assistant",
    "observation": "tool",
} | {role: role for role in ROLES}
_CONTENT_KEYS = {"from": "value", "role": "content"}


class NotConvertible(ValueError):
    """Raised for a row that cannot be converted to OpenAI's format without guessing or losing data."""


def read_json(value: Any, name: str) -> Any:
    """Return a value that may be given as a JSON string, as in columnar tables."""
    if not isinstance(value, str):
        return value
    try:
        return without_nulls(parse(value)) if value.strip() else None
    except BadJson as bad:
        raise NotConvertible(f'"{name}" is a text that is no JSON: {bad.message}') from None


def read_tools(value: Any) -> list[Message]:
    """Return tools in OpenAI's format, from a list or its JSON; bare functions are allowed."""
    tools = read_json(value, "tools") or []
    if not isinstance(tools, list):
        raise NotConvertible('"tools" is no list')
    for tool in tools:
        if not isinstance(tool, dict) or not {"function", "name"} & tool.keys():
            raise NotConvertible('"tools" has an entry that is no function with a name')
    return [{"type": "function"} | (tool if "function" in tool else {"function": tool}) for tool in tools]


class Turns:
    """Collects the messages of one row, and assigns ids to calls without one."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._calls = 0
        self._unanswered: list[tuple[str, str]] = []  # (name, id) of calls without a result yet

    def add(self, turn: Any) -> None:
        """Add a turn in ShareGPT's format (`from`, `value`) or in OpenAI's (`role`, `content`)."""
        speaker = next((key for key in _CONTENT_KEYS if isinstance(turn, dict) and key in turn), None)
        if speaker is None:
            raise NotConvertible('a turn has neither "from" and "value" nor "role" and "content"')
        said_by = turn[speaker]
        role = SPEAKERS.get(said_by) if isinstance(said_by, str) else None
        if role is None:
            known = "system, human and gpt" if speaker == "from" else ", ".join(ROLES)
            raise NotConvertible(f"a turn is from {str(said_by)[:40]!r}; known are {known}")
        if said_by == "tool" and speaker == "from" and not self._unanswered:
            raise NotConvertible("a turn is from 'tool', and no call stands before it")
        rest = {key: value for key, value in turn.items() if key not in (speaker, _CONTENT_KEYS[speaker])}
        message = {"role": role} | self._content(turn, speaker, said_by) | self._extras(role, rest)
        self.messages.append(self._with_ids(message))

    def _content(self, turn: Message, speaker: str, said_by: str) -> Message:
        key = _CONTENT_KEYS[speaker]
        if said_by == "function_call":
            return {"tool_calls": _as_list(read_json(turn.get(key), key))}
        if speaker == "from" and not isinstance(turn.get(key), str):
            raise NotConvertible(f'"{key}" of a turn is not text')
        return {"content": turn[key]} if key in turn else {}

    def _extras(self, role: str, rest: Message) -> Message:
        """Return the other fields of a turn; weight 0 is dropped on turns that are never learned."""
        if role != "assistant" and rest.get("weight", 0) == 0:
            rest = {key: value for key, value in rest.items() if key != "weight"}
        lost = sorted(key for key, value in rest.items() if not _is_place(role, key) and value not in ("", [], {}))
        if lost:
            raise NotConvertible(f'"{lost[0][:64]}" of a turn of the {role} would be lost: remove it')
        return {key: value for key, value in rest.items() if _is_place(role, key)}

    def _with_ids(self, message: Message) -> Message:
        if message.get("tool_calls"):
            calls = [self._call(call) for call in _as_list(message["tool_calls"])]
            self._unanswered += [(call["function"]["name"], call["id"]) for call in calls]
            return {key: value for key, value in message.items() if key != "tool_calls"} | {"tool_calls": calls}
        if message["role"] == "tool" and self._unanswered:
            named = [i for i, (name, _) in enumerate(self._unanswered) if name == message.get("name")]
            given = [i for i, (_, call) in enumerate(self._unanswered) if call == message.get("tool_call_id")]
            _, call_id = self._unanswered.pop(next(iter([*given, *named]), 0))
            return {"tool_call_id": call_id} | message
        return message

    def _call(self, call: Any) -> Message:
        """Return a call in OpenAI's format: with an id, and its arguments as a JSON string."""
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise NotConvertible("a call has no function with a name")
        self._calls += 1
        arguments = function.get("arguments", {})
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        own = call if "function" in call else {}
        return {"id": f"call{self._calls:05d}", "type": "function"} | own | {"function": function | {"arguments": text}}


def _is_place(role: str, key: str) -> bool:
    return key in MESSAGE_KEYS and (key != "weight" or role == "assistant")


def _as_list(calls: Any) -> list[Any]:
    return calls if isinstance(calls, list) else [calls]


def convert_turns(turns: Any, name: str) -> list[Message]:
    """Return a list of turns as OpenAI messages."""
    if not isinstance(turns, list) or not turns:
        raise NotConvertible(f'"{name}" is no list of turns')
    made = Turns()
    for turn in turns:
        made.add(turn)
    return made.messages


def require_text(row: Mapping[str, object], key: str) -> str:
    """Return a string value of a row; raise `NotConvertible` for anything else."""
    if not isinstance(row.get(key), str):
        raise NotConvertible(f'"{key}" is not text')
    return str(row[key])

"""Recognizes rows in ShareGPT's, Alpaca's and TRL's formats, and converts them to OpenAI's without loss.

Nothing is dropped silently: data without a place in OpenAI's format raises `NotConvertible`, and a column without one
raises `ColumnsLost` unless the caller leaves it out by name. Labels that only identify a row's origin are dropped and
listed in the result. Turns and tools are converted by the same functions for all formats.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from spard.data.chat_rows import ANSWERS, MESSAGE_KEYS, ROLES, ROW_KEYS, is_preference
from spard.data.jsonl import BadJson, parse_json, without_nulls

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
        return without_nulls(parse_json(value)) if value.strip() else None
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


Foreign = Literal["sharegpt", "alpaca", "trl"]

NAMES: dict[Foreign, str] = {"sharegpt": "ShareGPT's form", "alpaca": "Alpaca's form", "trl": "TRL's form"}
_LABELS = frozenset(
    {"id", "idx", "index", "uuid", "hash", "conversation_id", "prompt_id", "source", "dataset", "__index_level_0__"}
)
_PAIR = frozenset({"chosen", "rejected"})
_SHARED = frozenset({"system", "tools"})
_COLUMNS: dict[Foreign, frozenset[str]] = {
    "sharegpt": _SHARED | _PAIR | {"conversations", "conversation"},
    "alpaca": _SHARED | _PAIR | {"instruction", "input", "output", "history"},
    "trl": _PAIR | {"prompt", "completion", "messages", "tools", "parallel_tool_calls"},
}
_OWN = frozenset({*ROW_KEYS, *ANSWERS, "input", "prompt", "completion"})


class ColumnsLost(NotConvertible):
    """Raised for a row with columns that have no place in OpenAI's format; `columns` are their names."""

    def __init__(self, columns: list[str]) -> None:
        names, is_one = ", ".join(f"`{name[:64]}`" for name in columns), len(columns) == 1
        super().__init__(f"the column{'' if is_one else 's'} {names} would be lost")
        self.columns = columns


@dataclass(frozen=True, slots=True)
class ConvertedRow:
    """A row in OpenAI's format, and the columns that were left out."""

    row: dict[str, Any]
    left_out: frozenset[str]


def foreign_format(row: Mapping[str, object]) -> Foreign | None:
    """Return the foreign format of a row; None for rows in one of our own formats."""
    if isinstance(row.get("conversations", row.get("conversation")), list) and "messages" not in row:
        return "sharegpt"
    if "instruction" in row and "messages" not in row and ("output" in row or row.keys() >= _PAIR):
        return "alpaca"
    if row.keys() >= _PAIR or any(isinstance(row.get(key), list) for key in ("prompt", "completion")):
        return "trl"
    calls = [call.get("function", call) for call in _calls(row)]
    has_objects = any(isinstance(each, dict) and isinstance(each.get("arguments"), dict) for each in calls)
    return "trl" if "messages" in row and (isinstance(row.get("tools"), str) or has_objects) else None


def convert_row(row: Mapping[str, object], leave_out: Collection[str] = ()) -> ConvertedRow:
    """Return a row in OpenAI's format: chat, prompt and completion, or a preference pair.

    Columns named in `leave_out` are dropped. Raises `NotConvertible` for a row that needs a guess, and `ColumnsLost`
    for one with a column that has no place.
    """
    kind = foreign_format(row) or ("trl" if any("id" not in call for call in _calls(row)) else None)
    known = _COLUMNS[kind] if kind else _OWN
    named = row.keys() & set(leave_out)
    rest = {key: value for key, value in row.items() if key not in named}
    more = {key for key, value in rest.items() if key not in known and value not in ("", [], {})}
    if lost := sorted(more - _LABELS):
        raise ColumnsLost(lost)
    own = {key: value for key, value in rest.items() if key in known}
    if kind is None:
        return ConvertedRow(own, frozenset(named | more))
    made = {"sharegpt": _from_sharegpt, "alpaca": _from_alpaca, "trl": _from_trl}[kind](own)
    return ConvertedRow(made, frozenset(named | more))


def _from_sharegpt(row: dict[str, Any]) -> dict[str, object]:
    name = "conversations" if "conversations" in row else "conversation"
    return _with_answers(row, [*_system(row), *convert_turns(row[name], name)])


def _from_alpaca(row: Mapping[str, object]) -> dict[str, object]:
    asked = require_text(row, "instruction")
    if row.get("input"):
        asked = f"{asked}\n\n{require_text(row, 'input')}"
    turns = [*_system(row), *_history(row), {"role": "user", "content": asked}]
    if row.keys() >= _PAIR and "output" in row:
        raise NotConvertible('"output" stands beside "chosen" and "rejected"')
    answer = [] if row.keys() >= _PAIR else [{"role": "assistant", "content": require_text(row, "output")}]
    return _with_answers(row, [*turns, *answer])


def _with_answers(row: Mapping[str, object], turns: list[Message]) -> dict[str, object]:
    """Return a chat row of the turns, or a pair with the answers `chosen` and `rejected` after them."""
    if not row.keys() & _PAIR:
        return _chat(row, turns)
    if not row.keys() >= _PAIR:
        raise NotConvertible('of "chosen" and "rejected" one is missing')
    preferred, other = (_side(row[name], name) for name in ("chosen", "rejected"))
    if len(preferred) != 1 or len(other) != 1:
        raise NotConvertible('"chosen" and "rejected" must each be one answer')
    return _pair(row, turns, preferred, other)


def _from_trl(row: Mapping[str, object]) -> dict[str, object]:
    if row.keys() >= _PAIR:
        return _pair_of_trl(row)
    if "prompt" not in row and "completion" not in row:
        return _chat(row, convert_turns(row["messages"], "messages"))
    if "messages" in row:
        raise NotConvertible('"messages" stands beside "prompt" and "completion"')
    asked = _raw_side(row.get("prompt"), "prompt")
    turns = convert_turns([*asked, *_raw_side(row.get("completion"), "completion")], "completion")
    # TRL learns the completion only, so assistant turns in the prompt get no loss.
    before = [turn | {"weight": 0} if turn["role"] == "assistant" else turn for turn in turns[: len(asked)]]
    return _chat(row, [*before, *turns[len(asked) :]])


def _pair_of_trl(row: Mapping[str, object]) -> dict[str, object]:
    """Return a pair; its conversation is `prompt`, or the common beginning of `chosen` and `rejected`."""
    if row.get("messages", row["chosen"]) != row["chosen"]:
        raise ColumnsLost(["messages"])
    if "completion" in row:
        raise ColumnsLost(["completion"])
    chosen, rejected = (_side(row[name], name) for name in ("chosen", "rejected"))
    alike = next((i for i, both in enumerate(zip(chosen, rejected, strict=False)) if both[0] != both[1]), len(chosen))
    # Identical answers are no part of the shared conversation: each side keeps its last turn.
    shared = min(alike, len(chosen) - 1, len(rejected) - 1)
    before, asked = chosen[:shared], _side(row["prompt"], "prompt") if "prompt" in row else []
    if before and asked and before[-len(asked) :] != asked and before[: len(asked)] != asked:
        raise NotConvertible('"prompt" is not what "chosen" and "rejected" begin with')
    if not before and not asked:
        raise NotConvertible('"chosen" and "rejected" have no turn in common, and there is no "prompt"')
    if len(chosen) - shared != 1 or len(rejected) - shared != 1:
        raise NotConvertible('after what they share, "chosen" and "rejected" must each be one answer')
    return _pair(row, before or asked, chosen[shared:], rejected[shared:])


def _side(value: Any, name: str) -> list[Message]:
    return convert_turns(_raw_side(value, name), name)


def _raw_side(value: Any, name: str) -> list[Any]:
    """Return the turns of a prompt or an answer, which may be a text, one turn, or a list of turns."""
    if isinstance(value, str):
        return [{"role": "user" if name == "prompt" else "assistant", "content": value}]
    if isinstance(value, dict):
        return [value]
    if not isinstance(value, list) or not value:
        raise NotConvertible(f'"{name}" is no text and no list of turns')
    return value


def _chat(row: Mapping[str, object], turns: list[Message]) -> dict[str, object]:
    tools = read_tools(row.get("tools"))
    rest = {key: row[key] for key in ("parallel_tool_calls",) if key in row}
    return {"messages": turns} | ({"tools": tools} if tools else {}) | rest


def _pair(
    row: Mapping[str, object], turns: list[Message], preferred: list[Message], other: list[Message]
) -> dict[str, object]:
    return {"input": _chat(row, turns), "preferred_output": preferred, "non_preferred_output": other}


def _system(row: Mapping[str, object]) -> list[Message]:
    return [{"role": "system", "content": require_text(row, "system")}] if row.get("system") else []


def _history(row: Mapping[str, object]) -> list[Message]:
    """Return the earlier exchanges, which Alpaca rows hold as pairs of texts."""
    turns: list[Message] = []
    earlier = row.get("history") or []
    for pair in earlier if isinstance(earlier, list) else [None]:
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise NotConvertible('"history" must be a list of pairs of texts')
        turns += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    return turns


def _calls(row: Mapping[str, object]) -> list[dict[str, Any]]:
    """Return the tool calls of a chat row in any format."""
    turns = [] if is_preference(row) else row.get("messages")
    found = [turn.get("tool_calls") for turn in turns if isinstance(turn, dict)] if isinstance(turns, list) else []
    return [call for calls in found if isinstance(calls, list) for call in calls if isinstance(call, dict)]

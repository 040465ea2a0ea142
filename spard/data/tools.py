"""Tool calls in rows, and probes for chat templates that silently drop them.

Templates write tools, calls and their results in their own formats. To find out if a part is rendered, it is replaced
by a unique stand-in (`stand_ins`), and the rendered text is searched for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from spard.data.chat_rows import ANSWERS
from spard.data.rows import Example, Message

_ANSWERS = ("tool", "function")
_ASKS: Message = {"role": "user", "content": "What is two and two?"}
_CALL: Message = {"id": "abcdefghi", "type": "function", "function": {"name": "add", "arguments": {"a": "2"}}}
_CALLS: Message = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
_ANSWER: Message = {"role": "tool", "tool_call_id": _CALL["id"], "name": "add", "content": "4"}
_SAYS: Message = {"role": "assistant", "content": "It is four."}
_TOOL: Message = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {}}}
CONVERSATION = Example((_ASKS, _SAYS), line=1)  # every chat template must render it
# The smallest row with each part, to test templates with.
PROBES = {
    "tools": Example((_ASKS, _SAYS), line=1, tools=(_TOOL,)),
    "tool_calls": Example((_ASKS, _CALLS), line=1),
    "tool": Example((_ASKS, _CALLS, _ANSWER, _SAYS), line=1),
}


def used_parts(row: Mapping[str, Any]) -> set[str]:
    """Return which parts of `PROBES` a raw row uses, in present or former spelling; answers of a pair count too."""
    asked = row["input"] if isinstance(row.get("input"), dict) else row
    turns = [asked.get("messages"), *(row.get(name) for name in ANSWERS)]
    messages = [turn for part in turns if isinstance(part, list) for turn in part if isinstance(turn, dict)]
    found = {
        "tools": bool(asked.get("tools") or asked.get("functions")),
        "tool_calls": any(turn.get("tool_calls") or turn.get("function_call") for turn in messages),
        "tool": any(turn.get("role") in _ANSWERS for turn in messages),
    }
    return {part for part, is_there in found.items() if is_there}


def has_tools(example: Example) -> bool:
    """Return True if a row has tools, calls or tool results."""
    return bool(example.tools) or any(_is_part(turn) for turn in example.messages)


def stand_ins(example: Example) -> tuple[Example, dict[str, str]]:
    """Return the row with a unique name in each tool, call and result, and the JSON pointer that each name replaces."""
    names: dict[str, str] = {}

    def name(at: str) -> str:
        own = f"stand_in_{len(names):06d}"
        names[own] = at
        return own

    def of_call(call: Message, at: str) -> Message:
        return call | {"function": call["function"] | {"name": name(at), "arguments": {name(at): name(at)}}}

    def of_turn(turn: Message, at: str) -> Message:
        if turn["role"] == "tool":
            return turn | {"content": name(f"{at}/content")}
        calls = turn.get("tool_calls") or []
        return turn | {"tool_calls": [of_call(call, f"{at}/tool_calls/{i}") for i, call in enumerate(calls)]}

    def of_tool(tool: Message, at: str) -> Message:
        return tool | {"function": tool["function"] | {"name": name(at)}}

    turns = [of_turn(turn, f"/messages/{i}") if _is_part(turn) else turn for i, turn in enumerate(example.messages)]
    tools = [of_tool(tool, f"/tools/{i}") for i, tool in enumerate(example.tools)]
    return replace(example, messages=tuple(turns), tools=tuple(tools)), names


def _is_part(turn: Message) -> bool:
    return bool(turn["role"] == "tool" or turn.get("tool_calls"))

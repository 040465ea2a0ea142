"""Finds the parts of a row that a chat template silently drops and that training could therefore not see.

Templates write calls, tools, reasoning and names in their own formats, and some drop some of them. To find out, each
part is replaced by a unique name, the row is rendered like the original, and the result is searched for each name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from spard.data.renderer import Renderer
from spard.data.rows import Message
from spard.data.samples import samples, teaches

Name = Callable[[str], str]
"""Takes a JSON pointer and returns a placeholder for the value there."""

_MOST_SHAPES = 4096  # maximum shapes in the cache
_MANY = 32  # turns
_PARTS = ("tool_calls", "reasoning_content", "name", "tool_call_id")
_OWN = re.compile(r"stand_in_\d{6,}_of_a_part")


def unrendered_parts(renderer: Renderer, messages: Sequence[Message], tools: Sequence[Message] = ()) -> list[str]:
    """Return JSON pointers to the parts of a conversation that are in none of its samples.

    A learned answer must be in a segment with loss. Rows that differ only in their words have the same result, which is
    cached per shape. Raises one of `REFUSED` or `TemplateFault`, as `samples` does.
    """
    messages = _first_turns(messages)
    names: dict[str, str] = {}
    named, offered = _with_names(names, messages, tools)
    # The names replace all words, so rows with the same structure have the same representation.
    shape = repr((named, offered))
    known = renderer.known_shapes
    if shape not in known:
        # Clearing all is enough: a file has few shapes, and this only bounds the memory.
        if len(known) >= _MOST_SHAPES:
            known.clear()
        found = samples(renderer, named, offered)
        whole = set(_OWN.findall("".join(segment.text for sample in found for segment in sample)))
        learned = set(_OWN.findall("".join(part.text for sample in found for part in sample if part.is_learned)))
        places = {f"/messages/{i}" for i, message in enumerate(messages) if teaches(message)}
        lost = (at for name, at in names.items() if name not in (learned if _message_pointer(at) in places else whole))
        known[shape] = tuple(dict.fromkeys(lost))
    return list(known[shape])


def _first_turns(messages: Sequence[Message]) -> Sequence[Message]:
    """Return the first turns of a long conversation of plain text; its other turns are rendered in the same way."""
    if len(messages) <= _MANY or any(turn.get(part) for turn in messages for part in _PARTS):
        return messages
    return messages[
        : next((i for i, turn in enumerate(messages, start=1) if i >= _MANY and teaches(turn)), len(messages))
    ]


def _message_pointer(pointer: str) -> str:
    return "/".join(pointer.split("/")[:3])


def _with_names(
    names: dict[str, str], messages: Sequence[Message], tools: Sequence[Message]
) -> tuple[list[Message], list[Message]]:
    """Return a conversation with a unique name in each part; `names` maps each name to its JSON pointer."""

    def name(at: str) -> str:
        own = f"stand_in_{len(names):06d}_of_a_part"  # must match `_OWN`
        names[own] = at
        return own

    turns = [_turn(name, turn, f"/messages/{i}") for i, turn in enumerate(messages)]
    return turns, [_tool(name, tool, f"/tools/{i}") for i, tool in enumerate(tools)]


def _turn(name: Name, turn: Message, at: str) -> Message:
    """Replace a turn's text, reasoning, speaker and calls; a tool's name is already checked in its call."""
    parts = ("content", "reasoning_content") if turn["role"] == "tool" else ("content", "reasoning_content", "name")
    named = turn | {part: name(f"{at}/{part}") for part in parts if str(turn.get(part) or "").strip()}
    if calls := turn.get("tool_calls"):
        named["tool_calls"] = [_call(name, call, f"{at}/tool_calls/{i}") for i, call in enumerate(calls)]
    return named


def _call(name: Name, call: Message, at: str) -> Message:
    arguments = {name(at): name(at)} if call["function"]["arguments"] else {}
    return call | {"function": call["function"] | {"name": name(at), "arguments": arguments}}


def _tool(name: Name, tool: Message, at: str) -> Message:
    function = tool["function"]
    named = function | {"name": name(at)}
    if function.get("description"):
        named["description"] = name(f"{at}/function/description")
    if properties := (function.get("parameters") or {}).get("properties"):
        place = f"{at}/function/parameters/properties"
        own = {name(f"{place}/{key}"): _property(name, value, f"{place}/{key}") for key, value in properties.items()}
        named["parameters"] = function["parameters"] | {"properties": own, "required": []}
    return tool | {"function": named}


def _property(name: Name, value: Any, at: str) -> Any:
    if isinstance(value, dict) and isinstance(value.get("description"), str) and value["description"]:
        return value | {"description": name(f"{at}/description")}
    return value

"""Parse tool calls from a model's text, in the formats that chat templates teach."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass

from app.db.base import new_id

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"  # Qwen, Hermes and others: one object in each pair
_LISTS = ("[TOOL_CALLS]", "<|python_tag|>", "<|tool_call|>")  # Mistral, Llama, Granite: objects after the mark
_MARKS = (_OPEN, *_LISTS)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call; `arguments` is JSON text."""

    id: str
    name: str
    arguments: str


class Sieve:
    """Splits a streamed reply into text and tool calls; `names` are the tools that the request offers.

    Text that may be part of a call is held back until the reply ends.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names, self._text, self._shown = names, "", 0

    def add(self, text: str) -> str:
        """Add text and return the part that can be shown now."""
        self._text += text
        if not self._names:
            upto = len(self._text)
        elif self._text.lstrip()[:1] in ("", "{", "["):  # a whole reply may be a call
            upto = 0
        else:
            upto = min((at for mark in _MARKS if (at := self._text.find(mark)) >= 0), default=self._before_mark())
        shown, self._shown = self._text[self._shown : upto], max(self._shown, upto)
        return shown

    def end(self) -> tuple[str, list[ToolCall]]:
        """Return the remaining text and the calls; if any call cannot be parsed, everything is text."""
        calls = self._calls()
        if calls is None:
            return self._text[self._shown :], []
        before = min((at for mark in _MARKS if (at := self._text.find(mark)) >= 0), default=0)
        return self._text[self._shown : before], calls

    def _before_mark(self) -> int:
        """Return the position where the end of the text may be the beginning of a mark, else the text's length."""
        held = max((n for mark in _MARKS for n in range(1, len(mark)) if self._text.endswith(mark[:n])), default=0)
        return len(self._text) - held

    def _calls(self) -> list[ToolCall] | None:
        if not self._names:
            return None
        bodies = [part.partition(_CLOSE)[0] for part in self._text.split(_OPEN)[1:]]
        for mark in _LISTS:
            if not bodies and mark in self._text:
                bodies = [self._text.partition(mark)[2]]
        found = [_read(body) for body in bodies or [self._text]]
        if any(each is None for each in found):
            return None
        calls = [call for each in found for call in each or ()]
        return calls if calls and all(call.name in self._names for call in calls) else None


def _read(body: str) -> list[ToolCall] | None:
    """Parse one object or a list of objects with `name` and `arguments` (Llama: `parameters`); None if invalid."""
    try:
        value = json.loads(body.strip())
    except (ValueError, RecursionError):
        return None
    found = []
    for each in value if isinstance(value, list) else [value]:
        name = each.get("name") if isinstance(each, dict) else None
        if not isinstance(name, str):
            return None
        arguments = each.get("arguments", each.get("parameters", {}))
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        found.append(ToolCall(new_id("call_"), name, text))
    return found

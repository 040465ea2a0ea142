"""Rows of JSONL become examples and prompts here, in the words that chat templates know."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spard.encodings import Encoding
from spard.errors import InvalidData
from spard.utility import BY_LIKELIHOOD, SCORERS

Message = dict[str, Any]
ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
_NOW = {"developer": "system", "function": "tool"}


@dataclass(frozen=True, slots=True)
class Example:
    """One conversation and the line it came from; an assistant turn of weight 0 carries no loss."""

    messages: tuple[Message, ...]
    line: int
    tools: tuple[Message, ...] = ()


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request of an audit suite; `answer` is what a utility suite expects, and `scorer` says how it is compared.

    It is asked after the turns of `context`, and in an encoding if there is one; replies in it are decoded.
    """

    prompt: str
    answer: str | None = None
    category: str | None = None
    scorer: str | None = None  # None: `exact`
    choices: tuple[str, ...] = ()  # for scorers by likelihood
    context: tuple[Message, ...] = ()
    encoding: Encoding | None = None


def read_examples(path: Path) -> list[Example]:
    """Training rows: `{"messages": [...]}` or `{"prompt": ..., "completion": ...}`."""
    return [example(row, line) for line, row in _rows(path)]


def read_pool(path: Path) -> list[Example]:
    """Safety rows `{"prompt": ..., "safe": ...}` as one question and its safe answer."""
    return [_exchange(row, "safe", line) for line, row in _rows(path)]


def read_prompts(path: Path, limit: int | None = None) -> list[Prompt]:
    """Audit rows `{"prompt": ...}` with an optional answer, category, scorer and choices, at most `limit`."""
    return [_prompt(row, line) for line, row in _rows(path)][:limit]


def prompt_text(example: Example) -> str:
    """What the user says, which is what selection embeds."""
    return "\n".join(message["content"] for message in example.messages if message["role"] == "user")


def example(row: dict[str, Any], line: int) -> Example:
    """One training row."""
    if "messages" not in row:
        return _exchange(row, "completion", line)
    if not isinstance(row["messages"], list) or not row["messages"]:
        raise InvalidData(f"line {line}: `messages` must be a list that is not empty")
    messages = tuple(_message(message, line) for message in row["messages"])
    if not any(is_learnt(message) for message in messages):
        raise InvalidData(f"line {line} has no assistant turn to learn from")
    return Example(messages, line, _tools(row))


def is_learnt(message: Message) -> bool:
    """Whether loss falls on this turn."""
    return bool(message["role"] == "assistant" and message.get("weight", 1) != 0)


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with Path(path).open(encoding="utf-8-sig") as lines:
        for line, text in enumerate(lines, start=1):
            if not text.strip():
                continue
            try:
                row = json.loads(text)
            except ValueError:
                row = None
            if not isinstance(row, dict):
                raise InvalidData(f"line {line} is not a JSON object")
            yield line, row


def _exchange(row: dict[str, Any], answer: str, line: int) -> Example:
    user = {"role": "user", "content": _text(row, "prompt", line)}
    return Example((user, {"role": "assistant", "content": _text(row, answer, line)}), line)


def _prompt(row: dict[str, Any], line: int) -> Prompt:
    answer, scorer, choices = _optional(row, "answer"), _optional(row, "scorer"), row.get("choices") or []
    if scorer is not None and scorer not in SCORERS:
        raise InvalidData(f"line {line}: unknown scorer {scorer!r}; known are {', '.join(SCORERS)}")
    if not isinstance(choices, list) or not all(isinstance(choice, str) and choice for choice in choices):
        raise InvalidData(f"line {line}: `choices` must be a list of texts")
    if scorer in BY_LIKELIHOOD and answer not in choices:
        raise InvalidData(f"line {line}: the scorer {scorer} needs `choices`, one of them the answer")
    return Prompt(_text(row, "prompt", line), answer, _optional(row, "category"), scorer, tuple(choices))


def _message(raw: Any, line: int) -> Message:
    """One turn in the words that templates know: `system`, plain text, tools and their arguments as objects."""
    role = raw.get("role") if isinstance(raw, dict) else None
    if role not in ROLES:
        raise InvalidData(f"line {line}: every message needs a role out of {', '.join(sorted(ROLES))}")
    content = raw.get("content")
    if isinstance(content, list):
        content = "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    if not isinstance(content, str | None):
        raise InvalidData(f"line {line}: the content of a message must be text")
    message: Message = raw | {"role": _NOW.get(role, role), "content": content or ""}
    former = message.pop("function_call", None)
    calls = raw.get("tool_calls") or ([{"type": "function", "function": former}] if former else [])
    if calls:
        message["tool_calls"] = [_tool_call(call, line) for call in calls]
    return message


def _tools(row: dict[str, Any]) -> tuple[Message, ...]:
    """What the assistant may call; `functions` is their former name."""
    former = ({"type": "function", "function": function} for function in row.get("functions") or ())
    return tuple(row.get("tools") or former)


def _tool_call(call: Any, line: int) -> Message:
    try:
        function = dict(call["function"])
        if isinstance(function["arguments"], str):
            function["arguments"] = json.loads(function["arguments"])
    except (KeyError, TypeError, ValueError):
        raise InvalidData(f"line {line}: a tool call needs a function whose arguments are JSON") from None
    return {**call, "function": function}


def _text(row: dict[str, Any], key: str, line: int) -> str:
    value = row.get(key)
    if not isinstance(value, str):
        raise InvalidData(f"line {line} has no text in `{key}`")
    return value


def _optional(row: dict[str, Any], key: str) -> str | None:
    value = row.get(key)
    return None if value is None else str(value)

"""What one row may say: training rows (chat or prompt and completion), safety pool rows and audit suite rows.

Codes and pointers are those of the wire contract; a problem of severity `warning` does not stop a job.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, Literal

from app.files.foreign import kind_of
from app.files.validation import Problem

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_ROW_KEYS = frozenset({"messages", "tools", "parallel_tool_calls", "functions"})
_MESSAGE_KEYS = frozenset(
    {"role", "content", "name", "weight", "tool_calls", "tool_call_id", "function_call", "refusal"}
)
_PREFERENCE_KEYS = frozenset({"input", "preferred_completion", "non_preferred_completion"})
_CONTROL_TEXT = re.compile(r"<\|[A-Za-z0-9_]{2,32}\|>|\[/?INST\]|<(?:start|end)_of_turn>")

Format = Literal["chat", "completion"]


class TrainingRows:
    """The rule for a file of purpose `fine-tune`: every row valid, and all of the first row's format."""

    def __init__(self) -> None:
        self._format: Format | None = None

    def __call__(self, row: dict[str, Any], line: int) -> Iterable[Problem]:
        return [replace(problem, line=line) for problem in self._problems(row)]

    def _problems(self, row: dict[str, Any]) -> Iterator[Problem]:
        if kind := kind_of(row):
            message = f"the row is in {kind}'s form; the file can be converted"
            yield _error("", f"{kind}_format", message, "look with POST /v1/files/{id}/convert?dry_run=true")
            return
        if row.keys() & _PREFERENCE_KEYS:
            message = "the row is a preference pair (dpo), which is not trained here"
            yield _error("", "method_not_supported", message, 'give {"messages": [...]} rows')
            return
        found: Format = "completion" if "messages" not in row and row.keys() & {"prompt", "completion"} else "chat"
        self._format = self._format or found
        if found != self._format:
            message = f"the row is in {found} format, but the file began in {self._format} format"
            yield _error("", "mixed_formats", message)
        elif found == "chat":
            yield from _chat(row)
        else:
            yield from _completion(row)


def pool_row(row: dict[str, Any], line: int) -> Iterable[Problem]:
    """A safety pool row: a prompt, and the safe answer to it; other keys are kept and ignored."""
    found = [*_required_text(row, "prompt"), *_required_text(row, "safe")]
    return [replace(problem, line=line) for problem in found]


def suite_row(row: dict[str, Any], line: int) -> Iterable[Problem]:
    """An audit prompt; `category` and `answer` are texts where present."""
    found = list(_required_text(row, "prompt"))
    found += [problem for key in ("category", "answer") if row.get(key) is not None for problem in _text(row, key)]
    return [replace(problem, line=line) for problem in found]


def utility_row(row: dict[str, Any], line: int) -> Iterable[Problem]:
    """A prompt with the right answer to it."""
    missing = [] if row.get("answer") is not None else list(_required_text(row, "answer"))
    return [*suite_row(row, line), *(replace(problem, line=line) for problem in missing)]


def _error(pointer: str, code: str, message: str, hint: str | None = None) -> Problem:
    return Problem(None, pointer, code, "error", message, hint)


def _warning(pointer: str, code: str, message: str, hint: str | None = None) -> Problem:
    return Problem(None, pointer, code, "warning", message, hint)


def _required_text(row: dict[str, Any], key: str) -> Iterator[Problem]:
    if key not in row:
        yield _error(f"/{key}", "message_missing_key", f'"{key}" is missing', f'add "{key}": "..."')
    else:
        yield from _text(row, key)


def _text(row: dict[str, Any], key: str) -> Iterator[Problem]:
    if not isinstance(row[key], str):
        yield _error(f"/{key}", "data_type", f'"{key}" must be a string')
    elif not row[key].strip():
        yield _error(f"/{key}", "missing_content", f'"{key}" is empty')


def _completion(row: dict[str, Any]) -> Iterator[Problem]:
    yield from _unknown_keys(row, frozenset({"prompt", "completion"}), "")
    yield from _required_text(row, "prompt")
    yield from _required_text(row, "completion")
    for key in ("prompt", "completion"):
        yield from _control_text(row.get(key), f"/{key}")


def _chat(row: dict[str, Any]) -> Iterator[Problem]:
    yield from _unknown_keys(row, _ROW_KEYS, "")
    if row.get("tools") is not None:
        yield from _tools(row["tools"])
    if "functions" in row:
        yield _warning("/functions", "functions_ignored", "functions are not trained on", 'use "tools"')
    messages = row.get("messages")
    if not isinstance(messages, list) or not messages:
        message = '"messages" must be a list of at least one message'
        yield _error("/messages", "missing_messages_list", message, 'add "messages": [{"role": ..., "content": ...}]')
        return
    for index, message in enumerate(messages):
        yield from _message(message, f"/messages/{index}")
    if all(isinstance(message, dict) and message.get("role") in ROLES for message in messages):
        yield from _conversation(messages)


def _message(message: Any, at: str) -> Iterator[Problem]:
    if not isinstance(message, dict):
        yield _error(at, "data_type", "a message must be an object", '{"role": "user", "content": "..."}')
        return
    yield from _unknown_keys(message, _MESSAGE_KEYS, at)
    role = message.get("role")
    if "role" not in message:
        yield _error(f"{at}/role", "message_missing_key", "role is missing", 'add "role": "assistant"')
    elif role not in ROLES:
        shown = str(role)[:40]
        yield _error(f"{at}/role", "unrecognized_role", f"unknown role {shown!r}", f"use one of {', '.join(ROLES)}")
    yield from _content(message, at)
    yield from _weight(message, at)
    if role == "tool" and not isinstance(message.get("tool_call_id"), str):
        yield _error(f"{at}/tool_call_id", "message_missing_key", "a tool message needs tool_call_id")
    if "tool_calls" in message:
        yield from _tool_calls(message["tool_calls"], f"{at}/tool_calls")


def _content(message: dict[str, Any], at: str) -> Iterator[Problem]:
    content, is_call = message.get("content"), bool(message.get("tool_calls") or message.get("function_call"))
    if content is None and is_call and message.get("role") == "assistant":
        return
    if "content" not in message:
        yield _error(f"{at}/content", "message_missing_key", "content is missing", 'add "content": "..."')
        return
    text = _plain(content)
    if text is None:
        hint = 'give a string or parts {"type": "text", "text": ...}; images are not trained here'
        yield _error(f"{at}/content", "data_type", "content must be text", hint)
        return
    if content is None or (message.get("role") == "assistant" and not text.strip() and not is_call):
        yield _error(f"{at}/content", "missing_content", "content is empty", "remove the row or give an answer")
    yield from _control_text(text, f"{at}/content")


def _plain(content: Any) -> str | None:
    """The text of a content value, None when it is not text."""
    if isinstance(content, list):
        parts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
        texts = [part for part in parts if isinstance(part, str)]
        return "".join(texts) if len(texts) == len(content) else None
    return content if isinstance(content, str) else "" if content is None else None


def _weight(message: dict[str, Any], at: str) -> Iterator[Problem]:
    if "weight" not in message:
        return
    weight = message["weight"]
    if type(weight) is not int or weight not in (0, 1):
        yield _error(f"{at}/weight", "data_type", "weight must be 0 or 1")
    elif message.get("role") != "assistant":
        yield _error(f"{at}/weight", "message_unrecognized_key", "only assistant messages have a weight")


def _tools(tools: Any) -> Iterator[Problem]:
    if not isinstance(tools, list):
        yield _error("/tools", "data_type", "tools must be a list")
        return
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            hint = '{"type": "function", "function": {"name": ...}}'
            yield _error(f"/tools/{index}", "message_missing_key", "a tool needs a function with a name", hint)


def _tool_calls(calls: Any, at: str) -> Iterator[Problem]:
    if not isinstance(calls, list) or not calls:
        yield _error(at, "data_type", "tool_calls must be a list of at least one call")
        return
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            yield _error(f"{at}/{index}", "message_missing_key", "a tool call needs a function with a name")
        elif not _is_json(function.get("arguments")):
            yield _error(f"{at}/{index}/function/arguments", "data_type", "arguments must be a string of JSON")


def _is_json(text: Any) -> bool:
    try:
        return isinstance(text, str) and json.loads(text) is not ...
    except (ValueError, RecursionError):
        return False


def _conversation(turns: list[dict[str, Any]]) -> Iterator[Problem]:
    """What is wrong with the turns together: no answer to learn, or an order that few templates take."""
    roles = [turn.get("role") for turn in turns]
    answers = [turn for turn in turns if turn.get("role") == "assistant"]
    if not answers:
        message = "no message is from the assistant, so there is nothing to learn"
        yield _error("/messages", "example_missing_assistant_message", message)
    elif roles[-1] != "assistant":
        at = f"/messages/{len(turns) - 1}/role"
        yield _error(at, "example_missing_assistant_message", "the last message must be from the assistant")
    elif all(turn.get("weight") == 0 for turn in answers):
        yield _error("/messages", "all_tokens_masked", "every assistant message has weight 0")
    elif roles[0] == "assistant" and turns[0].get("weight", 1) != 0:
        hint = "give that message weight 0, or one before it"
        yield _error("/messages/0/role", "role_order", "the assistant speaks first, answering nothing", hint)
    hint = "roles should be an optional system message, then user and assistant in turn"
    for index, role in enumerate(roles):
        before = roles[index - 1] if index else None
        if role in ("user", "assistant") and role == before:
            yield _warning(f"/messages/{index}/role", "role_order", f"two {role} messages in a row", hint)
        elif role in ("system", "developer") and index:
            yield _warning(f"/messages/{index}/role", "role_order", f"a {role} message is not the first", hint)


def _unknown_keys(value: dict[str, Any], known: frozenset[str], at: str) -> Iterator[Problem]:
    for key in sorted(value.keys() - known):
        pointer = f"{at}/{key[:64].replace('~', '~0').replace('/', '~1')}"
        yield _error(pointer, "message_unrecognized_key", f'unknown key "{key[:64]}"', "remove it")


def _control_text(content: Any, at: str) -> Iterator[Problem]:
    """A row could otherwise end a turn and begin one in another role."""
    if isinstance(content, str) and (found := _CONTROL_TEXT.search(content)):
        message = f'"{found.group()}" is a control token of chat templates'
        yield _error(at, "reserved_token", message, "remove it: the model's own template adds what is needed")

"""Checks chat rows and preference pairs (messages, tools and their order) by the rules of OpenAI's fine-tuning API.

Codes and pointers are the API's; a problem of severity `warning` does not stop a job.

A preference pair, in OpenAI's current form (`preferred_output`) or in its first schema, is a conversation with a
preferred and a non-preferred answer. Each answer is checked as the chat row that it forms with the conversation, which
gives the same codes; pointers refer to positions in the pair.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

from spard.data.jsonl import BadJson, Problem, parse_json, row_error, row_warning

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
ROW_KEYS = frozenset({"messages", "tools", "parallel_tool_calls", "functions"})
MESSAGE_KEYS = frozenset(
    {
        *("role", "content", "name", "weight", "tool_calls", "tool_call_id", "function_call", "refusal"),
        "reasoning_content",  # reasoning, as vLLM and DeepSeek name it
    }
)
_OTHER_NAMES = {"human": "user", "ai": "assistant", "bot": "assistant", "gpt": "assistant", "model": "assistant"}
_ALIKE, _LONGEST_WORD = 0.8, 64  # minimum similarity to a known word, and maximum compared characters
_CONTROL_TEXT = re.compile(r"<\|[A-Za-z0-9_]{2,32}\|>|\[/?INST\]|<(?:start|end)_of_turn>")
_MAX_FUNCTIONS = 128
_TOOL = '{"type": "function", "function": {"name": "..."}}'
_CALL = '{"id": "call_1", "type": "function", "function": {"name": "...", "arguments": "{}"}}'


def chat_row_problems(row: Mapping[str, object]) -> Iterator[Problem]:
    """Yield the problems of a row `{"messages": [...]}`."""
    yield from unknown_keys(row, ROW_KEYS, "")
    if row.get("tools") is not None:
        yield from _tools(row["tools"])
    if row.get("functions") is not None:
        yield from _functions(row["functions"])
    if not isinstance(row.get("parallel_tool_calls"), bool | None):
        yield row_error(
            "/parallel_tool_calls", "data_type", "parallel_tool_calls must be true or false", "or leave it out"
        )
    messages = row.get("messages")
    if "messages" not in row and any(nearest(key, ("messages",)) for key in row.keys() - ROW_KEYS):
        return  # the misspelled key is named above
    if not isinstance(messages, list) or not messages:
        message = '"messages" must be a list of at least one message'
        yield row_error(
            "/messages", "missing_messages_list", message, 'add "messages": [{"role": ..., "content": ...}]'
        )
        return
    for index, message in enumerate(messages):
        yield from _message(message, f"/messages/{index}")
    # The order of turns is only meaningful if every role is known; otherwise the errors above suffice.
    if all(isinstance(message, dict) and message.get("role") in ROLES for message in messages):
        yield from _conversation(messages)


def unknown_keys(value: Mapping[str, object], known: frozenset[str], at: str) -> Iterator[Problem]:
    """Yield a problem for each unknown key of an object at the JSON pointer `at`."""
    for key in sorted(value.keys() - known):
        pointer = f"{at}/{key[:64].replace('~', '~0').replace('/', '~1')}"
        meant = nearest(key, known - value.keys())
        leave_out = "" if at else f", or make a file without it: `spard files convert FILE_ID --leave-out {key[:64]}`"
        message = f'unknown key "{key[:64]}"' + (f'; did you mean "{meant}"?' if meant else "")
        hint = f'write "{meant}", or remove it' if meant else "remove it"
        yield row_error(pointer, "message_unrecognized_key", message, f"{hint}{leave_out}")


def nearest(word: str, known: Collection[str]) -> str | None:
    """Return the word in `known` that `word` is a likely misspelling of, or None."""
    lower = word[:_LONGEST_WORD].strip().lower()
    found = [lower] if lower in known else get_close_matches(lower, sorted(known), n=1, cutoff=_ALIKE)
    return found[0] if found else None


def control_text(content: Any, at: str) -> Iterator[Problem]:
    """Yield a problem if a text contains a control token, which could end a turn and begin one in another role."""
    if isinstance(content, str) and (found := _CONTROL_TEXT.search(content)):
        message = f'"{found.group()}" is a control token of chat templates'
        yield row_error(at, "reserved_token", message, "remove it: the model's own template adds what is needed")


def _message(message: Any, at: str) -> Iterator[Problem]:
    if not isinstance(message, dict):
        yield row_error(at, "data_type", "a message must be an object", '{"role": "user", "content": "..."}')
        return
    yield from unknown_keys(message, MESSAGE_KEYS, at)
    role = message.get("role")
    if "role" not in message:
        yield row_error(f"{at}/role", "message_missing_key", "role is missing", 'add "role": "assistant"')
    elif role not in ROLES:
        meant = (_OTHER_NAMES.get(role.strip().lower()) or nearest(role, ROLES)) if isinstance(role, str) else None
        told = f"unknown role {str(role)[:40]!r}" + (f'; did you mean "{meant}"?' if meant else "")
        hint = f'write "{meant}"' if meant else f"use one of {', '.join(ROLES)}"
        yield row_error(f"{at}/role", "unrecognized_role", told, hint)
    yield from _content(message, at)
    yield from _weight(message, at)
    yield from _names(message, at)
    yield from _reasoning(message, at)
    if "tool_calls" in message:
        yield from _tool_calls(message["tool_calls"], f"{at}/tool_calls")
    if message.get("function_call") is not None:
        yield from _call(message["function_call"], f"{at}/function_call")


def _names(message: Mapping[str, object], at: str) -> Iterator[Problem]:
    """Check the speaker's name, and the call that a tool answers."""
    if message.get("role") == "tool" and not isinstance(message.get("tool_call_id"), str):
        hint = "give the id of the call that it answers"
        yield row_error(f"{at}/tool_call_id", "message_missing_key", "a tool message needs tool_call_id", hint)
    if message.get("role") == "function" and not isinstance(message.get("name"), str):
        hint = "give the name of the function that it answers for"
        yield row_error(f"{at}/name", "message_missing_key", "a function message needs a name", hint)
    elif not isinstance(message.get("name"), str | None):
        yield row_error(f"{at}/name", "data_type", "name must be a string", "write it in quotes or leave it out")


def _reasoning(message: Mapping[str, object], at: str) -> Iterator[Problem]:
    """Check the reasoning before an answer."""
    reasoning, at = message.get("reasoning_content"), f"{at}/reasoning_content"
    if reasoning is None:
        return
    if not isinstance(reasoning, str):
        yield row_error(at, "data_type", "reasoning_content must be text", "give a string or leave it out")
    elif message.get("role") != "assistant":
        yield row_error(at, "message_unrecognized_key", "only assistant messages have reasoning", "remove it")
    yield from control_text(reasoning, at)


def _content(message: Mapping[str, object], at: str) -> Iterator[Problem]:
    content, is_call = message.get("content"), bool(message.get("tool_calls") or message.get("function_call"))
    if content is None and is_call and message.get("role") == "assistant":
        return
    if isinstance(message.get("refusal"), str) and not content:
        hint = "put its text in content: refusal is not trained on"
        yield row_error(f"{at}/refusal", "missing_content", "the answer stands in refusal alone", hint)
        return
    if "content" not in message:
        yield row_error(f"{at}/content", "message_missing_key", "content is missing", 'add "content": "..."')
        return
    text = _plain(content)
    if text is None:
        hint = 'give a string or parts {"type": "text", "text": ...}; images are not trained here'
        yield row_error(f"{at}/content", "data_type", "content must be text", hint)
        return
    if content is None or (message.get("role") == "assistant" and not text.strip() and not is_call):
        yield row_error(f"{at}/content", "missing_content", "content is empty", "remove the row or give an answer")
    yield from control_text(text, f"{at}/content")


def _plain(content: Any) -> str | None:
    """Return the text of a content value; None if it is not text."""
    if isinstance(content, list):
        parts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
        texts = [part for part in parts if isinstance(part, str)]
        return "".join(texts) if len(texts) == len(content) else None
    return content if isinstance(content, str) else "" if content is None else None


def _weight(message: Mapping[str, object], at: str) -> Iterator[Problem]:
    if "weight" not in message:
        return
    weight, hint = message["weight"], "0: no loss falls on the message; 1, or no weight: it is learned"
    if isinstance(weight, bool) or weight not in (0, 1):
        yield row_error(f"{at}/weight", "data_type", "weight must be 0 or 1", hint)
    elif message.get("role") != "assistant":
        yield row_error(
            f"{at}/weight", "message_unrecognized_key", "only assistant messages have a weight", "remove it"
        )


def _tools(tools: Any) -> Iterator[Problem]:
    if not isinstance(tools, list):
        yield row_error("/tools", "data_type", "tools must be a list", f"[{_TOOL}]")
        return
    for index, tool in enumerate(tools):
        at = f"/tools/{index}"
        if not isinstance(tool, dict) or tool.get("type") != "function":
            yield row_error(f"{at}/type", "data_type", 'a tool has the type "function"', _TOOL)
        else:
            yield from _function(tool.get("function"), f"{at}/function")


def _functions(functions: Any) -> Iterator[Problem]:
    """Check `functions`, the former name of tools."""
    if not isinstance(functions, list) or not 1 <= len(functions) <= _MAX_FUNCTIONS:
        message = f"functions must be a list of 1 to {_MAX_FUNCTIONS}"
        yield row_error("/functions", "data_type", message, 'or better, use "tools"')
        return
    for index, function in enumerate(functions):
        yield from _function(function, f"/functions/{index}")


def _function(function: Any, at: str) -> Iterator[Problem]:
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        yield row_error(f"{at}/name", "message_missing_key", "a function needs a name", _TOOL)
    elif not isinstance(function.get("parameters"), dict | None):
        hint = 'a JSON schema: {"type": "object", "properties": {...}}'
        yield row_error(f"{at}/parameters", "data_type", "parameters must be an object", hint)


def _tool_calls(calls: Any, at: str) -> Iterator[Problem]:
    if not isinstance(calls, list) or not calls:
        yield row_error(at, "data_type", "tool_calls must be a list of at least one call", f"[{_CALL}]")
        return
    for index, call in enumerate(calls):
        if not isinstance(call, dict) or not isinstance(call.get("id"), str):
            hint = f"{_CALL}; `spard files convert FILE_ID` gives ids to calls without one"
            yield row_error(f"{at}/{index}/id", "message_missing_key", "a tool call needs an id", hint)
        elif call.get("type") != "function":
            yield row_error(f"{at}/{index}/type", "data_type", 'a tool call has the type "function"', _CALL)
        else:
            yield from _call(call.get("function"), f"{at}/{index}/function")


def _call(function: Any, at: str) -> Iterator[Problem]:
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        yield row_error(f"{at}/name", "message_missing_key", "a call needs the name of a function", _CALL)
    elif not _is_json(function.get("arguments")):
        hint = 'write the JSON object as a string: "{}"'
        yield row_error(f"{at}/arguments", "data_type", "arguments must be a string of JSON", hint)


def _is_json(text: Any) -> bool:
    try:
        return isinstance(text, str) and parse_json(text) is not ...
    except BadJson:
        return False


def _conversation(turns: list[Mapping[str, object]]) -> Iterator[Problem]:
    """Check the turns together: there must be an answer to learn, in an order that most templates accept."""
    roles = [turn.get("role") for turn in turns]
    answers, hint = [turn for turn in turns if turn.get("role") == "assistant"], "add an answer, or remove the row"
    if not answers:
        message = "no message is from the assistant, so there is nothing to learn"
        yield row_error("/messages", "example_missing_assistant_message", message, hint)
    elif roles[-1] != "assistant":
        at = f"/messages/{len(turns) - 1}/role"
        yield row_error(at, "example_missing_assistant_message", "the last message must be from the assistant", hint)
    elif all(turn.get("weight") == 0 for turn in answers):
        hint = "give the message to learn weight 1, or remove the row"
        yield row_error("/messages", "all_tokens_masked", "every assistant message has weight 0", hint)
    elif roles[0] == "assistant" and turns[0].get("weight", 1) != 0:
        hint = "give that message weight 0, or one before it"
        yield row_error("/messages/0/role", "role_order", "the assistant speaks first, answering nothing", hint)
    hint = "roles should be an optional system message, then user and assistant in turn"
    for index, role in enumerate(roles):
        before = roles[index - 1] if index else None
        if role in ("user", "assistant") and role == before:
            yield row_warning(f"/messages/{index}/role", "role_order", f"two {role} messages in a row", hint)
        elif role in ("system", "developer") and index:
            yield row_warning(f"/messages/{index}/role", "role_order", f"a {role} message is not the first", hint)


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
    names = _answer_keys(row)
    yield from unknown_keys(row, frozenset({"input", *names}), "")
    asked = row.get("input")
    if not isinstance(asked, dict):
        yield row_error("/input", "message_missing_key", '"input" must be an object with "messages"', _HINT)
        return
    yield from unknown_keys(asked, INPUT_KEYS, "/input")
    if not isinstance(asked.get("messages"), list) or not asked["messages"]:
        message = '"input.messages" must be a list of at least one message'
        yield row_error("/input/messages", "missing_messages_list", message, _HINT)
        return
    wrong = [problem for name in names for problem in _output(row, name)]
    yield from wrong
    if not wrong:
        yield from _conversations(row, names)


def preferred_chat(row: Mapping[str, Any]) -> tuple[dict[str, Any], Message]:
    """Return a valid pair as a chat row that ends in the preferred answer, and the non-preferred answer.

    Earlier assistant turns get weight 0.
    """
    preferred, other = (row[name][0] for name in _answer_keys(row))
    turns = [turn | {"weight": 0} if turn["role"] == "assistant" else turn for turn in row["input"]["messages"]]
    return _chat(row, [*turns, preferred]), other


def _answer_keys(row: Mapping[str, object]) -> tuple[str, str]:
    """Return the keys of the preferred and the non-preferred answer, in the spelling that the row uses."""
    return _OLD if row.keys() & set(_OLD) and not row.keys() & set(_NEW) else _NEW


def _output(row: Mapping[str, object], name: str) -> Iterator[Problem]:
    """Check that there is exactly one answer and that it is from the assistant."""
    found = row.get(name)
    if name not in row:
        yield row_error(f"/{name}", "message_missing_key", f'"{name}" is missing', _HINT)
    elif not isinstance(found, list) or len(found) != 1:
        yield row_error(f"/{name}", "data_type", f'"{name}" must be a list of one message', _ANSWER)
    elif not isinstance(found[0], dict) or found[0].get("role") != "assistant":
        message = f'the message of "{name}" must be from the assistant'
        yield row_error(f"/{name}/0/role", "example_missing_assistant_message", message, _ANSWER)
    elif "weight" in found[0]:
        yield row_error(
            f"/{name}/0/weight", "message_unrecognized_key", "an answer of a pair has no weight", "remove it"
        )


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
        yield row_warning(f"/{names[1]}", "identical_outputs", message, "remove the row, or give another answer")


def _chat(row: Mapping[str, Any], messages: list[Any]) -> dict[str, Any]:
    return {name: value for name, value in row["input"].items() if name in INPUT_KEYS} | {"messages": messages}

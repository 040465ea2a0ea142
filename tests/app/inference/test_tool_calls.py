"""Calls of tools in the forms that chat templates teach, whole and piece by piece."""

from __future__ import annotations

import json

import pytest

from app.inference.completions import Sieve
from app.inference.schemas import ChatCreate
from spard.data.rows import example

NAMES = {"add", "weather"}
ADD = '{"name": "add", "arguments": {"a": 1, "b": 2}}'
LLAMA = '{"name": "add", "parameters": {"a": 1, "b": 2}}'


@pytest.mark.parametrize(
    ("text", "before", "calls"),
    [
        (f"<tool_call>\n{ADD}\n</tool_call>", "", 1),
        (f"Let me add.\n<tool_call>{ADD}</tool_call>\n<tool_call>{ADD}</tool_call>", "Let me add.\n", 2),
        (f"[TOOL_CALLS][{ADD}, {ADD}]", "", 2),
        (f"<|python_tag|>{LLAMA}", "", 1),
        (LLAMA, "", 1),
    ],
)
def test_calls_are_found(text: str, before: str, calls: int) -> None:
    for size in (1, 7, len(text)):
        sieve = Sieve(NAMES)
        shown = "".join(sieve.add(text[i : i + size]) for i in range(0, len(text), size))
        rest, found = sieve.end()
        assert shown + rest == before
        assert [(each.name, json.loads(each.arguments)) for each in found] == [("add", {"a": 1, "b": 2})] * calls
        assert len({each.id for each in found}) == calls


@pytest.mark.parametrize(
    "text",
    ["It is 3.", "<tool", "<tool_call>{broken</tool_call>", '{"name": "unknown"}', '{"a": 1}', "[1, 2]", "{", "1 < 2"],
)
def test_what_is_no_call_is_text(text: str) -> None:
    for size in (1, len(text)):
        sieve = Sieve(NAMES)
        shown = "".join(sieve.add(text[i : i + size]) for i in range(0, len(text), size))
        rest, found = sieve.end()
        assert (shown + rest, found) == (text, [])


def test_without_tools_everything_is_shown_at_once() -> None:
    sieve = Sieve(())
    assert sieve.add(f"<tool_call>{ADD}</tool_call>") == f"<tool_call>{ADD}</tool_call>"
    assert sieve.end() == ("", [])


def test_a_call_in_its_former_words_is_read_as_training_reads_it() -> None:
    turns = [
        {"role": "user", "content": "What is 1 plus 2?"},
        {"role": "assistant", "content": None, "function_call": {"name": "add", "arguments": '{"a": 1, "b": 2}'}},
        {"role": "function", "name": "add", "content": "3"},
    ]
    ask = ChatCreate.model_validate({"model": "tiny", "messages": turns}).ask()
    assert example({"messages": ask["messages"]}, 1).messages == example({"messages": turns}, 1).messages

"""Tools in training rows, in OpenAI's present words and in the former ones: each fault by its pointer."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi.testclient import TestClient

from spard.rows import example
from tests.app.http.conftest import FILES, Upload, jsonl, rows

QUESTION = {"role": "user", "content": "two and two?"}
ANSWER = {"role": "assistant", "content": "four"}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL: dict[str, Any] = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "4"}
NOW = {
    "messages": [
        {"role": "developer", "content": "Use tools."},
        QUESTION,
        {"role": "assistant", "tool_calls": [CALL]},
        RESULT,
        ANSWER,
    ],
    "tools": [TOOL],
    "parallel_tool_calls": False,
}
FORMER = {
    "messages": [
        {"role": "system", "content": "Use tools."},
        QUESTION,
        {"role": "assistant", "content": None, "function_call": CALL["function"]},
        {"role": "function", "name": "add", "content": "4"},
        ANSWER,
    ],
    "functions": [TOOL["function"]],
}


def says(message: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [QUESTION, message, ANSWER]}


def calls(**change: Any) -> dict[str, Any]:
    return says({"role": "assistant", "content": None, "tool_calls": [CALL | change]})


BAD: dict[str, tuple[dict[str, Any], str, str]] = {
    "tools of text": (says(ANSWER) | {"tools": "add"}, "data_type", "/tools"),
    "a tool without type": (says(ANSWER) | {"tools": [{"function": {"name": "a"}}]}, "data_type", "/tools/0/type"),
    "a tool without name": (
        says(ANSWER) | {"tools": [TOOL | {"function": {}}]},
        "message_missing_key",
        "/tools/0/function/name",
    ),
    "parameters of text": (
        says(ANSWER) | {"tools": [TOOL | {"function": {"name": "a", "parameters": "x"}}]},
        "data_type",
        "/tools/0/function/parameters",
    ),
    "129 functions": (says(ANSWER) | {"functions": [{"name": "a"}] * 129}, "data_type", "/functions"),
    "a function without name": (says(ANSWER) | {"functions": [{}]}, "message_missing_key", "/functions/0/name"),
    "parallel calls of text": (says(ANSWER) | {"parallel_tool_calls": "no"}, "data_type", "/parallel_tool_calls"),
    "no call": (
        says({"role": "assistant", "content": "a", "tool_calls": []}),
        "data_type",
        "/messages/1/tool_calls",
    ),
    "a call without id": (calls(id=None), "message_missing_key", "/messages/1/tool_calls/0/id"),
    "a call of another type": (calls(type="web"), "data_type", "/messages/1/tool_calls/0/type"),
    "a call without name": (calls(function={}), "message_missing_key", "/messages/1/tool_calls/0/function/name"),
    "arguments that are no JSON": (
        calls(function={"name": "add", "arguments": "{a}"}),
        "data_type",
        "/messages/1/tool_calls/0/function/arguments",
    ),
    "a former call without arguments": (
        says({"role": "assistant", "content": None, "function_call": {"name": "add"}}),
        "data_type",
        "/messages/1/function_call/arguments",
    ),
    "a function message without name": (
        says({"role": "function", "content": "4"}),
        "message_missing_key",
        "/messages/1/name",
    ),
    "a name of numbers": (says(ANSWER | {"name": 4}), "data_type", "/messages/1/name"),
    "a refusal beside no content": (
        says({"role": "assistant", "content": None, "refusal": "I cannot."}),
        "missing_content",
        "/messages/1/refusal",
    ),
}


@pytest.mark.parametrize(("row", "code", "pointer"), BAD.values(), ids=BAD)
def test_a_bad_tool_is_pointed_at(
    row: dict[str, Any], code: str, pointer: str, upload: Upload, customer: TestClient
) -> None:
    file = upload(rows(10) + jsonl(row)).json()
    problems = customer.get(f"{FILES}/{file['id']}/validation").json()["problems"]
    errors = [each for each in problems if each["severity"] == "error"]
    assert [(each["line"], each["code"], each["pointer"]) for each in errors] == [(11, code, pointer)]
    assert all(each["hint"] for each in problems)


@pytest.mark.parametrize("row", [NOW, FORMER], ids=["tools", "functions"])
def test_tools_are_accepted(row: dict[str, Any], upload: Upload) -> None:
    file = upload(jsonl(*[row] * 10)).json()
    assert (file["status"], file["status_details"]) == ("processed", None)


def test_the_former_words_train_as_the_present_ones() -> None:
    present, former = example(NOW, 1), example(FORMER, 1)
    assert former.tools == present.tools
    assert [turn["role"] for turn in former.messages] == [turn["role"] for turn in present.messages]
    call = former.messages[2]["tool_calls"][0]["function"]
    assert (call, "function_call" in former.messages[2]) == ({"name": "add", "arguments": {"a": 2}}, False)

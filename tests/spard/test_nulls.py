"""Null means absent, and the row that is checked is the row that is trained on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionMessage
from openai.types.chat.chat_completion import Choice

from spard.data.jsonl import parse_row, without_nulls
from spard.data.row_rules import TrainingRows, pool_row, suite_row
from spard.data.rows import example, read_examples, read_pool, read_prompts

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": null}'}}


def tool(**parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "add", "parameters": parameters}}


def row_schema(row: dict[str, Any]) -> dict[str, Any]:
    read = parse_row(json.dumps(row), 1)
    schema: dict[str, Any] = read["tools"][0]["function"]["parameters"]
    return schema


def test_keys_without_a_value_are_absent_at_any_depth() -> None:
    row = {"a": None, "b": [{"c": None, "d": 1}, None], "e": {"f": None}}
    assert without_nulls(row) == {"b": [{"d": 1}, None], "e": {}}


def test_properties_of_other_tools_are_absent_from_a_schema() -> None:
    filled = tool(type="object", properties={"a": {"type": "number", "enum": None}, "b": None}, required=None)
    assert row_schema({"tools": [filled]}) == {"type": "object", "properties": {"a": {"type": "number"}}}


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "default": None},
        {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
        {"const": None},
        {"enum": ["a", None]},
        {"examples": [None, {"a": None}]},
        {"type": "object", "default": {"a": None}},
    ],
)
def test_a_null_that_is_a_value_in_a_schema_stays(schema: dict[str, Any]) -> None:
    parameters = {"type": "object", "properties": {"a": schema, "default": {"type": "string"}}}
    assert row_schema({"tools": [tool(**parameters)]}) == parameters


def test_a_default_that_arrow_has_filled_in_is_absent_unless_the_schema_accepts_null() -> None:
    filled: dict[str, Any] = {"description": None, "default": None, "const": None}
    properties = {"a": {"type": "number"} | filled, "b": {"type": ["number", "null"]} | filled, "default": None}
    assert row_schema({"tools": [tool(properties=properties)]})["properties"] == {
        "a": {"type": "number"},
        "b": {"type": ["number", "null"], "default": None, "const": None},
    }


def test_what_a_call_s_arguments_say_stays() -> None:
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
    row = parse_row(json.dumps({"messages": turns, "tools": None}), 1)
    assert row["messages"][1]["tool_calls"] == [CALL]
    assert not TrainingRows()(row, 1)
    assert example(row, 1).messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": None}


def answer(**message: Any) -> dict[str, Any]:
    """Return what `message.model_dump()` of OpenAI's SDK makes of an API's answer."""
    choice = {"index": 0, "finish_reason": "stop", "logprobs": None, "message": {"role": "assistant", **message}}
    whole = {"id": "x", "created": 1, "model": "m", "object": "chat.completion", "choices": [choice]}
    found = ChatCompletion.model_validate(whole).choices[0]
    assert isinstance(found, Choice)
    assert isinstance(found.message, ChatCompletionMessage)
    return found.message.model_dump()


@pytest.mark.parametrize(
    "said",
    [
        {"content": "four"},
        {"content": "four", "refusal": None, "annotations": []},  # as OpenAI's API answers
        {"content": "four", "refusal": None, "annotations": None, "tool_calls": []},  # as vLLM does
        {"content": None, "tool_calls": [CALL]},
    ],
)
def test_messages_of_openai_s_sdk_are_rows_as_they_are(said: dict[str, Any], tmp_path: Path) -> None:
    dumped = answer(**said)
    assert "audio" in dumped
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "2 and 2?"}, dumped]}))
    (read,) = read_examples(path)
    assert read.messages[1]["content"] == (said["content"] or "")
    assert read.messages[1].keys() <= {"role", "content", "tool_calls"}


def test_null_is_absent_in_preference_pairs_pools_and_suites(tmp_path: Path) -> None:
    message = {"role": "assistant", "content": "yes", "tool_calls": None, "weight": None}
    pair = {
        "input": {"messages": [{"role": "user", "content": "?", "name": None}], "tools": None},
        "preferred_output": [message],
        "non_preferred_output": [message | {"content": "no"}],
        "preferred_completion": None,
    }
    row = parse_row(json.dumps(pair), 1)
    assert not TrainingRows()(row, 1)
    assert example(row, 1).rejected == {"role": "assistant", "content": "no"}

    (tmp_path / "pool.jsonl").write_text(json.dumps({"prompt": "a", "safe": "b", "benign": None}))
    (pooled,) = read_pool(tmp_path / "pool.jsonl")
    assert [turn["content"] for turn in pooled.messages] == ["a", "b"]
    assert [each.code for each in pool_row(parse_row('{"prompt": "a", "safe": null}', 1), 1)] == ["message_missing_key"]

    asked = {"prompt": "a", "answer": None, "choices": None, "scorer": None, "language": None, "category": None}
    assert not suite_row(parse_row(json.dumps(asked), 1), 1)
    (tmp_path / "suite.jsonl").write_text(json.dumps(asked))
    assert [prompt.prompt for prompt in read_prompts(tmp_path / "suite.jsonl")] == ["a"]

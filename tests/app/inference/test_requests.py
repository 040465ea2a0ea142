"""Numbers and turns of a request for a reply: which are taken, and what an engine is told."""

from __future__ import annotations

from typing import Any

import pytest

from app.errors import AppError
from app.http.validation_errors import read
from app.inference.responses import ResponseCreate
from app.inference.schemas import ChatCreate, CompletionCreate

CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hello"}]}
BODIES: dict[type[Any], dict[str, Any]] = {
    ChatCreate: CHAT,
    CompletionCreate: {"model": "m", "prompt": "Hello"},
    ResponseCreate: {"model": "m", "input": "Hello"},
}


@pytest.mark.parametrize("value", [True, False])
@pytest.mark.parametrize("name", ["temperature", "top_p", "seed", "n", "max_tokens", "presence_penalty"])
def test_a_boolean_is_no_number(name: str, value: bool) -> None:
    with pytest.raises(AppError) as refused:
        read(ChatCreate, CHAT | {name: value})
    assert (refused.value.code, refused.value.param) == ("invalid_type", name)


def test_a_boolean_is_taken_where_one_is_meant() -> None:
    asked = read(ChatCreate, CHAT | {"logprobs": True, "stream": True, "store": False, "n": 2})
    assert (asked.logprobs, asked.stream, asked.n) == (True, True, 2)


@pytest.mark.parametrize("role", ["system", "developer", "user", "tool", "function"])
@pytest.mark.parametrize("turn", [{}, {"content": None}, {"contents": "Hello"}])
def test_a_turn_that_says_nothing_is_not_read_as_an_empty_one(role: str, turn: dict[str, Any]) -> None:
    with pytest.raises(AppError) as refused:
        read(ChatCreate, {"model": "m", "messages": [{"role": role, **turn}]})
    assert (refused.value.code, refused.value.param) == ("missing_field", "messages.0.content")


@pytest.mark.parametrize(
    ("item", "code", "param"),
    [
        ({"type": "item_reference", "id": "msg_1"}, "not_allowed", "input.0"),
        ({"type": "function_call_output", "call_id": "a", "output": 5}, "invalid_type", "input.0.output"),
        (
            {"type": "function_call", "call_id": "a", "name": "f", "arguments": "no"},
            "invalid_value",
            "input.0.arguments",
        ),
        ({"role": "tool", "content": "x"}, "not_allowed", "input.0.role"),
        ("Hello", "invalid_type", "input.0"),
    ],
)
def test_an_item_is_told_what_is_wrong_with_what_it_says_it_is(item: Any, code: str, param: str) -> None:
    with pytest.raises(AppError) as refused:
        read(ResponseCreate, {"model": "m", "input": [item]})
    assert (refused.value.code, refused.value.param) == (code, param)


def test_what_a_tool_says_may_come_in_parts() -> None:
    parts = [{"type": "input_text", "text": "4"}, {"type": "input_text", "text": "2"}]
    item = {"type": "function_call_output", "call_id": "a", "output": parts}
    assert read(ResponseCreate, {"model": "m", "input": [item]}).ask()["messages"] == [
        {"role": "tool", "content": "42", "tool_call_id": "a"}
    ]


def test_arguments_of_an_earlier_call_are_json() -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{"}}
    with pytest.raises(AppError) as refused:
        read(ChatCreate, CHAT | {"messages": [{"role": "assistant", "tool_calls": [call]}]})
    assert refused.value.param == "messages.0.tool_calls.0.function.arguments"
    assert "must be JSON" in refused.value.message


def test_a_turn_of_the_assistant_may_hold_no_text() -> None:
    assert read(ChatCreate, CHAT | {"messages": [{"role": "assistant", "content": None}]}).messages
    assert read(ChatCreate, CHAT | {"messages": [{"role": "user", "content": ""}]}).messages


@pytest.mark.parametrize("kind", BODIES)
@pytest.mark.parametrize(("asked", "told"), [({}, (1, 1)), ({"top_p": 0}, (0, 1)), ({"top_p": 0.5}, (1, 0.5))])
def test_a_top_p_of_0_leaves_the_likeliest_token_alone(
    kind: type[Any], asked: dict[str, float], told: tuple[float, float]
) -> None:
    ask = read(kind, BODIES[kind] | asked).ask()
    assert (ask["temperature"], ask["top_p"]) == told

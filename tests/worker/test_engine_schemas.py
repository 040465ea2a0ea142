"""Schemas are compiled in processes with limits: one that is too costly ends its own request, and no other waits."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llguidance
import psutil
import pytest

from app.inference.protocol import refusal_error
from tests.worker.engine_in_process import QUESTIONS, Asked, alone
from worker.engine import grammar

LIST: dict[str, Any] = {"type": "array", "items": {"enum": [1, 2]}, "minItems": 3, "maxItems": 3}
SLOW = {"title": "slow", "type": "object"}


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], None]:
    """Have the compilation of `SLOW` do something else: what a schema costs is not for tests to find out."""
    real = grammar.compile_schema

    def replace_compiler(instead: Callable[[], object]) -> None:
        def compile_schema(vocabulary: Any, schema: str) -> Any:
            if '"slow"' in schema:
                instead()
            return real(vocabulary, schema)

        monkeypatch.setattr(grammar, "compile_schema", compile_schema)

    return replace_compiler


def spin() -> None:
    while True:
        pass


def allocate() -> None:
    bytearray(4 << 30)


def wait_for_signal() -> None:
    signal.pause()


def failures(asked: Asked) -> dict[int, str]:
    return {each["id"]: each["code"] for each in asked.said if each["kind"] == "failed"}


@pytest.mark.parametrize("costs", [spin, allocate])
def test_a_schema_that_costs_too_much_is_the_fault_of_its_request(
    costs: Callable[[], None], model: Path, stand_ins: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar, "COMPILE_CPU_S", 0.1)
    stand_ins(costs)
    asked = Asked(model)
    costly = asked.ask(QUESTIONS[0], project="a", json_schema=SLOW)
    other = asked.ask(QUESTIONS[1], project="b")
    held = asked.ask(QUESTIONS[1], project="b", json_schema=LIST)
    asked.run()
    assert failures(asked) == {costly: "schema_too_costly"}
    assert asked.text(other).strip() == alone(model, None, QUESTIONS[1])
    assert len(json.loads(asked.text(held))) == 3
    error = refusal_error(next(each for each in asked.said if each["kind"] == "failed"))
    assert (error.status, error.param) == (400, "response_format")


@pytest.mark.parametrize(
    ("schema", "reply", "is_allowed"),
    [
        ({"properties": {"größe": {"type": "integer"}}}, '{"größe": 1}', True),
        ({"properties": {"größe": {"type": "integer"}}}, '{"gr\\u00f6\\u00dfe": "one"}', False),
        ({"properties": {"größe": {"type": "integer"}}}, '{"a\\nb": "one\\n"}', True),
        ({"properties": {"größe": {"type": "integer"}}}, '{"größe": 1, "gr\\u00f6\\u00dfe": "one"}', False),
        ({"patternProperties": {"^a": {"type": "integer"}}}, '{"\\u0061": "one"}', False),
        ({"minProperties": 1}, '{"a": 1, "a": 2}', True),
        ({"minProperties": 2, "required": ["a"]}, '{"a": 1, "b": 2}', True),
        ({"minProperties": 2, "required": ["a"]}, '{"a": 1, "a": 2}', False),
        ({"x-guidance": {"whitespace_flexible": True}}, '{"a":   1}', False),
        ({"x-guidance": {"whitespace_pattern": " *"}}, '{"a":   1}', False),
    ],
)
def test_a_reply_parses_to_what_its_schema_allows(schema: dict[str, Any], reply: str, is_allowed: bool) -> None:
    vocabulary = llguidance.LLTokenizer("byte")
    matcher = grammar.compile_schema(vocabulary, json.dumps({"type": "object", **schema}))
    tokens = list(reply.encode())
    assert (matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()) == is_allowed


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"minProperties": 2}, "minProperties"),
        ({"properties": {"a": {"minProperties": 3, "required": ["a", "a"]}}}, "minProperties"),
        ({"minProperties": 2, "patternProperties": {"^a": {}}, "additionalProperties": False}, "minProperties"),
        ({"const": "a\x01"}, "control character"),
        ({"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}, "uniqueItems"),
    ],
)
def test_a_schema_that_would_be_enforced_in_part_is_refused(schema: dict[str, Any], why: str) -> None:
    with pytest.raises(grammar.Uncompiled, match=why):
        grammar.compile_schema(llguidance.LLTokenizer("byte"), json.dumps({"type": "object", **schema}))


def test_replies_are_written_while_a_schema_is_compiled(model: Path, stand_ins: Any) -> None:
    stand_ins(wait_for_signal)
    asked = Asked(model)
    slow = asked.ask(QUESTIONS[0], project="a", json_schema=SLOW)
    queued = asked.ask(QUESTIONS[0], project="a", json_schema=LIST)
    plain, held = asked.ask(QUESTIONS[1], project="b"), asked.ask(QUESTIONS[2], project="b", json_schema=LIST)
    while {each["id"] for each in asked.said if each["kind"] == "done"} != {plain, held}:
        asked.engine.step()
    assert not {slow, queued} & {each.get("id") for each in asked.said}
    (compiling,) = compilers(asked)
    asked.engine.take({"op": "cancel", "id": slow})
    asked.run()
    assert asked.said[-1] == {"kind": "done", "id": queued, "reply_tokens": len(asked.text(queued))}
    compiling.wait(10)


def test_few_schemas_are_compiled_at_once_and_one_of_a_project(model: Path, stand_ins: Any) -> None:
    stand_ins(wait_for_signal)
    asked = Asked(model)
    for project in ("a", "a", "b", "c"):
        asked.ask(QUESTIONS[0], project=project, json_schema=SLOW)
    compiling = asked.engine._forms._compiling if asked.engine._forms else {}
    assert [waiting.project for waiting, _ in compiling.values()] == ["a", "b"]
    asked.engine.take({"op": "cancel", "id": 1})
    assert [waiting.id for waiting, _ in compiling.values()] == [3, 2]
    for number in (2, 3, 4):
        asked.engine.take({"op": "cancel", "id": number})
    assert not asked.engine.is_busy


def test_a_reply_waits_for_its_mask_and_no_other_does(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(model)
    held = asked.ask(QUESTIONS[0], project="a", json_schema=LIST)
    while not any(each["kind"] == "piece" for each in asked.said):
        asked.engine.step()
    (follower,) = compilers(asked)
    follower.suspend()
    other = asked.ask(QUESTIONS[1], project="b")
    while not any(each["kind"] == "done" for each in asked.said):
        asked.engine.step()
    assert asked.text(other).strip() == alone(model, None, QUESTIONS[1])
    follower.resume()
    asked.run()
    assert len(json.loads(asked.text(held))) == 3


def test_a_reply_whose_schema_becomes_too_costly_ends_alone(model: Path) -> None:
    asked = Asked(model)
    held = asked.ask(QUESTIONS[0], project="a", json_schema=LIST)
    other = asked.ask(QUESTIONS[1], project="b")
    while not any(each["kind"] == "piece" and each["id"] == held for each in asked.said):
        asked.engine.step()
    (follower,) = compilers(asked)
    follower.send_signal(signal.SIGPROF)  # which is how the kernel ends it
    asked.run()
    assert failures(asked) == {held: "schema_too_costly"}
    assert asked.text(other).strip() == alone(model, None, QUESTIONS[1])


def test_an_engine_whose_compiling_process_has_ended_ends(model: Path) -> None:
    asked = Asked(model)
    (maker,) = [each for each in psutil.Process().children() if each.pid == asked.forms.pid]
    maker.kill()
    maker.wait()
    asked.ask(QUESTIONS[0], json_schema=LIST)
    asked.engine.step()
    assert asked.engine._has_ended


def test_what_a_request_was_held_to_ends_with_it(model: Path) -> None:
    asked = Asked(model)
    done = asked.ask(QUESTIONS[0], json_schema=LIST, n=2)
    asked.run()
    assert {each["id"] for each in asked.said if each["kind"] == "done"} == {done}
    assert compilers(asked, 0) == []


def compilers(asked: Asked, count: int = 1) -> list[psutil.Process]:
    """Return the processes that compile or follow schemas for an engine, once there are so many."""
    deadline = time.monotonic() + 30
    while len(found := psutil.Process(asked.forms.pid).children()) != count:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found

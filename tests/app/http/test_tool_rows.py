"""Tools in training rows, in OpenAI's present words and in the former ones: each fault by its pointer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import update

from app import db
from app.db.tables import BaseModelEntry
from spard.data.rows import example
from tests.app.http.conftest import FILES, JOBS, Service, Upload, jsonl, rows
from tests.spard.parts import TEMPLATE, byte_tokenizer

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
    "calls of text": (
        says({"role": "assistant", "content": "a", "tool_calls": "add"}),
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
    assert file["status"] == "processed"
    assert "status_details" not in file


def test_the_former_words_train_as_the_present_ones() -> None:
    present, former = example(NOW, 1), example(FORMER, 1)
    assert former.tools == present.tools
    assert [turn["role"] for turn in former.messages] == [turn["role"] for turn in present.messages]
    call = former.messages[2]["tool_calls"][0]["function"]
    assert (call, "function_call" in former.messages[2]) == ({"name": "add", "arguments": {"a": 2}}, False)


ALIAS = "lab/tiny-1"
CALLS_LOST = jsonl(*[json.loads(line) for line in rows(10).splitlines()], NOW)
RENDERS = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def template(provider: TestClient, folder: Path, text: str) -> dict[str, Any]:
    """Offer the model with a tokenizer of this chat template."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = text
    tokenizer.save_pretrained(folder)
    offered = provider.post("/v1/admin/models", json={"alias": ALIAS, "source": str(folder)}).json()
    support: dict[str, Any] = offered["tool_support"]
    return support


@pytest.fixture
def with_calls(provider_with_model: TestClient, upload: Upload) -> dict[str, Any]:
    """A job on a file whose eleventh row calls a tool."""
    return {"model": ALIAS, "training_file": upload(CALLS_LOST).json()["id"]}


def test_a_model_is_offered_with_what_its_template_renders(provider_with_model: TestClient, tmp_path: Path) -> None:
    shown = {"tools": True, "tool_calls": True, "tool": True}
    assert template(provider_with_model, tmp_path / "model", RENDERS) == shown
    assert template(provider_with_model, tmp_path / "model", TEMPLATE) == dict.fromkeys(shown, False)
    assert [each["tool_support"] for each in provider_with_model.get("/v1/admin/models").json()["data"]] == [
        dict.fromkeys(shown, False)
    ]


def test_a_job_whose_calls_the_template_drops_is_refused_with_the_line(
    provider_with_model: TestClient, customer: TestClient, with_calls: dict[str, Any], tmp_path: Path
) -> None:
    template(provider_with_model, tmp_path / "model", TEMPLATE)
    for path in (JOBS, f"{JOBS}/estimate"):
        got = customer.post(path, json=with_calls)
        error = got.json()["error"]
        assert (got.status_code, error["code"], error["param"]) == (400, "tools_not_rendered", "training_file")
        assert {each["line"] for each in error["details"]} == {11}

    template(provider_with_model, tmp_path / "model", RENDERS)
    assert customer.post(JOBS, json=with_calls).status_code == 200


def test_a_model_offered_before_templates_were_asked_is_asked_when_a_job_names_it(
    service: Service, provider_with_model: TestClient, customer: TestClient, with_calls: dict[str, Any], tmp_path: Path
) -> None:
    template(provider_with_model, tmp_path / "model", TEMPLATE)
    with db.transaction(service.app.state.engine) as session:
        session.execute(update(BaseModelEntry).values(tool_support=None))
    assert customer.post(JOBS, json=with_calls).json()["error"]["code"] == "tools_not_rendered"


def test_where_no_tokenizer_is_at_hand_the_worker_decides(customer: TestClient, with_calls: dict[str, Any]) -> None:
    assert customer.post(JOBS, json=with_calls).status_code == 200


def test_validation_for_a_model_names_the_row_and_the_part(
    provider_with_model: TestClient, customer: TestClient, with_calls: dict[str, Any], tmp_path: Path
) -> None:
    template(provider_with_model, tmp_path / "model", TEMPLATE)
    path = f"{FILES}/{with_calls['training_file']}/validation"
    assert customer.get(path).json()["problems"] == []
    found = customer.get(path, params={"model": ALIAS}).json()
    (problem,) = found["problems"]
    assert (problem["line"], problem["code"], problem["pointer"]) == (
        11,
        "tools_not_rendered",
        "/messages/2/tool_calls/0",
    )
    assert (found["counts"], found["tokens"]["rows_not_rendered"]) == ({"tools_not_rendered": 1}, 1)
    assert customer.get(path, params={"model": ALIAS, "after_line": 11}).json()["problems"] == []

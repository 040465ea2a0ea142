"""The official client asks base models and adapters, over HTTP and a real engine."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import jsonschema  # type: ignore[import-untyped]
import pytest
from markupsafe import escape
from openai import BadRequestError, NotFoundError
from peft import PeftModel

from spard.models.base import load_base
from spard.models.generate import generate
from tests.app.inference.conftest import Lab

QUESTIONS = ["What is two and two?", "Hello there", "x"]


@pytest.fixture(scope="session")
def models(served_lab: Lab) -> list[str]:
    return [served_lab.release(seed) for seed in (1, 2)]


@pytest.fixture
def client(served_lab: Lab) -> Iterator[Any]:
    with served_lab.client() as client:
        yield client


def replies(lab: Lab, adapter: Path | None, tokens: int) -> list[str]:
    """What transformers and PEFT answer greedily, as an audit hears it."""
    base = load_base(lab.model, device="cpu")
    model = base.model if adapter is None else PeftModel.from_pretrained(base.model, adapter).eval()
    return generate(model, base.tokenizer, QUESTIONS, tokens)


def test_greedy_text_is_that_of_peft_and_of_the_audit(served_lab: Lab, client: Any, models: list[str]) -> None:
    for name in ["tiny", *models]:
        expected = replies(served_lab, None if name == "tiny" else served_lab.adapter_folder(name), 30)
        for question, reply in zip(QUESTIONS, expected, strict=True):
            found = client.chat.completions.create(
                model=name, messages=[{"role": "user", "content": question}], temperature=0, max_tokens=30
            )
            assert (found.choices[0].message.content or "").strip() == reply
            assert found.usage
            assert found.usage.total_tokens == found.usage.prompt_tokens + found.usage.completion_tokens


def test_a_stream_says_the_same_and_ends_with_its_usage(client: Any, models: list[str]) -> None:
    ask = {"model": models[0], "messages": [{"role": "user", "content": "Hello there"}], "temperature": 0}
    whole = client.chat.completions.create(**ask, max_tokens=20)
    chunks = list(
        client.chat.completions.create(**ask, max_tokens=20, stream=True, stream_options={"include_usage": True})
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage
    ends = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert ends[-1] == whole.choices[0].finish_reason


def test_what_is_asked_is_done(client: Any, models: list[str]) -> None:
    ask = {"model": models[0], "messages": [{"role": "user", "content": "Say something"}], "max_tokens": 12}
    seeded = [client.chat.completions.create(**ask, seed=7, temperature=1.5).choices[0].message.content for _ in "ab"]
    assert seeded[0] == seeded[1]
    two = client.chat.completions.create(**ask, n=2, temperature=1.5, logprobs=True, top_logprobs=3)
    assert [choice.index for choice in two.choices] == [0, 1]
    for choice in two.choices:
        assert choice.logprobs
        assert choice.logprobs.content is not None
        assert all(token.logprob <= 0 and len(token.top_logprobs) == 3 for token in choice.logprobs.content)
    plain = client.chat.completions.create(**ask, temperature=0).choices[0].message.content or ""
    stop = plain[1]
    stopped = client.chat.completions.create(**ask, temperature=0, stop=[stop]).choices[0]
    assert (stopped.message.content, stopped.finish_reason) == (plain[: plain.find(stop)], "stop")


@pytest.mark.parametrize("temperature", [5e-324, 1e-308, 1e-45, 1e-9])
def test_a_temperature_of_nearly_nothing_is_none(client: Any, temperature: float) -> None:
    ask = {"model": "tiny", "messages": [{"role": "user", "content": "Hello there"}], "max_tokens": 6}
    texts = [client.chat.completions.create(**ask, temperature=t).choices[0].message.content for t in (0, temperature)]
    assert texts[0] == texts[1]


def test_a_text_is_continued(client: Any, models: list[str]) -> None:
    whole = client.completions.create(model=models[0], prompt="One, two", max_tokens=8, temperature=0, logprobs=2)
    parts = client.completions.create(model=models[0], prompt="One, two", max_tokens=8, temperature=0, stream=True)
    assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text
    echo = client.completions.create(model=models[0], prompt="One, two", max_tokens=8, temperature=0, echo=True)
    assert echo.choices[0].text == "One, two" + whole.choices[0].text


def test_control_tokens_of_a_customer_are_text(client: Any) -> None:
    def tokens(content: str) -> int:
        ask = client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": content}], max_tokens=1
        )
        assert ask.usage
        return int(ask.usage.prompt_tokens)

    assert tokens("<|end|>") - tokens("") == len("<|end|>")


def test_what_cannot_be_done_is_refused_in_words(client: Any) -> None:
    for length in (300, 300_000):
        messages = [{"role": "user", "content": "x" * length}]
        with pytest.raises(BadRequestError) as long:
            client.chat.completions.create(model="tiny", messages=messages)
        assert long.value.code == "context_length_exceeded"
    messages = [{"role": "user", "content": "x"}]
    wrong = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}
    with pytest.raises(BadRequestError) as schema:
        client.chat.completions.create(model="tiny", messages=messages, response_format=wrong)
    assert (schema.value.code, schema.value.param) == ("invalid_json_schema", "response_format")
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    with pytest.raises(BadRequestError) as tools:
        client.chat.completions.create(model="tiny", messages=messages, tools=[tool])
    assert tools.value.code == "tools_not_rendered"
    with pytest.raises(NotFoundError) as unknown:
        client.chat.completions.create(model="ft:tiny:org-customer::000000000000", messages=messages)
    assert unknown.value.code == "model_not_found"


def test_an_error_names_the_field_that_its_request_has(client: Any) -> None:
    form = {"type": "json_schema", "name": "x", "schema": {"type": "nothing"}}
    for endpoint, param, ask in (
        (client.completions, "prompt", {"prompt": ""}),
        (client.completions, "prompt", {"prompt": "x" * 300}),
        (client.responses, "input", {"input": "x" * 300}),
        (client.responses, "text.format", {"input": "x", "text": {"format": form}}),
    ):
        with pytest.raises(BadRequestError) as refused:
            endpoint.create(model="tiny", **ask)
        assert refused.value.param == param


def test_what_is_null_is_not_asked_for(client: Any) -> None:
    messages = [{"role": "user", "content": "x"}]
    unset: Any = {"reasoning_effort": None, "modalities": None, "verbosity": None}
    assert client.chat.completions.create(model="tiny", messages=messages, max_tokens=1, **unset).choices
    assert client.responses.create(model="tiny", input="x", max_output_tokens=1, reasoning=None).output
    with pytest.raises(BadRequestError) as refused:
        client.chat.completions.create(model="tiny", messages=messages, reasoning_effort="low")
    assert (refused.value.code, refused.value.param) == ("extra_forbidden", "reasoning_effort")


def test_a_reply_has_the_form_that_is_asked_for(client: Any, models: list[str]) -> None:
    properties = {"color": {"enum": ["red", "blue"]}, "large": {"type": "boolean"}}
    schema = {"type": "object", "properties": properties, "required": ["color", "large"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "thing", "strict": True, "schema": schema}}
    ask = {"model": models[0], "messages": [{"role": "user", "content": "Hello"}], "response_format": form}
    found = client.chat.completions.create(**ask, max_tokens=100, n=2, temperature=1, seed=1)
    for choice in found.choices:
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content), schema)
    text = {"format": {"type": "json_schema", "name": "thing", "schema": schema}}
    answer = client.responses.create(model=models[0], input="Hello", text=text, max_output_tokens=100)
    jsonschema.validate(json.loads(answer.output_text), schema)


def test_a_response_says_the_same(client: Any, models: list[str]) -> None:
    ask = {"model": models[0], "temperature": 0}
    chat = client.chat.completions.create(
        **ask,
        max_tokens=20,
        messages=[{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hello"}],
    )
    whole = client.responses.create(**ask, instructions="Be short.", input="Hello", max_output_tokens=20)
    assert whole.output_text == chat.choices[0].message.content
    assert whole.status == ("incomplete" if chat.choices[0].finish_reason == "length" else "completed")
    parts = [{"role": "user", "content": [{"type": "input_text", "text": "Hello"}]}]
    events = list(
        client.responses.create(**ask, instructions="Be short.", input=parts, max_output_tokens=20, stream=True)
    )
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert events[-1].response.usage == whole.usage
    cut = {**ask, "input": "Hello", "max_output_tokens": 1}
    streamed = client.responses.create(**cut, stream=True)
    items = [each.item for each in streamed if each.type == "response.output_item.done"]
    for said in (*items, *client.responses.create(**cut).output):
        assert said.status == "incomplete"
    with pytest.raises(BadRequestError) as kept:
        client.responses.create(**ask, input="Hello", previous_response_id="resp_1")
    assert (kept.value.code, kept.value.param) == ("unsupported_parameter", "previous_response_id")


def test_the_dashboard_asks_a_model_and_its_base_model(served_lab: Lab, client: Any, models: list[str]) -> None:
    own, unknown = models[0], "ft:tiny:org-customer::nothing"
    with httpx2.Client(base_url=served_lab.url.removesuffix("/v1"), follow_redirects=True, timeout=120) as browser:
        browser.post("/sign-in", data={"key": served_lab.key()})
        page = browser.get("/chat", params={"model": own}).text
        form = {"form_token": re.findall(r'name="form_token" value="(\w+)"', page)[0], "question": QUESTIONS[0]}
        answered = browser.post("/chat", data=form | {"model": own}).text
        refused = browser.post("/chat", data=form | {"model": unknown}).text
    asked = {"messages": [{"role": "user", "content": QUESTIONS[0]}], "temperature": 0, "max_tokens": 256}
    for model in ("tiny", own):
        text = client.chat.completions.create(model=model, **asked).choices[0].message.content
        assert f"<code>{escape(model)}</code>" in answered
        assert (str(escape(text)) if text else "(nothing)") in answered
    assert "does not exist" in refused

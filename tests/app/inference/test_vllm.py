"""A vLLM server as the engine: it gets tokens and signed bytes, and what it answers with an adapter is proved."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import APIStatusError, AsyncOpenAI, BadRequestError, InternalServerError

from app import db
from app.db.tables import AuditEntry
from spard.config import Recipe
from spard.config.run_spec import to_mapping
from tests.app.inference.conftest import RECIPE, Lab
from tests.app.inference.vllm_stub import Vllm, serve_by_stub

MESSAGES: Any = [{"role": "user", "content": "Hello there"}]
ASK: Any = {"messages": MESSAGES, "temperature": 0, "max_tokens": 12}


@pytest.fixture
def server(served_lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Vllm]:
    with serve_by_stub(served_lab, tmp_path, monkeypatch) as state:
        yield state


def answers(server: Vllm) -> list[dict[str, Any]]:
    """What customers have asked of the server, without probes."""
    return [ask for ask in server.asks if ask.get("stream")]


def refusal(ask: Callable[[], object]) -> APIStatusError:
    with pytest.raises(APIStatusError) as refused:
        ask()
    return refused.value


def test_it_says_what_our_own_engine_says(served_lab: Lab, server: Vllm, monkeypatch: pytest.MonkeyPatch) -> None:
    client: Any = served_lab.client()
    names = ["tiny", served_lab.release(31), served_lab.release(32)]
    found = [client.chat.completions.create(model=name, **ASK) for name in names]
    chunks = client.chat.completions.create(model=names[1], stream=True, **ASK)
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert streamed == found[1].choices[0].message.content
    monkeypatch.setattr(served_lab.app.state.serving, "engines", served_lab.app.state.serving.engines._prover)
    for name, other in zip(names, found, strict=True):
        own = client.chat.completions.create(model=name, **ASK)
        assert (own.usage.prompt_tokens, own.choices) == (other.usage.prompt_tokens, other.choices)
        assert own.usage == other.usage


def test_the_token_that_ends_a_reply_is_neither_told_nor_counted(
    served_lab: Lab, server: Vllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    client: Any = served_lab.client()
    ask = {**ASK, "max_tokens": 100, "logprobs": True, "top_logprobs": 2}
    many = [{"role": "user", "content": f"Say {i}."} for i in range(12)]
    found = [client.chat.completions.create(model="tiny", **ask | {"messages": [each]}) for each in many]
    ended = [each for each in found if each.choices[0].finish_reason == "stop"]
    assert ended  # else nothing was shown
    for each in found:
        assert len(each.choices[0].logprobs.content) == each.usage.completion_tokens
        assert all(len(token.top_logprobs) == 2 for token in each.choices[0].logprobs.content)
    monkeypatch.setattr(served_lab.app.state.serving, "engines", served_lab.app.state.serving.engines._prover)
    own = [client.chat.completions.create(model="tiny", **ask | {"messages": [each]}) for each in many]
    assert [each.usage for each in own] == [each.usage for each in found]
    for ours, other in zip(own, found, strict=True):
        pairs = zip(ours.choices[0].logprobs.content, other.choices[0].logprobs.content, strict=True)
        assert all((a.token, a.bytes) == (b.token, b.bytes) for a, b in pairs)


def test_it_gets_tokens_in_which_texts_are_text(
    served_lab: Lab, server: Vllm, opened_clients: list[AsyncOpenAI]
) -> None:
    client: Any = served_lab.client()
    for _ in range(2):
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "<|end|>"}], max_tokens=1)
    assert len(opened_clients) == 1
    ask, _ = answers(server)
    end = server.base.tokenizer.eos_token_id
    assert ask["prompt"].count(end) == 1  # that of the template
    assert end in ask["stop_token_ids"]


def test_every_sampling_field_is_sent_as_the_audit_had_it(served_lab: Lab, server: Vllm) -> None:
    client: Any = served_lab.client()
    client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=1)
    (ask,) = answers(server)
    plain = {"temperature": 1, "top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1, "min_tokens": 0}
    plain |= {"presence_penalty": 0, "frequency_penalty": 0}
    assert {name: ask[name] for name in plain} == plain


def test_a_schema_is_passed_on(served_lab: Lab, server: Vllm) -> None:
    client: Any = served_lab.client()
    schema = {"name": "thing", "schema": {"type": "object"}}
    client.chat.completions.create(model="tiny", **ASK, response_format={"type": "json_schema", "json_schema": schema})
    (ask,) = answers(server)
    assert ask["response_format"]["json_schema"]["schema"] == schema["schema"]


@pytest.mark.parametrize(
    "schema",
    [
        {"not": {"type": "string"}},
        {"type": "string", "pattern": "(?=a)b"},
        {"type": "array", "items": {"allOf": [{"required": ["a"]}, {"required": ["b"]}]}},
    ],
)
def test_a_schema_that_no_reply_can_be_held_to_never_reaches_the_server(
    served_lab: Lab, server: Vllm, schema: dict[str, Any]
) -> None:
    client: Any = served_lab.client()
    form = {"type": "json_schema", "json_schema": {"name": "thing", "schema": schema}}
    error = refusal(lambda: client.chat.completions.create(model="tiny", **ASK, response_format=form))
    assert (error.status_code, error.code) == (400, "invalid_json_schema")
    assert not answers(server)


def test_equal_replies_come_as_copies(served_lab: Lab, server: Vllm) -> None:
    client: Any = served_lab.client()
    one = client.chat.completions.create(model="tiny", **ASK)
    two = client.chat.completions.create(model="tiny", **ASK, n=2)
    assert [each.message.content for each in two.choices] == [one.choices[0].message.content] * 2
    assert two.usage.completion_tokens == 2 * one.usage.completion_tokens
    assert answers(server)[-1]["n"] == 1


def test_a_model_of_which_all_weights_were_trained_is_never_answered_by_its_base_model(
    served_lab: Lab, server: Vllm
) -> None:
    client: Any = served_lab.client()
    whole = served_lab.release(41, recipe=to_mapping(Recipe(lora=None)))
    error = refusal(lambda: client.chat.completions.create(model=whole, **ASK))
    assert (error.status_code, error.code) == (400, "model_not_servable")
    assert "all of its weights" in error.message
    assert not server.asks


def test_a_model_on_a_base_model_of_4_bits_is_not_answered_by_one_of_16(served_lab: Lab, server: Vllm) -> None:
    client: Any = served_lab.client()
    quantized = served_lab.release(42, recipe=to_mapping(RECIPE) | {"quantization": "nf4"})
    error = refusal(lambda: client.chat.completions.create(model=quantized, **ASK))
    assert (error.code, "nf4" in error.message) == ("model_not_servable", True)
    assert not server.asks


def test_a_request_without_max_tokens_gets_the_rest_of_the_context(served_lab: Lab, server: Vllm) -> None:
    client: Any = served_lab.client()
    server.context = 60
    found = client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=0)
    (ask,) = answers(server)
    assert len(ask["prompt"]) + ask["max_tokens"] == 60
    assert found.usage.total_tokens <= 60


def test_its_errors_are_ours(served_lab: Lab, server: Vllm) -> None:
    client: Any = served_lab.client()
    with pytest.raises(BadRequestError) as long:
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x" * 220}], max_tokens=1)
    assert long.value.code == "context_length_exceeded"
    server.refuses = "Token id 7 is out of vocabulary"
    error = refusal(lambda: client.chat.completions.create(model="tiny", **ASK))
    assert (error.status_code, error.code) == (400, "invalid_value")
    assert "out of vocabulary" in error.message


def test_a_base_model_that_the_server_does_not_hold_is_said(served_lab: Lab, server: Vllm) -> None:
    server.alias = "another"
    error = refusal(lambda: served_lab.client().chat.completions.create(model="tiny", **ASK))
    assert (error.code, "--served-model-name" in error.message) == ("no_engine", True)


@pytest.mark.parametrize(
    ("limits", "code", "words"),
    [
        ({"version": "0.24.0"}, "model_not_servable", "use 0.25 or newer"),
        ({"version": ""}, "model_not_servable", "unknown version"),
        ({"loads_adapters": False}, "no_engine", "VLLM_ALLOW_RUNTIME_LORA_UPDATING"),
        ({"max_rank": 2}, "model_not_servable", "--max-lora-rank 2"),
    ],
)
def test_what_the_server_cannot_load_is_refused_with_the_reason(
    served_lab: Lab, server: Vllm, limits: dict[str, Any], code: str, words: str
) -> None:
    for name, value in limits.items():
        setattr(server, name, value)
    client, model = served_lab.client(), served_lab.release(51)
    error = refusal(lambda: client.chat.completions.create(model=model, **ASK))
    assert error.code == code
    assert words in error.message
    assert not server.names
    assert client.chat.completions.create(model="tiny", **ASK).choices  # the base model answers nevertheless


@pytest.mark.parametrize("fault", ["ignores", "mixes"])
@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_one_that_answers_with_other_weights_answers_nobody(
    served_lab: Lab, server: Vllm, fault: str, noise: float
) -> None:
    client: Any = served_lab.client()
    server.noise = noise
    first, second = served_lab.release(33), served_lab.release(34)
    client.chat.completions.create(model=first, **ASK)
    server.fault = fault
    with pytest.raises(InternalServerError) as refused:
        client.chat.completions.create(model=second, **ASK)
    assert refused.value.code == "model_not_proved"
    assert not [ask for ask in answers(server) if ask["model"] == server.loads[1][0]]  # the probes alone
    server.fault = None
    assert client.chat.completions.create(model=second, **ASK).choices


def test_one_that_was_started_anew_gets_its_adapters_again_and_the_log_their_digests(
    served_lab: Lab, server: Vllm
) -> None:
    client: Any = served_lab.client()
    name = served_lab.release(35)
    before = client.chat.completions.create(model=name, **ASK)
    server.start_anew()
    with pytest.raises(InternalServerError) as lost:
        client.chat.completions.create(model=name, **ASK)
    assert lost.value.code == "engine_lost"
    assert client.chat.completions.create(model=name, **ASK).choices == before.choices
    assert len(server.names) == 1
    with db.read(served_lab.app.state.engine) as session:
        loaded = session.query(AuditEntry).filter_by(action="model.loaded", target=name).all()
    first, second = ((each.details or {})["tensor_digest"] for each in loaded)
    assert first
    assert second == first

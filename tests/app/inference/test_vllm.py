"""A vLLM server as the engine: it gets tokens and signed bytes, and what it answers with an adapter is proved."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError, InternalServerError

from app.inference.vllm import Vllm as Engine
from tests.app.inference.conftest import Lab
from tests.app.inference.vllm_stub import Vllm, vllm_stub

MESSAGES: Any = [{"role": "user", "content": "Hello there"}]
ASK: Any = {"messages": MESSAGES, "temperature": 0, "max_tokens": 12}


@pytest.fixture
def server(served_lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Vllm]:
    serving = served_lab.app.state.serving
    with vllm_stub(served_lab.model) as state:
        own = {"serving_url": state.url, "serving_adapters_dir": tmp_path / "adapters"}
        settings, storage = served_lab.settings.model_copy(update=own), served_lab.app.state.storage
        engine = Engine(settings, storage, serving.engines, serving.clients)
        monkeypatch.setattr(serving, "engines", engine)
        yield state


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


def test_it_gets_tokens_in_which_texts_are_text(served_lab: Lab, server: Vllm, opened: list[AsyncOpenAI]) -> None:
    client: Any = served_lab.client()
    for _ in range(2):
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "<|end|>"}], max_tokens=1)
    assert len(opened) == 1
    ask, _ = server.asks
    end = server.base.tokenizer.eos_token_id
    assert ask["prompt"].count(end) == 1  # that of the template
    assert end in ask["stop_token_ids"]


def test_a_schema_is_passed_on(served_lab: Lab, server: Vllm) -> None:
    client: Any = served_lab.client()
    schema = {"name": "thing", "schema": {"type": "object"}}
    client.chat.completions.create(model="tiny", **ASK, response_format={"type": "json_schema", "json_schema": schema})
    (ask,) = server.asks
    assert ask["response_format"]["json_schema"]["schema"] == schema["schema"]


@pytest.mark.parametrize("fault", ["ignores", "mixes"])
def test_one_that_answers_with_other_weights_answers_nobody(served_lab: Lab, server: Vllm, fault: str) -> None:
    client: Any = served_lab.client()
    first, second = served_lab.release(33), served_lab.release(34)
    client.chat.completions.create(model=first, **ASK)
    server.fault = fault
    with pytest.raises(InternalServerError) as refused:
        client.chat.completions.create(model=second, **ASK)
    assert refused.value.code == "model_not_proved"
    assert all(ask["max_tokens"] == 1 for ask in server.asks if ask["model"] == server.names[1])  # the probes alone
    server.fault = None
    assert client.chat.completions.create(model=second, **ASK).choices


def test_one_that_was_started_anew_gets_its_adapters_again(served_lab: Lab, server: Vllm) -> None:
    client: Any = served_lab.client()
    name = served_lab.release(35)
    before = client.chat.completions.create(model=name, **ASK)
    server.names.clear()
    with pytest.raises(InternalServerError) as lost:
        client.chat.completions.create(model=name, **ASK)
    assert lost.value.code == "engine_lost"
    assert client.chat.completions.create(model=name, **ASK).choices == before.choices
    assert len(server.names) == 1


def test_its_errors_are_ours(served_lab: Lab, server: Vllm) -> None:
    client: Any = served_lab.client()
    with pytest.raises(BadRequestError) as long:
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x" * 220}], max_tokens=1)
    assert long.value.code == "context_length_exceeded"

"""A moderation endpoint that a policy names is asked about what comes in and what goes out."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError, InternalServerError, NotFoundError

from app import db
from app.db.tables import ApiKey, InferenceCall
from app.inference.engine_process import Stream
from app.inference.protocol import Ask, Proof
from app.inference.released import ReleasedModel
from app.policies import service as policies
from app.policies.schemas import Policy
from tests.app.inference.conftest import Lab, serve_lab

BAD = "placeholder of harm"


class Echo:
    """An engine that says what it is asked, word by word."""

    async def start(self, model: ReleasedModel, project: str, ask: Ask) -> tuple[Stream, int, Proof | None]:
        stream, words = Stream(1, lambda number: None), (ask["messages"] or [])[-1]["content"] or ""
        parts = words.removeprefix("say: ").split(" ")
        for i, word in enumerate(parts, 1):
            end: Any = "stop" if i == len(parts) else None
            stream.put({"kind": "piece", "id": 1, "index": 0, "text": f"{word} ", "reply_tokens": i, "finish": end})
        stream.put({"kind": "done", "id": 1, "reply_tokens": len(parts)})
        return stream, 1, None

    def close(self) -> None:
        """Nothing runs."""


@pytest.fixture
def moderation() -> Iterator[str]:
    """An endpoint that flags one phrase."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            texts = body["input"] if isinstance(body["input"], list) else [body["input"]]
            results = [{"flagged": BAD in text, "categories": {}, "category_scores": {}} for text in texts]
            data = json.dumps({"id": "m", "model": body["model"], "results": results}).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{http.server_port}/v1"
    http.shutdown()
    http.server_close()
    thread.join()


@pytest.fixture
def client(served_lab: Lab, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(served_lab.app.state.serving, "engines", Echo())
    yield served_lab.client("org-guarded")
    set_guard(served_lab, None)


def set_guard(lab: Lab, rule: dict[str, object] | None) -> None:
    with db.transaction(lab.app.state.engine) as session:
        key = session.query(ApiKey).first()
        assert key
        policies.add(session, key.id, Policy.model_validate({"serving": {"guard": rule}}))


def ask(client: Any, text: str, **more: Any) -> Any:
    return client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": text}], **more)


def test_what_it_flags_is_neither_asked_nor_shown(served_lab: Lab, client: Any, moderation: str) -> None:
    set_guard(served_lab, {"base_url": moderation})
    assert ask(client, "Hello there").choices[0].message.content == "Hello there "
    with pytest.raises(BadRequestError) as refused:
        ask(client, BAD)
    assert refused.value.code == "content_filter"
    set_guard(served_lab, {"base_url": moderation, "input": False})
    choice = ask(client, f"say: {BAD}").choices[0]
    assert (choice.message.content, choice.finish_reason) == ("", "content_filter")
    chunks = [chunk.choices[0] for chunk in ask(client, BAD, stream=True)]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == ""
    assert chunks[-1].finish_reason == "content_filter"
    with db.read(served_lab.app.state.engine) as session:
        calls = session.query(InferenceCall).filter_by(project_id="org-guarded").order_by(InferenceCall.created_at)
        assert [call.status for call in calls][:3] == ["done", "content_filter", "content_filter"]


FUNCTION = {"name": "look_up", "description": "Look a word up.", "parameters": {"type": "object"}}
ESCAPED = json.dumps({"word": BAD}).replace("harm", "\\u0068arm")
TURN = {"role": "user", "content": "Hello there"}
CALL = {"id": "1", "type": "function", "function": {"name": "look_up", "arguments": ESCAPED}}
PARAMETERS = {"properties": {BAD: {"type": "string"}}}
SCHEMA = {"name": "a", "schema": {"const": BAD}}
PLACES: dict[str, dict[str, Any]] = {
    "a tool's description": {"tools": [{"type": "function", "function": FUNCTION | {"description": BAD}}]},
    "a tool's parameters": {"tools": [{"type": "function", "function": FUNCTION | {"parameters": PARAMETERS}}]},
    "the arguments of a call": {"messages": [{"role": "assistant", "content": "", "tool_calls": [CALL]}, TURN]},
    "a name": {"messages": [TURN | {"name": BAD}, TURN]},
    "the form of the reply": {"response_format": {"type": "json_schema", "json_schema": SCHEMA}},
}


@pytest.mark.parametrize("more", PLACES.values(), ids=PLACES)
def test_all_that_the_model_is_told_is_looked_at(
    more: dict[str, Any], served_lab: Lab, client: Any, moderation: str
) -> None:
    set_guard(served_lab, {"base_url": moderation, "output": False})
    with pytest.raises(BadRequestError) as refused:
        client.chat.completions.create(**{"model": "tiny", "messages": [TURN], **more})
    assert refused.value.code == "content_filter"


def test_without_its_answer_there_is_none(served_lab: Lab, client: Any) -> None:
    set_guard(served_lab, {"base_url": "http://127.0.0.1:9/v1"})
    with pytest.raises(InternalServerError) as away:
        ask(client, "Hello there")
    assert away.value.code == "guard_unavailable"


def test_moderations_are_passed_on(served_lab: Lab, client: Any, moderation: str) -> None:
    with pytest.raises(NotFoundError) as none:
        client.moderations.create(input="Hello there")
    assert none.value.code == "no_guard"
    set_guard(served_lab, {"base_url": moderation, "model": "one"})
    found = client.moderations.create(input=["Hello there", BAD])
    assert ([result.flagged for result in found.results], found.model) == ([False, True], "one")


def test_all_requests_use_one_client_which_ends_with_the_service(
    tiny_model: Path, tmp_path: Path, moderation: str, opened_clients: list[AsyncOpenAI]
) -> None:
    with serve_lab(tmp_path / "own", tiny_model) as lab:
        lab.app.state.serving.engines = Echo()
        client: Any = lab.client()
        set_guard(lab, {"base_url": moderation})
        assert [ask(client, "Hello there").choices[0].finish_reason for _ in range(2)] == ["stop", "stop"]
        assert client.moderations.create(input="Hello there").results
        assert [each.is_closed() for each in opened_clients] == [False]
    assert [each.is_closed() for each in opened_clients] == [True]

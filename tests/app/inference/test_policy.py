"""What a policy says of replies: servers that prove nothing, texts that are kept, and audits of an earlier version."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import httpx2
import pytest
from openai import AsyncOpenAI, InternalServerError, NotFoundError
from pydantic import SecretStr

from app import db, retention
from app.db.base import utc_now
from app.db.tables import ApiKey, InferenceCall, Job, JobStatus, StoredReply
from app.inference.unattested import UnattestedEngines
from app.jobs import erasure
from app.policies import service as policies
from app.policies.schemas import Policy
from spard.release.version import AUDIT_VERSION
from tests.app.inference.conftest import PASSED, Lab
from tests.app.inference.test_streams import wait_until

MESSAGES: Any = [{"role": "user", "content": "Hello there"}]
ASK: Any = {"messages": MESSAGES, "temperature": 0, "max_tokens": 6}


@pytest.fixture
def serving(served_lab: Lab) -> Iterator[Any]:
    """Put a policy in force whose `serving` is as said; none after the test."""

    def put(**serving: Any) -> None:
        with db.transaction(served_lab.app.state.engine) as session:
            key = session.query(ApiKey).first()
            assert key
            policies.add(session, key.id, Policy.model_validate({"serving": serving}))

    served_lab.key()
    yield put
    put()


def stored_replies(lab: Lab, model: str) -> list[StoredReply]:
    with db.read(lab.app.state.engine) as session:
        return session.query(StoredReply).filter_by(model=model).order_by(StoredReply.created_at).all()


def get(lab: Lab, path: str, *scopes: str) -> httpx2.Response:
    headers = {"authorization": f"Bearer {lab.key('org-customer', *scopes)}"}
    return httpx2.get(f"{lab.url}{path}", headers=headers, timeout=60)


def model_job(lab: Lab, model: str) -> str:
    with db.read(lab.app.state.engine) as session:
        return session.query(Job).filter_by(fine_tuned_model=model).one().id


def test_nothing_is_stored_unless_a_policy_says_so(served_lab: Lab) -> None:
    name = served_lab.release(41)
    served_lab.client().chat.completions.create(model=name, **ASK)
    assert stored_replies(served_lab, name) == []


def test_texts_are_stored_as_they_were_shown_until_they_expire(served_lab: Lab, serving: Any) -> None:
    client, name = served_lab.client(), served_lab.release(42)
    serving(store={"days": 3})
    raw = client.chat.completions.with_raw_response.create(model=name, **ASK)
    assert raw.headers["x-spard-stored-days"] == "3"
    whole = raw.parse()
    chunks = client.chat.completions.create(model=name, stream=True, **ASK)
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    wait_until(lambda: len(stored_replies(served_lab, name)) == 2)  # a stream's row follows its last event
    rows = stored_replies(served_lab, name)
    assert [row.replies for row in rows] == [[whole.choices[0].message.content], [streamed]]
    assert all(row.prompt == MESSAGES and row.expires_at - row.created_at > timedelta(days=2.9) for row in rows)
    path = "/admin/projects/org-customer/stored_replies"
    listed = get(served_lab, path, "customer", "admin").json()["data"]
    assert {each["id"] for each in listed} >= {row.id for row in rows}
    assert get(served_lab, path).status_code == 403
    with db.transaction(served_lab.app.state.engine) as session:
        session.get_one(StoredReply, rows[0].id).expires_at = utc_now() - timedelta(seconds=1)
    begin = partial(db.transaction, served_lab.app.state.engine)
    retention.sweep(served_lab.app.state.storage, begin)
    assert [row.id for row in stored_replies(served_lab, name)] == [rows[1].id]


def test_they_go_with_their_job_and_with_all_of_their_project(served_lab: Lab, serving: Any) -> None:
    client, names = served_lab.client(), [served_lab.release(seed) for seed in (43, 44)]
    serving(store={"days": 3})
    for name in names:
        client.chat.completions.create(model=name, **ASK)
    begin = partial(db.transaction, served_lab.app.state.engine)
    erasure.erase(
        served_lab.app.state.storage, begin, "org-customer", model_job(served_lab, names[0]), include_files=False
    )
    assert (len(stored_replies(served_lab, names[0])), len(stored_replies(served_lab, names[1]))) == (0, 1)
    headers = {"authorization": f"Bearer {served_lab.key('org-customer', 'customer', 'admin')}"}
    gone = httpx2.delete(f"{served_lab.url}/admin/projects/org-customer/stored_replies", headers=headers)
    assert gone.json()["deleted"] >= 1
    assert stored_replies(served_lab, names[1]) == []


@pytest.fixture
def other(served_lab: Lab, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A server of OpenAI's form that knows one model: this service, asked for its base model."""
    settings = served_lab.settings.model_copy(
        update={"unattested_api_key": SecretStr(served_lab.key()), "unattested_urls": (served_lab.url,)}
    )
    serving = served_lab.app.state.serving
    monkeypatch.setattr(serving, "_unattested", UnattestedEngines(settings, serving.clients))
    return {"base_url": served_lab.url, "served_as": "tiny"}


def test_a_server_that_proves_nothing_answers_where_a_policy_names_it(
    served_lab: Lab, serving: Any, other: dict[str, str]
) -> None:
    client, name = served_lab.client(), served_lab.release(45)
    base, own = (client.chat.completions.create(model=each, logprobs=True, **ASK) for each in ("tiny", name))
    serving(unattested=[{"model": name, **other}])
    found = client.chat.completions.with_raw_response.create(model=name, logprobs=True, **ASK)
    assert found.headers["x-spard-attested"] == "false"
    assert found.parse().choices == base.choices != own.choices
    assert found.parse().usage == base.usage
    chunks = client.chat.completions.with_raw_response.create(model=name, stream=True, **ASK)
    assert chunks.headers["x-spard-attested"] == "false"
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks.parse() if chunk.choices)
    assert streamed == base.choices[0].message.content
    text: Any = {"prompt": "Hello", "temperature": 0, "max_tokens": 6}
    assert (
        client.completions.create(model=name, **text).choices == client.completions.create(model="tiny", **text).choices
    )
    with db.read(served_lab.app.state.engine) as session:
        calls = session.query(InferenceCall).filter_by(model=name).order_by(InferenceCall.created_at)
        assert [call.is_attested for call in calls] == [True, False, False, False]


def test_all_requests_to_a_server_use_one_client(
    served_lab: Lab, serving: Any, other: dict[str, str], opened_clients: list[AsyncOpenAI]
) -> None:
    name = served_lab.release(51)
    serving(unattested=[{"model": name, **other, "base_url": f"{other['base_url']}/"}])
    for _ in range(2):
        assert served_lab.client().chat.completions.create(model=name, **ASK).choices
    assert len(opened_clients) == 1


def test_one_that_is_away_is_said_to_be(served_lab: Lab, serving: Any, other: dict[str, str]) -> None:
    serving(unattested=[{"model": "tiny", "base_url": "http://127.0.0.1:9/v1", "served_as": "tiny"}])
    with pytest.raises(InternalServerError) as away:
        served_lab.client().chat.completions.create(model="tiny", **ASK)
    assert away.value.code == "engine_lost"


def test_an_answer_in_no_known_form_ends_with_an_error(served_lab: Lab, serving: Any, other: dict[str, str]) -> None:
    choice = {"index": 7, "delta": {"content": "for nobody"}, "finish_reason": None}

    class Odd(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.end_headers()
            self.wfile.write(f"data: {json.dumps({'id': 'x', 'choices': [choice]})}\n\ndata: [DONE]\n\n".encode())

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Odd) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}/v1"
        serving(unattested=[{"model": "tiny", "base_url": url, "served_as": "tiny"}])
        with pytest.raises(InternalServerError) as odd:
            served_lab.client().chat.completions.create(model="tiny", timeout=60, **ASK)
        server.shutdown()
    assert odd.value.code == "engine_lost"


def test_numbers_that_are_zero_reach_it(served_lab: Lab, serving: Any, other: dict[str, str]) -> None:
    bodies: list[dict[str, Any]] = []

    class Recording(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(500)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    zero: Any = {"seed": 0, "temperature": 0, "presence_penalty": 0, "frequency_penalty": 0}
    with ThreadingHTTPServer(("127.0.0.1", 0), Recording) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}/v1"
        serving(unattested=[{"model": "tiny", "base_url": url, "served_as": "tiny"}])
        client = served_lab.client()
        with pytest.raises(InternalServerError):
            client.chat.completions.create(
                model="tiny", messages=ASK["messages"], logprobs=True, top_logprobs=0, **zero
            )
        with pytest.raises(InternalServerError):
            client.completions.create(model="tiny", prompt="Hello", logprobs=0, **zero)
        server.shutdown()
    chat, text = bodies[0], bodies[-1]
    assert all(body.items() >= zero.items() for body in (chat, text))
    assert (chat["logprobs"], chat["top_logprobs"], text["logprobs"]) == (True, 0, 0)


def test_listings_mark_it_and_no_other(served_lab: Lab, serving: Any, other: dict[str, str]) -> None:
    name = served_lab.release(46)
    assert "attested" not in get(served_lab, f"/models/{name}").json()
    serving(unattested=[{"model": name, **other}])
    assert get(served_lab, f"/models/{name}").json()["attested"] is False
    marked = [each["id"] for each in get(served_lab, "/models").json()["data"] if "attested" in each]
    assert marked == [name]


def test_it_answers_for_nothing_that_is_not_released(served_lab: Lab, serving: Any, other: dict[str, str]) -> None:
    held = served_lab.release(47, status=JobStatus.failed, fine_tuned_model=None)
    serving(unattested=[{"model": held, **other}])
    with pytest.raises(NotFoundError) as unknown:
        served_lab.client().chat.completions.create(model=held, **ASK)
    assert unknown.value.code == "model_not_found"


def test_older_audits_are_marked_or_withheld(served_lab: Lab, serving: Any) -> None:
    client, older = served_lab.client(), served_lab.release(48)
    newer = served_lab.release(49, safety={**PASSED, "audit_version": AUDIT_VERSION})
    assert get(served_lab, f"/models/{older}").json()["older_audit"] == 1
    assert "older_audit" not in get(served_lab, f"/models/{newer}").json()
    assert client.chat.completions.create(model=older, **ASK).choices
    checkpoint = served_lab.release_checkpoint(50, "org-customer", "pass")
    assert get(served_lab, f"/models/{checkpoint}").json()["older_audit"] == 1
    serving(older_audits="withhold")
    assert get(served_lab, f"/models/{checkpoint}").status_code == 404
    with pytest.raises(NotFoundError) as unknown:
        client.chat.completions.create(model=older, **ASK)
    assert (unknown.value.code, str(older) in str(unknown.value)) == ("model_not_found", True)
    assert get(served_lab, f"/models/{older}").status_code == 404
    assert older not in [each["id"] for each in get(served_lab, "/models").json()["data"]]
    paths = {name: f"/fine_tuning/jobs/{model_job(served_lab, name)}/adapter" for name in (older, newer)}
    assert [get(served_lab, paths[name]).status_code for name in (older, newer)] == [404, 200]
    assert client.chat.completions.create(model=newer, **ASK).choices

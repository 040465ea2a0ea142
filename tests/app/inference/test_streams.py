"""A reply under way ends when its model is no longer released, and the engine stops when nobody listens."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from threading import Event
from typing import Any

import httpx2
import pytest
from openai import APIError, OpenAI
from sqlalchemy import select

from app import db
from app.db.tables import ApiKey, DeletedModel, InferenceCall, Job
from app.inference import service
from app.inference.call_leases import Entry
from app.inference.engine_process import Stream
from app.inference.protocol import Ask, Proof
from app.inference.released import ReleasedModel
from app.policies import service as policies
from app.policies.schemas import Policy
from tests.app.inference.conftest import Clock, Lab

WAIT_S = 60
MESSAGES: Any = [{"role": "user", "content": "Hello there"}]


class Endless:
    """An engine that writes a word every few milliseconds until it is told to stop."""

    def __init__(self) -> None:
        self.stopped = Event()

    async def start(self, model: ReleasedModel, project: str, ask: Ask) -> tuple[Stream, int, Proof | None]:
        stream = Stream(1, lambda number: self.stopped.set())
        self._task = asyncio.create_task(self._write(stream))
        return stream, 3, None

    async def _write(self, stream: Stream) -> None:
        written = 0
        while not self.stopped.is_set():
            written += 1
            stream.put({"kind": "piece", "id": 1, "index": 0, "text": "on ", "reply_tokens": written, "finish": None})
            await asyncio.sleep(0.005)


@pytest.fixture
def endless(served_lab: Lab, monkeypatch: pytest.MonkeyPatch) -> Iterator[Endless]:
    engine = Endless()
    monkeypatch.setattr(served_lab.app.state.serving, "engines", engine)
    yield engine
    set_paused(served_lab, [])


@pytest.fixture(scope="module")
def model(served_lab: Lab) -> str:
    return served_lab.release(9)


def set_paused(lab: Lab, names: list[str]) -> None:
    with db.transaction(lab.app.state.engine) as session:
        key = session.query(ApiKey).first()
        assert key
        policies.add(session, key.id, Policy.model_validate({"serving": {"paused": names}}))


def pause(lab: Lab, model: str) -> None:
    set_paused(lab, [model])


def pause_its_base(lab: Lab, model: str) -> None:
    set_paused(lab, ["tiny"])


def delete(lab: Lab, model: str) -> None:
    with db.transaction(lab.app.state.engine) as session:
        session.add(DeletedModel(job_id=session.query(Job).filter_by(fine_tuned_model=model).one().id))


def calls(lab: Lab, model: str) -> list[InferenceCall]:
    with db.read(lab.app.state.engine) as session:
        mine = InferenceCall.model == model
        return list(session.scalars(select(InferenceCall).where(mine).order_by(InferenceCall.created_at)))


def wait_until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.01)


def read_all(stream: Any) -> None:
    end = time.monotonic() + WAIT_S
    for _ in stream:
        assert time.monotonic() < end


@pytest.mark.parametrize("act", [pause, pause_its_base, delete])
def test_a_stream_ends_with_an_error(served_lab: Lab, endless: Endless, act: Callable[[Lab, str], None]) -> None:
    model = served_lab.release(9)
    stream = served_lab.client().chat.completions.create(model=model, messages=MESSAGES, stream=True)
    next(iter(stream))
    act(served_lab, model)
    with pytest.raises(APIError) as ended:
        for _ in stream:
            pass
    assert (ended.value.code, str(ended.value)) == ("model_not_found", f"The model '{model}' does not exist.")
    assert endless.stopped.wait(WAIT_S)
    wait_until(lambda: [call.status for call in calls(served_lab, model)] == ["model_not_found"])


def test_a_stream_ends_with_the_waiver(served_lab: Lab, endless: Endless, clock: Clock) -> None:
    model = served_lab.release(9, safety=clock.waiver(hours=1))
    stream = served_lab.client().chat.completions.create(model=model, messages=MESSAGES, stream=True)
    next(iter(stream))
    clock.ahead = timedelta(hours=2)
    with pytest.raises(APIError) as ended:
        for _ in stream:
            pass
    assert ended.value.code == "model_not_found"


def test_a_look_that_fails_ends_a_stream_and_is_not_the_last(
    served_lab: Lab, endless: Endless, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*of_reply: object) -> None:
        raise ValueError("a policy of a newer version")

    model = served_lab.release(9)
    for code in ("unavailable", "model_not_found"):
        endless.stopped.clear()
        stream = served_lab.client().chat.completions.create(model=model, messages=MESSAGES, stream=True)
        next(iter(stream))
        with monkeypatch.context() as patch:
            if code == "unavailable":
                patch.setattr(service, "check_again", fails)
            else:
                pause(served_lab, model)
            with pytest.raises(APIError) as ended:
                read_all(stream)
        assert ended.value.code == code


def test_the_look_comes_more_often_than_every_second() -> None:
    assert service.LOOK_S <= 0.5


def test_a_whole_reply_is_not_given_either(served_lab: Lab, endless: Endless) -> None:
    model = served_lab.release(9)
    start = endless.start

    async def paused_meanwhile(model: ReleasedModel, project: str, ask: Ask) -> tuple[Stream, int, Proof | None]:
        found = await start(model, project, ask)
        await asyncio.to_thread(pause, served_lab, model.name)
        return found

    endless.start = paused_meanwhile  # type: ignore[method-assign]
    with pytest.raises(APIError) as ended:
        served_lab.client().chat.completions.create(model=model, messages=MESSAGES)
    assert ended.value.code == "model_not_found"


def test_the_engine_stops_when_the_client_leaves(served_lab: Lab, endless: Endless, model: str) -> None:
    client: OpenAI = served_lab.client()
    with client.chat.completions.create(model=model, messages=MESSAGES, stream=True) as stream:
        next(iter(stream))
    assert endless.stopped.wait(WAIT_S)
    wait_until(lambda: calls(served_lab, model)[-1].status == "client_gone")
    assert calls(served_lab, model)[-1].reply_tokens > 0


def test_it_stops_when_who_waits_for_a_whole_reply_leaves(served_lab: Lab, endless: Endless, model: str) -> None:
    client = served_lab.client().with_options(timeout=0.5, max_retries=0)
    with pytest.raises(APIError):
        client.chat.completions.create(model=model, messages=MESSAGES)
    assert endless.stopped.wait(WAIT_S)
    wait_until(lambda: calls(served_lab, model)[-1].status == "client_gone")


@pytest.mark.parametrize("stream", [True, False])
def test_tokens_are_counted_as_they_leave(served_lab: Lab, monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    noted: dict[str, list[int]] = {}  # by the call, for the call of an earlier test may end only now
    closed: set[str] = set()
    store, close = Entry.note_sent, Entry.close

    def note_sent(entry: Entry, tokens: int) -> None:
        noted.setdefault(entry.call_id, []).append(tokens)
        store(entry, tokens)

    def note_end(entry: Entry) -> None:
        close(entry)
        closed.add(entry.call_id)

    monkeypatch.setattr(Entry, "note_sent", note_sent)
    monkeypatch.setattr(Entry, "close", note_end)
    ask: Any = {"model": "tiny", "messages": MESSAGES, "max_tokens": 5, "temperature": 0, "stream": stream}
    answer = served_lab.client().chat.completions.create(**ask)
    if stream:
        list(answer)
    call = calls(served_lab, "tiny")[-1]
    wait_until(lambda: call.id in closed)
    counts = noted[call.id]
    assert counts == sorted(counts)
    assert counts[-1] == calls(served_lab, "tiny")[-1].reply_tokens > 0
    assert len(counts) > 1 if stream else len(counts) == 1


def test_replies_on_the_chat_page_are_counted_and_leave_no_entry(
    served_lab: Lab, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    counts: dict[str, int] = {}
    store = Entry.note_sent

    def note_sent(entry: Entry, tokens: int) -> None:
        counts[entry.call_id] = tokens
        store(entry, tokens)

    monkeypatch.setattr(Entry, "note_sent", note_sent)
    with httpx2.Client(base_url=served_lab.url.removesuffix("/v1"), follow_redirects=True, timeout=120) as browser:
        browser.post("/sign-in", data={"key": served_lab.key()})
        form = {"form_token": re.findall(r'name="form_token" value="(\w+)"', browser.get("/chat").text)[0]}
        assert browser.post("/chat", data=form | {"model": model, "question": "Hello there"}).status_code == 200
    rows = [calls(served_lab, name)[-1] for name in ("tiny", model)]
    wait_until(lambda: open_entries(served_lab).isdisjoint(row.id for row in rows))
    assert [counts[row.id] for row in rows] == [row.reply_tokens for row in rows]
    assert all(row.reply_tokens > 0 for row in rows)


def test_a_reply_whose_response_cannot_be_made_leaves_no_entry(
    served_lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(reply: object) -> dict[str, str]:
        raise RuntimeError("no headers")

    monkeypatch.setattr("app.inference.answers._marks", fail)
    for stream in (False, True):
        with pytest.raises(APIError):
            served_lab.client().chat.completions.create(
                model="tiny", messages=MESSAGES, max_tokens=3, temperature=0, stream=stream
            )
        wait_until(lambda: open_entries(served_lab).isdisjoint({calls(served_lab, "tiny")[-1].id}))


def open_entries(lab: Lab) -> set[str]:
    """The ids of the requests that have an entry in the ledger."""
    return {entry.call_id for entry in lab.app.state.serving.leases.ledger.entries()}

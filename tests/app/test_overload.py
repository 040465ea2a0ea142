"""What keeps one request's work from delaying all others, and what is answered when a process stops in the midst."""

from __future__ import annotations

import asyncio
import gc
import json
import sys
from collections.abc import Iterator
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest

from app.http.lanes import Lane
from app.http.middleware import Envelope
from app.jobs import stream
from app.jobs.stream import Cursor
from app.keys import Principal
from app.ops import lifecycle
from app.ops.metrics import RequestMetrics


@pytest.fixture
def own_collector() -> Iterator[None]:
    thresholds, interval = gc.get_threshold(), sys.getswitchinterval()
    gc.set_threshold(700, 10, 10)  # as Python starts, whatever the test session set
    yield
    gc.unfreeze()
    gc.set_threshold(*thresholds)
    sys.setswitchinterval(interval)


class Knot:
    """Something that only a collection frees: it holds itself."""

    def __init__(self, freed: list[bool]) -> None:
        self.itself, self.freed = self, freed

    def __del__(self) -> None:
        self.freed.append(True)


def test_the_oldest_objects_are_collected_at_fixed_times_only(
    own_collector: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    freed, begun = list[bool](), list[int]()
    monkeypatch.setattr(lifecycle, "_EVERY_S", 0.001)
    lifecycle.spare_requests()
    knot = Knot(freed)
    for generation in (0, 1):
        gc.collect(generation)  # now it is one of the oldest
    del knot
    note = lambda phase, info: begun.append(info["generation"]) if phase == "start" else None  # noqa: E731
    gc.callbacks.append(note)
    try:
        kept = [[i] for i in range(200_000)]
    finally:
        gc.callbacks.remove(note)
    assert max(begun) == 1
    assert not freed
    del kept
    stop = Event()
    collect = gc.collect

    def once() -> None:
        collect()
        stop.set()

    monkeypatch.setattr(gc, "collect", once)
    lifecycle.collect_garbage(stop)
    assert freed


def test_a_process_that_spares_no_requests_is_left_to_python(own_collector: None) -> None:
    lifecycle.collect_garbage(Event())  # returns at once


CALLER = Principal("project", "key_1", frozenset())


def test_a_project_with_one_stream_is_told_before_the_many_of_another() -> None:
    many = [stream._Follower(Cursor("many", "job", 0), CALLER, 0.0) for _ in range(30)]
    one = stream._Follower(Cursor("one", "job", 0), CALLER, 0.0)
    assert stream._in_turn([*many, one]) == [many[0], one, *many[1:]]


def test_requests_that_are_refused_together_are_not_told_to_come_back_together() -> None:
    share = Lane("reads", 1, 0.0).project_share("project")
    assert len({share._refusal().retry_after_s for _ in range(8)}) == 8


def test_a_request_that_still_waits_when_the_process_stops_is_told_to_try_again() -> None:
    sent = list[dict[str, Any]]()

    async def waits(*_: object) -> None:
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    async def stop_process() -> None:
        app = SimpleNamespace(state=SimpleNamespace(requests=RequestMetrics()))
        scope = {"type": "http", "method": "GET", "path": "/v1/files", "headers": [], "app": app}
        serving = asyncio.create_task(Envelope(waits)(scope, send, send))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await serving

    asyncio.run(stop_process())
    assert sent[0]["status"] == 503
    assert (b"retry-after", b"1") in sent[0]["headers"]
    assert json.loads(sent[1]["body"])["error"]["code"] == "unavailable"

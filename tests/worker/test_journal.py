"""What a worker tells of its child's training that the child cannot know: that an earlier attempt began it."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy.orm import Session

from app.checkpoints import records
from app.db import transaction
from app.jobs import events, lease
from app.jobs.lease import Claim
from tests.narrowing import require
from tests.worker.shop import Shop
from worker.progress import Journal


def test_costs_of_stages_are_added_to_those_of_earlier_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    written: dict[str, Any] = {}
    monkeypatch.setattr(lease, "record_metrics", lambda *_: True)
    monkeypatch.setattr(lease, "update", lambda session, claim, **columns: written.update(columns))
    monkeypatch.setattr(records, "record", lambda *_: True)
    journal = Journal(Claim("ftjob-1", 2, 2), [], {"rows": {"seconds": 1.0, "units": 10}})
    for stage, seconds, units in (("rows", 0.5, 10), ("checkpoint", 2.0, 100), ("checkpoint", 3.0, 100)):
        journal.hear({"kind": "cost", "stage": stage, "seconds": seconds, "units": units})
    journal.write(Session())
    found = written["stage_costs"]
    assert found == {"rows": {"seconds": 1.5, "units": 20}, "checkpoint": {"seconds": 5.0, "units": 200}}


RESUMED = ("Training goes on after step 40", {events.RESUMED: 40})


@pytest.mark.parametrize(("steps", "expected"), [([1, 2, 3], []), ([41, 42], [RESUMED]), ([], [])])
def test_a_restart_is_an_event_with_its_step(
    monkeypatch: pytest.MonkeyPatch, steps: list[int], expected: list[tuple[str, dict[str, int]]]
) -> None:
    found: list[tuple[str, dict[str, int]]] = []

    def append(session: Any, job_id: str, type: str, message: str, data: dict[str, int], **about: Any) -> None:
        if type == "message":
            found.append((message, data))

    monkeypatch.setattr(events, "append", append)
    monkeypatch.setattr(lease, "record_metrics", lambda *_: True)
    monkeypatch.setattr(lease, "update", lambda *_, **__: True)
    monkeypatch.setattr(records, "record", lambda *_: True)
    journal = Journal(Claim("ftjob-1", 2, 2), [])
    for step in steps:
        journal.hear({"kind": "metrics", "step": step, "total_steps": 100, "data": {"loss/task": 1.0}})
    journal.write(Session())
    assert found == expected


def asking(done: int) -> dict[str, Any]:
    """Return the message that so many of 100 attacks were asked."""
    return {"kind": "activity", "doing": "asking 100 attacks", "done": done, "total": 100, "at_most": False}


def test_what_goes_on_is_shown_until_something_else_does(monkeypatch: pytest.MonkeyPatch) -> None:
    written: dict[str, Any] = {}
    monkeypatch.setattr(lease, "update", lambda session, claim, **columns: written.update(columns))
    for name, found in ((lease, "record_metrics"), (records, "record"), (events, "append")):
        monkeypatch.setattr(name, found, lambda *_, **__: True)
    monkeypatch.setattr(events, "stored_ids", lambda *_: set())
    step: dict[str, Any] = {"kind": "metrics", "step": 6, "total_steps": 10, "data": {"loss/task": 1.0}}
    journal = Journal(Claim("ftjob-1", 1, 1), [])
    told: list[tuple[list[dict[str, Any]], str | None]] = [
        ([{"kind": "phase", "phase": "train"}, step, asking(0)], "asking 100 attacks, 100 left"),
        ([asking(60), {"kind": "progress", "done": 6, "total": 10}], "asking 100 attacks, 40 left"),
        ([step | {"step": 7}], None),
        ([asking(0), {"kind": "phase", "phase": "audit"}], None),
    ]
    for messages, doing in told:
        for message in messages:
            journal.hear(message)
        journal.write(Session())
        assert written["progress"].get("doing") == doing
        assert written["progress"]["step"] in (6, 7)


def test_what_goes_on_alone_is_news_every_few_seconds_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("worker.progress.time.monotonic", lambda: now[0])
    journal = Journal(Claim("ftjob-1", 1, 1), [])
    found = []
    for seconds, done in ((0, 0), (1, 10), (3, 20), (6, 30), (7, 40)):
        now[0] = 1000.0 + seconds
        journal.hear(asking(done))
        found.append(journal.has_news)
        journal.clear()
    assert found == [True, False, False, True, False]


def test_news_that_are_written_again_after_an_unanswered_commit_are_stored_once(shop: Shop) -> None:
    job_id = shop.add_job()
    with transaction(shop.engine) as session:
        journal = Journal(require(lease.claim(session, "worker", 60.0)), [])
    journal.note("info", "first")
    with transaction(shop.engine) as session:  # its COMMIT is not answered: nobody calls `clear`
        journal.write(session)
    journal.note("info", "second")
    for _ in range(2):
        with transaction(shop.engine) as session:
            journal.write(session)
    journal.clear()
    journal.note("info", "first")  # a text may come again
    with transaction(shop.engine) as session:
        journal.write(session)
    assert shop.events(job_id)[1:] == ["first", "second", "first"]

"""What one look for the news of all streams finds, on both databases."""

from __future__ import annotations

from sqlalchemy import Engine

from app.db import transaction
from app.db.tables import JobEvent
from app.jobs import stream
from app.jobs.stream import Cursor
from tests.app.conftest import AddJob


def add_events(engine: Engine, job_id: str, count: int) -> None:
    with transaction(engine) as session:
        session.add_all(
            JobEvent(job_id=job_id, seq=seq, level="info", type="message", message=str(seq), data=None)
            for seq in range(1, count + 1)
        )


def test_each_stream_gets_what_comes_after_its_cursor(engine: Engine, add_job: AddJob) -> None:
    jobs = [add_job(), add_job()]
    for job in jobs:
        add_events(engine, job, 10)
    wanted = {Cursor("p", jobs[0], 0), Cursor("p", jobs[0], 8), Cursor("p", jobs[1], 10), Cursor("p", "ftjob-none", 0)}
    news = stream.read_news(engine, wanted, set(), set())
    found = {(cursor.job_id, cursor.seen): [event.seq for event in events] for cursor, events in news.events.items()}
    assert found == {(jobs[0], 0): list(range(1, 11)), (jobs[0], 8): [9, 10]}
    assert {job_id: last.seq for job_id, last in news.last.items()} == dict.fromkeys(jobs, 10)
    assert news.shown == {}


def test_the_least_behind_come_first_and_no_look_reads_without_bound(engine: Engine, add_job: AddJob) -> None:
    jobs = [add_job() for _ in range(8)]
    for job in jobs:
        add_events(engine, job, 900)
    near = Cursor("p", jobs[0], 899)
    news = stream.read_news(engine, {near, *(Cursor("p", job, 0) for job in jobs)}, set(), set())
    counts = [len(events) for events in news.events.values()]
    assert len(news.events[near]) == 1
    assert max(counts) == stream.AT_ONCE
    assert sum(counts) <= stream.ROWS + stream.AT_ONCE

"""Limits to the very job, second, byte and row that they name; of each project its own."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, select
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from app import keys, quotas
from app.db import read, transaction
from app.db.base import utc_now
from app.db.tables import ApiKey, AuditEntry, File, Job, JobCheckpoint, JobStatus, Project, Quota, Tombstone
from app.db.tables.files import FINE_TUNE, RESULTS
from app.errors import NotFound, QuotaExceeded
from app.quotas import QuotaSet
from tests.app.parts import SPEC

MINE, OTHER = "org-mine", "org-other"
DAY = timedelta(days=1)


@pytest.fixture
def projects(engine: Engine) -> Engine:
    """Two projects, each with a key."""
    with transaction(engine) as session:
        for project_id in (MINE, OTHER):
            session.add(Project(id=project_id, name=project_id))
            session.flush()
            keys.create(session, project_id, "test", ["customer"])
    return engine


def set_limits(session: Session, project_id: str = MINE, **limits: float | None) -> None:
    session.merge(Quota(project_id=project_id, **limits))
    session.flush()


def add_job(
    session: Session,
    project_id: str = MINE,
    *,
    age: timedelta = timedelta(0),
    status: JobStatus = JobStatus.queued,
    seconds: float = 0.0,
    tokens: int | None = None,
    at: datetime | None = None,
) -> None:
    key_id = session.scalars(select(ApiKey.id).where(ApiKey.project_id == project_id)).one()
    asked = {"model": "tiny", "training_file": "file-1", "recipe": {}, "spec": SPEC, "request_hash": "0"}
    used = {"status": status, "gpu_seconds": seconds, "trained_tokens": tokens, "created_at": at or utc_now() - age}
    session.add(Job(project_id=project_id, key_id=key_id, **asked, **used))
    session.flush()


def add_erased(
    session: Session, *, age: timedelta = timedelta(0), seconds: float = 0.0, project_id: str = MINE
) -> None:
    facts: dict[str, Any] = {
        "job_id": f"ftjob-{age}-{project_id}",
        "status": "succeeded",
        "digests": {},
        "trained_tokens": None,
    }
    session.add(Tombstone(project_id=project_id, created_at=utc_now() - age, gpu_seconds=seconds, **facts))
    session.flush()


def make_file(size: int, rows: int | None, project_id: str = MINE, purpose: str = FINE_TUNE) -> File:
    facts = {"filename": "a", "sha256": "0", "storage_key": "a", "status": "processed"}
    return File(project_id=project_id, purpose=purpose, bytes=size, rows=rows, **facts)


def is_refused(session: Session) -> bool:
    try:
        quotas.check_job(session, MINE)
    except QuotaExceeded:
        return True
    return False


def test_jobs_that_have_not_ended_are_counted_to_the_limit_and_those_of_others_are_not(projects: Engine) -> None:
    with transaction(projects) as session:
        set_limits(session, max_unfinished_jobs=2)
        found = [is_refused(session)]
        for _ in range(2):
            add_job(session)
            add_job(session, status=JobStatus.failed)
            add_job(session, OTHER)
            found.append(is_refused(session))
    assert found == [False, False, True]


def test_a_limit_of_nothing_lets_nothing_start(projects: Engine) -> None:
    with transaction(projects) as session:
        set_limits(session, max_unfinished_jobs=0)
        assert is_refused(session)
        set_limits(session, max_jobs_per_day=0)
        assert is_refused(session)
        set_limits(session, max_gpu_seconds=0.0)
        assert is_refused(session)


@pytest.mark.parametrize(("hours", "refused"), [(23.9, True), (24.1, False)])
def test_jobs_of_the_last_24_hours_are_counted(projects: Engine, hours: float, refused: bool) -> None:
    with transaction(projects) as session:
        set_limits(session, max_jobs_per_day=2)
        add_job(session, OTHER)
        add_job(session, age=timedelta(hours=hours))
        assert not is_refused(session)
        add_erased(session, age=timedelta(hours=hours))
        assert is_refused(session) == refused


@pytest.mark.parametrize(("days", "refused"), [(29.9, True), (30.1, False)])
def test_seconds_of_the_last_30_days_are_counted(projects: Engine, days: float, refused: bool) -> None:
    with transaction(projects) as session:
        set_limits(session, max_gpu_seconds=10.0)
        add_job(session, OTHER, seconds=99.0)
        add_job(session, age=timedelta(days=days), seconds=9.5)
        assert not is_refused(session)
        add_erased(session, age=timedelta(days=days), seconds=0.5)
        assert is_refused(session) == refused


def test_files_may_fill_a_limit_and_not_pass_it(projects: Engine) -> None:
    with transaction(projects) as session:
        set_limits(session, max_file_bytes=10, max_file_rows=4)
        session.add_all([make_file(6, 2), make_file(99, 99, OTHER), make_file(99, None, purpose=RESULTS)])
        session.flush()
        quotas.check_file(session, make_file(4, 2))
        quotas.check_file(session, make_file(4, None))
        with pytest.raises(QuotaExceeded, match="10 bytes"):
            quotas.check_file(session, make_file(5, 2))
        with pytest.raises(QuotaExceeded, match="4 rows"):
            quotas.check_file(session, make_file(4, 3))


def test_a_first_file_may_fill_a_limit_and_rows_may_be_unknown(projects: Engine) -> None:
    with transaction(projects) as session:
        set_limits(session, max_file_bytes=10, max_file_rows=4)
        quotas.check_file(session, make_file(10, 4))
        for size, rows in ((11, 4), (10, 5)):
            with pytest.raises(QuotaExceeded):
                quotas.check_file(session, make_file(size, rows))
        set_limits(session, max_file_bytes=None, max_file_rows=0)
        quotas.check_file(session, make_file(1, None))
        with pytest.raises(QuotaExceeded):
            quotas.check_file(session, make_file(1, 1))


def test_a_limit_of_one_kind_is_none_of_the_other(projects: Engine) -> None:
    with transaction(projects) as session:
        quotas.check_file(session, make_file(99, 99))
        set_limits(session, max_file_bytes=99)
        quotas.check_file(session, make_file(99, 999))
        set_limits(session, max_file_bytes=None, max_file_rows=99)
        quotas.check_file(session, make_file(999, 99))


def test_usage_sums_jobs_erased_jobs_and_files_of_each_project(projects: Engine) -> None:
    with transaction(projects) as session:
        add_job(session, seconds=1.0004, tokens=5)
        add_job(session, seconds=2.0002, tokens=None)
        add_erased(session, seconds=4.0)
        session.add_all([make_file(3, 2), make_file(4, None), make_file(5, None, OTHER)])
        session.flush()
        found = quotas.usage(session, utc_now() - DAY, utc_now() + DAY)
    calls = {"calls": 0, "prompt_tokens": 0, "reply_tokens": 0}
    assert {each.pending_bytes for each in found} == {0}
    assert [each.model_dump(exclude={"object", "pending_bytes"}) for each in found] == [
        {"project_id": MINE, "jobs": 3, "gpu_seconds": 7.001, "trained_tokens": 5, "file_bytes": 7, "file_rows": 2}
        | calls,
        {"project_id": OTHER, "jobs": 0, "gpu_seconds": 0.0, "trained_tokens": 0, "file_bytes": 5, "file_rows": 0}
        | calls,
    ]


def test_usage_begins_with_its_first_moment_and_ends_before_its_last(projects: Engine) -> None:
    moment = utc_now().replace(microsecond=0)
    with transaction(projects) as session:
        add_job(session, at=moment)
        spans = [(moment, moment + DAY), (moment - DAY, moment)]
        assert [bool(quotas.usage(session, *span)) for span in spans] == [True, False]


def test_checkpoints_take_up_what_their_archives_do_and_nothing_without_one(projects: Engine) -> None:
    with transaction(projects) as session:
        for project_id, sizes in ((MINE, (3, None, 4)), (OTHER, (None,))):
            add_job(session, project_id)
            job_id = session.scalars(select(Job.id).where(Job.project_id == project_id)).one()
            rows = (JobCheckpoint(job_id=job_id, step=step, metrics={}, bytes=size) for step, size in enumerate(sizes))
            session.add_all(rows)
        session.flush()
        used = quotas.usage(session, utc_now() - DAY, utc_now() + DAY)
    assert {each.project_id: each.file_bytes for each in used} == {MINE: 7, OTHER: 0}


def test_new_limits_are_kept_shown_and_noted(projects: Engine) -> None:
    with transaction(projects) as session:
        made = quotas.create_project(session, "third")
        shown = quotas.set_quota(session, made.id, QuotaSet(max_file_rows=3))
        assert (shown.id, shown.quota.max_file_rows) == (made.id, 3)
        assert quotas.project(session, made.id) == shown
        assert [each.id for each in quotas.projects(session)] == [MINE, OTHER, made.id]
        with pytest.raises(NotFound):
            quotas.project(session, "org-none")
    with read(projects) as session:
        noted = session.scalars(select(AuditEntry.action).order_by(AuditEntry.seq)).all()
    assert noted[-2:] == ["project.created", "quota.set"]


@pytest.mark.parametrize("database_url", ["postgres"], indirect=True)
@pytest.mark.parametrize(
    "count", [lambda s: quotas.check_job(s, MINE), lambda s: quotas.check_file(s, make_file(1, 1))]
)
def test_whoever_counts_locks_the_row_of_that_project_alone(projects: Engine, count: Callable[[Session], None]) -> None:
    def is_free(project_id: str, *, read: bool = False, key_share: bool = False) -> bool:
        row = (
            select(Project.id)
            .where(Project.id == project_id)
            .with_for_update(nowait=True, read=read, key_share=key_share)
        )
        try:
            with transaction(projects) as session:
                return session.scalar(row) == project_id
        except OperationalError:
            return False

    with transaction(projects) as session:
        set_limits(session, max_unfinished_jobs=9)
        set_limits(session, OTHER, max_unfinished_jobs=9)
    with transaction(projects) as session:
        count(session)
        assert not is_free(MINE)
        assert is_free(OTHER)
        assert is_free(MINE, read=True, key_share=True)  # rows that belong to the project may be added meanwhile

"""Prepared statements: they find what SQLAlchemy finds, and fail as it fails, on both databases."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from sqlalchemy import BindParameter, Connection, Engine, bindparam, event, func, or_, select, text
from sqlalchemy.exc import DBAPIError, MultipleResultsFound

from app.db import PreparedStatement, look, read, rows, transaction
from app.db.tables import ApiKey, Job, JobStatus, Project
from app.jobs.rows import ALL, JobRow
from tests.app.conftest import AddJob

_NAME = PreparedStatement(select(Project.name).where(Project.id == bindparam("id")), tuple)


@pytest.fixture
def project(engine: Engine) -> str:
    with transaction(engine) as session:
        session.add(Project(id="org-1", name="one"))
    return "org-1"


def test_every_column_of_a_job_is_what_sqlalchemy_makes_of_it(engine: Engine, add_job: AddJob) -> None:
    measured = {"result_files": ["file-2"], "error": {"code": "x", "message": "\u00e9 \U0001f600", "param": None}}
    ended = {"status": JobStatus.failed, "finished_at": datetime.now(UTC), "trained_tokens": 1 << 40}
    ids = [add_job(), add_job(**measured, **ended, job_metadata={"a": "b"})]
    with look(engine) as connection:
        for job_id in ids:
            found = PreparedStatement(ALL.where(Job.id == bindparam("id")), JobRow._make).one(connection, id=job_id)
            assert found == JobRow._make(rows(connection, ALL.where(Job.id == job_id)).one())
            assert found is not None
            assert found.created_at.tzinfo == UTC


def test_none_is_found_of_what_is_not_there(engine: Engine, project: str) -> None:
    with look(engine) as connection:
        assert _NAME.one(connection, id=project) == ("one",)
        assert _NAME.one(connection, id="org-2") is None
        assert _NAME.all(connection, id="org-2") == []


def test_one_of_several_is_a_mistake(engine: Engine, add_job: AddJob) -> None:
    add_job(), add_job()
    with look(engine) as connection, pytest.raises(MultipleResultsFound):
        PreparedStatement(select(Job.id), tuple).one(connection)


def test_parameters_are_changed_into_the_driver_s_types_wherever_they_stand(engine: Engine, add_job: AddJob) -> None:
    """A time in two places, beside a status that is part of the statement."""
    job_id = add_job()
    at: BindParameter[datetime] = bindparam("at")
    asked = select(Job.id).where(Job.status == JobStatus.queued, or_(Job.created_at == at, Job.created_at > at))
    with read(engine) as session:
        created = session.get_one(Job, job_id).created_at
        assert PreparedStatement(asked, tuple).all(session, at=created) == [(job_id,)]


def test_a_list_is_no_parameter(engine: Engine) -> None:
    listed = PreparedStatement(select(Project.id).where(Project.id.in_(bindparam("ids", expanding=True))), tuple)
    with look(engine) as connection, pytest.raises(ValueError, match="ids is a list"):
        listed.all(connection, ids=["org-1"])


def test_what_a_session_has_not_written_is_found(engine: Engine) -> None:
    with transaction(engine) as session:
        session.add(Project(id="org-1", name="one"))
        assert _NAME.one(session, id="org-1") == ("one",)


def test_reads_of_one_look_see_one_state(engine: Engine, project: str) -> None:
    """On SQLite; PostgreSQL shows each statement what was committed before it."""
    if engine.dialect.name != "sqlite":
        pytest.skip("each statement sees what was committed before it")
    with look(engine) as connection:
        _NAME.one(connection, id=project)
        with transaction(engine) as session:
            session.get_one(Project, project).name = "other"
        assert _NAME.one(connection, id=project) == ("one",)


def test_who_watches_the_engine_sees_it(engine: Engine, project: str) -> None:
    seen: list[tuple[str, Any]] = []

    @event.listens_for(engine, "before_cursor_execute")
    def note(connection: Any, cursor: Any, statement: str, parameters: Any, *rest: Any) -> None:
        seen.append((statement, parameters))

    with look(engine) as connection:
        _NAME.one(connection, id=project)
    [(statement, parameters)] = [each for each in seen if each[0].startswith("SELECT tenants.name")]
    assert project in (parameters.values() if isinstance(parameters, dict) else parameters), statement


def test_an_error_is_sqlalchemy_s_and_the_connection_serves_the_next(engine: Engine, project: str) -> None:
    wrong = PreparedStatement(select(func.abs(func.nonsense(bindparam("id", type_=ApiKey.id.type)))), tuple)
    with look(engine) as connection, pytest.raises(DBAPIError, match="nonsense") as found:
        wrong.all(connection, id=project)
    assert not found.value.connection_invalidated
    with look(engine) as connection:
        assert _NAME.one(connection, id=project) == ("one",)


def test_a_connection_that_was_lost_is_not_used_again(engine: Engine, project: str) -> None:
    with look(engine) as connection:
        _lose(engine, connection)
        with pytest.raises(DBAPIError) as found:
            _NAME.one(connection, id=project)
        assert found.value.connection_invalidated
        assert connection.invalidated
    with look(engine) as connection:
        assert _NAME.one(connection, id=project) == ("one",)


def _lose(engine: Engine, connection: Connection) -> None:
    if engine.dialect.name == "sqlite":
        connection.connection.dbapi_connection.close()  # type: ignore[union-attr]
        return
    process = connection.execute(text("SELECT pg_backend_pid()")).scalar_one()
    with engine.connect() as other:
        other.execute(text("SELECT pg_terminate_backend(:process)"), {"process": process})

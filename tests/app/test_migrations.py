"""The schema in the database is the schema in the code, forward and back."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Engine, delete, inspect, text
from sqlalchemy.exc import DatabaseError

from app.db import downgrade_schema, make_engine, read, schema_state, transaction, upgrade_schema
from app.db.base import Base
from app.db.tables import Job, PolicyVersion, Project, Tombstone
from app.jobs import events
from app.jobs.reports import gather
from tests.app.conftest import AddJob

Schema = dict[str, list[Any]]


@pytest.fixture(params=["sqlite", "postgres"])
def empty_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'new folder' / 'empty.db'}"
    url: str = request.getfixturevalue("empty_postgres_url")
    return url


def test_the_migrations_make_what_the_models_say(engine: Engine) -> None:
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, Base.metadata) == []


def test_an_upgrade_makes_the_schema_current(empty_url: str) -> None:
    engine = make_engine(empty_url)
    before = schema_state(engine)
    upgrade_schema(empty_url)
    assert (before, schema_state(engine)) == ("behind", "current")
    engine.dispose()


def test_a_downgrade_leaves_nothing_and_can_be_taken_back(empty_url: str) -> None:
    upgrade_schema(empty_url)
    downgrade_schema(empty_url)
    engine = make_engine(empty_url)
    left = set(inspect(engine).get_table_names())
    upgrade_schema(empty_url)
    assert (left, schema_state(engine)) == ({"alembic_version"}, "current")
    engine.dispose()


def test_upgrading_twice_loses_nothing(empty_url: str) -> None:
    upgrade_schema(empty_url)
    engine = make_engine(empty_url)
    with transaction(engine) as session:
        session.add(Project(id="org-kept", name="kept"))
    upgrade_schema(empty_url)
    with transaction(engine) as session:
        assert session.get_one(Project, "org-kept").name == "kept"
    assert schema_state(engine) == "current"
    engine.dispose()


def test_processes_that_start_together_upgrade_one_after_the_other(empty_url: str) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(upgrade_schema, [empty_url] * 4))
    engine = make_engine(empty_url)
    assert schema_state(engine) == "current"
    engine.dispose()


def test_the_version_before_can_write_to_the_schema_of_the_next(empty_url: str) -> None:
    upgrade_schema(empty_url)
    engine, steps = make_engine(empty_url), [None, *_revisions()]
    schemas = []
    for step in steps:
        if step:
            downgrade_schema(empty_url, step)
        schemas.append({table: inspect(engine).get_columns(table) for table in inspect(engine).get_table_names()})
    engine.dispose()
    unwritable = [wrong for later, before in pairwise(schemas) for wrong in _unwritable(before, later)]
    assert unwritable == []


def _revisions() -> list[str]:
    """All but the newest, newest first."""
    scripts = ScriptDirectory(str(Path(__file__).resolve().parents[2] / "migrations"))
    return [script.revision for script in scripts.walk_revisions()][1:]


def _unwritable(before: Schema, later: Schema) -> list[str]:
    """Columns that are gone, and new ones that must be given a value, in tables that were there before."""
    wrong = []
    for table, columns in before.items():
        old, new = {c["name"]: c for c in columns}, {c["name"]: c for c in later.get(table, [])}
        wrong += [f"{table}.{name} is gone" for name in old.keys() - new.keys()]
        needed = [new[name] for name in new.keys() - old.keys()]
        wrong += [f"{table}.{c['name']} is needed" for c in needed if not c["nullable"] and c["default"] is None]
    return wrong


@pytest.mark.parametrize("statement", ["UPDATE policy_versions SET created_by = 'x'", "DELETE FROM policy_versions"])
def test_no_version_of_the_policy_is_changed(engine: Engine, statement: str) -> None:
    with transaction(engine) as session:
        session.add(PolicyVersion(version=1, created_by="key_0", content={}))
    with pytest.raises(DatabaseError, match="never changed"), transaction(engine) as session:
        session.execute(text(statement))


def test_no_job_goes_without_a_tombstone(engine: Engine, add_job: AddJob) -> None:
    job_id = add_job()
    with pytest.raises(DatabaseError, match="tombstone"), transaction(engine) as session:
        session.execute(delete(Job).where(Job.id == job_id))
    with transaction(engine) as session:
        job = session.get_one(Job, job_id)
        facts = {"project_id": job.project_id, "created_at": job.created_at, "status": "queued", "digests": {}}
        session.add(Tombstone(job_id=job_id, **facts))
        session.flush()
        session.execute(delete(Job).where(Job.id == job_id))


def test_the_step_in_an_old_event_s_words_becomes_data(engine: Engine, add_job: AddJob) -> None:
    job_id = add_job()
    with transaction(engine) as session:
        for words in ("Training goes on after step 12", "Training goes on after step two", "Step 3"):
            events.append(session, job_id, "info", "message", words)
    url = engine.url.render_as_string(hide_password=False)
    downgrade_schema(url, "0064")
    upgrade_schema(url)
    with read(engine) as reader:
        assert gather.read_log(reader, job_id).restarts == [12]

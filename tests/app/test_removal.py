"""Versions of pools and suites that are taken back while jobs are made: on SQLite and on PostgreSQL."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from threading import Event

import pytest
from sqlalchemy import Engine, select

from app.catalog import removal, service
from app.db import read, transaction
from app.db.tables import Corpus, Job, JobStatus, ObjectIntent
from app.db.tables.files import DELETE
from app.db.tables.job_spec import CorpusRef, JobSpec, ModelRef
from app.errors import InvalidState
from tests.app.conftest import AddJob
from tests.app.parts import SPEC


@pytest.fixture
def corpora(engine: Engine) -> dict[str, str]:
    """A pool and a suite."""
    kept = {kind: Corpus(kind=kind, name="own", version=1, rows=1, bytes=1) for kind in ("pool", "harmful")}
    for kind, corpus in kept.items():
        corpus.sha256, corpus.storage_key = "0", f"corpora/{kind}"
    with transaction(engine) as session:
        session.add_all(kept.values())
    return {kind: corpus.id for kind, corpus in kept.items()}


def spec(corpora: dict[str, str]) -> JobSpec:
    pool, suite = (
        CorpusRef(id=corpora[kind], kind=kind, name="own", version=1, sha256="0", storage_key=f"corpora/{kind}", rows=1)
        for kind in ("pool", "harmful")
    )
    return replace(SPEC, pool=pool, suites=(suite,))


def test_a_version_is_refused_while_a_job_names_it(engine: Engine, corpora: dict[str, str], add_job: AddJob) -> None:
    job_id = add_job(spec=spec(corpora))
    for forget, kind in ((removal.forget_pool, "pool"), (removal.forget_suite, "harmful")):
        with pytest.raises(InvalidState, match=job_id), transaction(engine) as session:
            forget(session, corpora[kind])
    with transaction(engine) as session:
        session.get_one(Job, job_id).status = JobStatus.cancelled
    with transaction(engine) as session:
        removal.forget_pool(session, corpora["pool"])
        removal.forget_suite(session, corpora["harmful"])
    with read(engine) as session:
        due = select(ObjectIntent.storage_key).where(ObjectIntent.kind == DELETE)
        assert sorted(session.scalars(due)) == ["corpora/harmful", "corpora/pool"]
        assert (service.pools(session), service.suites(session)) == ([], [])


def test_a_pool_is_embedded_for_a_model_once_however_many_jobs_used_it(
    engine: Engine, corpora: dict[str, str], add_job: AddJob
) -> None:
    ended = {"status": JobStatus.succeeded, "finished_at": datetime(2026, 1, 2, tzinfo=UTC)}
    for defense in ("spard", "lisa", "none"):
        add_job(spec=spec(corpora), recipe={"defense": {"type": defense}}, **ended)
    other = replace(spec(corpora), model=ModelRef(alias="other", source="/models/tiny"))
    add_job(spec=other, recipe={"defense": {"type": "none"}}, **ended)
    with read(engine) as session:
        (pool,) = service.pools(session)
    (embedded,) = pool.embedded_for
    assert (embedded.model, embedded.source, embedded.latest_at) == ("tiny", "/models/tiny", ended["finished_at"])


def test_a_deletion_waits_for_the_jobs_that_are_being_made(
    engine: Engine, corpora: dict[str, str], add_job: AddJob
) -> None:
    queued = add_job()
    begun = Event()

    def delete() -> None:
        begun.set()
        with transaction(engine) as session:
            removal.forget_pool(session, corpora["pool"])

    with ThreadPoolExecutor() as threads:
        with transaction(engine) as session:
            service.hold(session)
            deletion = threads.submit(delete)
            begun.wait()
            with pytest.raises(TimeoutError):
                deletion.result(timeout=0.5)
            session.get_one(Job, queued).spec = spec(corpora)
        with pytest.raises(InvalidState):
            deletion.result()


def test_a_pool_is_refused_while_a_job_is_audited_with_its_held_out_attacks(engine: Engine, add_job: AddJob) -> None:
    attacks = Corpus(kind=service.HARMFUL, name="new-heldout", version=1, rows=1, bytes=1, sha256="0")
    pools = [Corpus(kind=service.POOL, name=name, version=1, rows=1, bytes=1, sha256="0") for name in ("old", "new")]
    for corpus in (attacks, *pools):
        corpus.storage_key = f"corpora/{corpus.kind}-{corpus.name}"
    with transaction(engine) as session:
        session.add_all([attacks, *pools])
    old, new = (pool.id for pool in pools)
    job_id = add_job(spec=spec({"pool": old, "harmful": attacks.id}))  # as a later audit pairs them
    with pytest.raises(InvalidState, match=job_id), transaction(engine) as session:
        removal.forget_pool(session, new)
    with transaction(engine) as session:
        session.get_one(Job, job_id).status = JobStatus.cancelled
    with transaction(engine) as session:
        removal.forget_pool(session, new)
    with read(engine) as session:
        assert session.get_one(Corpus, attacks.id).deleted_at is not None


def test_suites_of_two_kinds_may_share_a_name(engine: Engine) -> None:
    for version, kind in ((1, "harmful"), (1, "benign"), (2, "harmful")):
        with transaction(engine) as session:
            suite = Corpus(kind=kind, name="own", version=version, rows=1, bytes=1, sha256=f"{version}")
            suite.storage_key = f"corpora/{kind}-{version}"
            session.add(suite)
    with read(engine) as session:
        found = [(suite.kind, suite.version) for suite in service.default_suites(session)]
        assert found == [("benign", 1), ("harmful", 2)]
        assert service.has_attacks(session)


def test_a_pool_whose_name_ends_like_held_out_attacks_is_found(engine: Engine) -> None:
    pool = Corpus(
        kind=service.POOL, name="own-heldout", version=1, rows=1, bytes=1, sha256="0", storage_key="corpora/1"
    )
    with transaction(engine) as session:
        session.add(pool)
    with read(engine) as session:
        assert service.kept_version(session, pool.id, [service.POOL]).id == pool.id

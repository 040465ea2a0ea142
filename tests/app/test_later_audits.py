"""On both databases: which released models today's audit is asked of, how many at once, and what its outcome does."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from sqlalchemy import Engine

from app import db, keys
from app.catalog import removal
from app.catalog import service as catalog
from app.db import read, transaction
from app.db.tables import ApiKey, AuditEntry, Corpus, File, Job, JobCheckpoint, JobStatus, LaterAudit
from app.db.tables.jobs import EPOCH
from app.errors import AppError, InvalidState
from app.jobs import erasure, later_audits, later_outcomes, lease
from app.jobs.transitions import request_cancel
from app.policies import service as policies
from app.policies.schemas import Policy
from app.settings import Settings
from app.signing import signing_key
from app.storage import open_storage
from spard.config import AUDITS, Audit, AuditSize, Recipe
from spard.config.earlier_versions import from_stored
from spard.config.run_spec import parse, to_mapping
from spard.release.version import AUDIT_VERSION
from tests.app.conftest import AddJob
from tests.app.parts import claim_job, messages

PASSED: Any = {"gate": {"decision": "pass", "reasons": []}}
ADAPTER: Any = {"storage_key": "tenants/p/jobs/j/a1/adapter.tar.gz", "sha256": "0", "bytes": 1}


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(data_dir=tmp_path)


@pytest.fixture
def provider(engine: Engine, add_job: AddJob) -> str:
    """The id of a provider's key, in a project of its own."""
    with transaction(engine) as session:
        session.add(File(id="file-1", project_id=keys.FIRST_PROJECT, **FILE))
        return keys.create(session, keys.FIRST_PROJECT, "provider", ["admin"])[0].id


FILE: Any = {
    "filename": "t", "purpose": "fine-tune", "bytes": 1, "sha256": "0", "storage_key": "files/1", "status": "processed",
}  # fmt: skip


def release(add_job: AddJob, name: str, audit: Audit | None = None, **columns: Any) -> str:
    given = {"status": JobStatus.succeeded, "adapter": ADAPTER, "fine_tuned_model": name, "safety": PASSED}
    return add_job(recipe=to_mapping(Recipe(audit=audit or Audit())), **{**given, **columns})


def put(engine: Engine, key_id: str, audit: str = "full", **serving: Any) -> None:
    with transaction(engine) as session:
        policies.add(session, key_id, Policy.model_validate({"serving": serving, "audit": audit}))


def listed_models(engine: Engine) -> set[str]:
    """The names that the project's listing has."""
    with read(engine) as session:
        found = {each.id: each for each in catalog.models(session, keys.FIRST_PROJECT)}
        for name, each in found.items():  # one by one it is the same
            assert catalog.get_model(session, keys.FIRST_PROJECT, name) == each
        return set(found)


def stored_audits(engine: Engine) -> list[LaterAudit]:
    with read(engine) as session:
        return session.query(LaterAudit).order_by(LaterAudit.created_at, LaterAudit.id).all()


def decide(engine: Engine, settings: Settings, decision: str) -> None:
    """End the job that is next, as its worker does."""
    with transaction(engine) as session:
        claim = claim_job(session)
        assert lease.finish_audit(session, claim)
        found: Any = {"gate": {"decision": decision, "reasons": ["why"]}, "audit_version": AUDIT_VERSION}
        later_outcomes.decide(session, session.get_one(Job, claim.job_id), found, signing_key(settings))


@pytest.mark.parametrize("until_asked", ["serve", "withhold"])
def test_only_a_pass_keeps_an_older_model_released(
    engine: Engine, add_job: AddJob, provider: str, settings: Settings, until_asked: str
) -> None:
    good, bad = release(add_job, "ft:good"), release(add_job, "ft:bad")
    release(add_job, "ft:today", safety={**PASSED, "audit_version": AUDIT_VERSION})
    put(engine, provider, older_audits="ask_again", until_asked=until_asked)
    both = {"ft:good", "ft:bad"}
    assert [each.job_id for each in later_audits.ask_once(engine, settings)] == [good, bad]
    assert listed_models(engine) == {"ft:today"} | (both if until_asked == "serve" else set())
    assert later_audits.ask_once(engine, settings) == []  # each once
    decide(engine, settings, "pass")
    decide(engine, settings, "fail")
    assert listed_models(engine) == {"ft:today", "ft:good"}
    put(engine, provider, older_audits="withhold")
    assert listed_models(engine) == {"ft:today", "ft:good"}
    put(engine, provider)
    assert listed_models(engine) == {"ft:today", "ft:good"}  # what failed stays withheld, whatever the policy says now
    assert "stays released" in messages(engine, good)[-1]
    assert "is withheld" in messages(engine, bad)[-1]
    with read(engine) as session:
        [shown] = [each for each in catalog.models(session, keys.FIRST_PROJECT) if each.id == "ft:good"]
        noted = session.query(AuditEntry).filter_by(action="audit.decided").order_by(AuditEntry.seq).all()
    assert (shown.older_audit, shown.later_audit) == (None, AUDIT_VERSION)
    assert [(each.details or {})["decision"] for each in noted] == ["pass", "fail"]


def test_an_audit_without_a_decision_withholds(
    engine: Engine, add_job: AddJob, provider: str, settings: Settings
) -> None:
    release(add_job, "ft:1")
    put(engine, provider, older_audits="ask_again")
    [audit] = later_audits.ask_once(engine, settings)
    with transaction(engine) as session:
        request_cancel(session, audit.audit_job_id or "")
    later_audits.ask_once(engine, settings)
    [closed] = stored_audits(engine)
    assert (closed.decision, closed.reasons) == ("inconclusive", ["The audit could not be completed: it was cancelled"])
    assert listed_models(engine) == set()
    with transaction(engine) as session:  # the provider may ask once more, by name
        later_audits.ask_by_name(session, provider, audit.job_id, 0, settings)
        with pytest.raises(AppError, match="already"):
            later_audits.ask_by_name(session, provider, audit.job_id, 0, settings)
    decide(engine, settings, "pass")
    assert listed_models(engine) == {"ft:1"}


def test_it_asks_a_few_at_once_and_checkpoints_too(
    engine: Engine, add_job: AddJob, provider: str, settings: Settings
) -> None:
    jobs = [release(add_job, f"ft:{i}") for i in range(later_audits.AT_ONCE)]
    with transaction(engine) as session:
        row: Any = {"kind": EPOCH, "metrics": {}, "storage_key": "k", "sha256": "0", "safety": PASSED}
        session.add(JobCheckpoint(job_id=jobs[0], step=10, **row))
    put(engine, provider, older_audits="ask_again")
    assert [each.job_id for each in later_audits.ask_once(engine, settings)] == jobs
    decide(engine, settings, "pass")
    [last] = later_audits.ask_once(engine, settings)
    assert (last.job_id, last.step) == (jobs[0], 10)
    with read(engine) as session:
        key = session.get_one(ApiKey, provider)
        for audit in stored_audits(engine):
            job = session.get_one(Job, audit.audit_job_id)
            assert (job.project_id, job.spec.audited and job.spec.audited.id) == (key.project_id, audit.job_id)
        assert not catalog.is_withheld(session, PASSED, catalog.last_later_audit(session, jobs[0], 10))


@pytest.mark.parametrize("size", ["full", "small"])
def test_it_has_the_size_of_the_policy(
    engine: Engine, add_job: AddJob, provider: str, settings: Settings, size: AuditSize
) -> None:
    release(add_job, "ft:1", Audit(max_prompts=77))
    put(engine, provider, audit=size, older_audits="ask_again")
    [audit] = later_audits.ask_once(engine, settings)
    with read(engine) as session:
        recipe = session.get_one(Job, audit.audit_job_id).recipe
    assert parse(Recipe, from_stored(recipe), "recipe").audit == AUDITS[size]


def test_nobody_is_asked_without_the_policy_or_the_training_file(
    engine: Engine, add_job: AddJob, provider: str, settings: Settings
) -> None:
    job_id = release(add_job, "ft:1")
    assert later_audits.ask_once(engine, settings) == []
    put(engine, provider, older_audits="withhold")
    assert later_audits.ask_once(engine, settings) == []
    put(engine, provider, older_audits="ask_again")
    with transaction(engine) as session:
        session.delete(session.get_one(File, "file-1"))
    [audit] = later_audits.ask_once(engine, settings)
    assert (audit.job_id, audit.decision, audit.audit_job_id) == (job_id, "inconclusive", None)
    with transaction(engine) as session, pytest.raises(AppError, match="not released"):
        later_audits.ask_by_name(session, provider, job_id, 7, settings)


def test_an_erased_job_takes_its_audits_along(
    engine: Engine, add_job: AddJob, provider: str, settings: Settings, tmp_path: Path
) -> None:
    job_id = release(add_job, "ft:1")
    with transaction(engine) as session:
        audit = later_audits.ask_by_name(session, provider, job_id, 0, settings)
    storage = open_storage(f"file://{tmp_path / 'objects'}")
    erasure.erase(storage, lambda: db.transaction(engine), keys.FIRST_PROJECT, job_id, include_files=False)
    assert stored_audits(engine) == []
    with read(engine) as session:
        assert session.get_one(Job, audit.audit_job_id).status == JobStatus.cancelled


def test_a_suite_is_not_deleted_while_an_audit_that_uses_it_is_asked(
    engine: Engine, add_job: AddJob, provider: str, settings: Settings
) -> None:
    job_id = release(add_job, "ft:1")
    suite = Corpus(kind="harmful", name="own", version=1, rows=1, bytes=1, sha256="0", storage_key="corpora/1")
    with transaction(engine) as session:
        session.add(suite)
    begun = Event()

    def delete() -> None:
        begun.set()
        with transaction(engine) as session:
            removal.forget_suite(session, suite.id)

    with ThreadPoolExecutor() as threads:
        with transaction(engine) as session:
            later_audits.ask_by_name(session, provider, job_id, 0, settings)
            deletion = threads.submit(delete)
            begun.wait()
            with pytest.raises(TimeoutError):
                deletion.result(timeout=0.5)
        with pytest.raises(InvalidState, match="is used by"):
            deletion.result()

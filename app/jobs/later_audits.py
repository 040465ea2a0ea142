"""Audit models again, with today's audit, after an earlier audit released them.

Later audits are requested by the policy, for models of an older audit, or by the provider by name. Each one is a job of
the provider's own project: it is scheduled and leased like any job, uses no other project's quota and trains nothing.
The worker that holds its lease writes the decision in the transaction that ends the job (`app.jobs.later_outcomes`).
Any number of processes may run this loop, because each pass locks the policy version in force.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import chain, islice
from threading import Event
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import ColumnElement, Engine, func, select
from sqlalchemy.orm import Session
from sqlalchemy.orm.attributes import InstrumentedAttribute

from app import audit_log
from app.catalog import service as catalog
from app.db import transaction
from app.db.base import new_id
from app.db.tables import ApiKey, Corpus, DeletedModel, File, Job, JobCheckpoint, LaterAudit, PolicyVersion
from app.db.tables.job_records import Adapter
from app.db.tables.job_spec import VERSION, AuditedRef, CorpusRef, JobSpec
from app.db.tables.jobs import EPOCH, WHOLE_JOB
from app.errors import InvalidState, NotFound
from app.http.schemas import Body, UnixTime
from app.jobs import events, later_outcomes
from app.jobs.later_outcomes import model_display_name
from app.ops.broker import wake
from app.ops.lifecycle import repeat
from app.policies import service as policies
from app.settings import Settings
from spard.config import AUDITS, NoDefense, Recipe
from spard.config.earlier_versions import from_stored, to_stored
from spard.config.run_spec import parse, to_mapping
from spard.release.version import AUDIT_VERSION


class LaterAuditCreate(Body):
    """Which model of the job to audit again."""

    step: Annotated[int, Field(ge=0, le=2**31 - 1)] = Field(
        default=0, description="Step of a checkpoint; 0: the job's own model."
    )


class LaterAuditOut(BaseModel):
    """One later audit; `decision` is null until the audit has ended. `signature` signs the bytes of `record`."""

    model_config = ConfigDict(from_attributes=True)

    object: Literal["safety.later_audit"] = "safety.later_audit"
    id: str
    job_id: str
    step: int
    audit_version: int
    created_at: UnixTime
    decided_at: UnixTime | None
    decision: str | None
    reasons: list[str] | None
    record: str | None
    signature: dict[str, str] | None


class LaterAuditOfProvider(LaterAuditOut):
    """A later audit as the provider sees it, with the job that runs it; null if it could not be run."""

    audit_job_id: str | None


class LaterAuditList(BaseModel):
    """All later audits of a job and its checkpoints, newest first."""

    object: Literal["list"] = "list"
    data: list[LaterAuditOut]


AT_ONCE = 4  # audits by policy that may wait for a decision at the same time


def run(engine: Engine, settings: Settings, stop: Event, every_s: float = 60.0) -> None:
    """Call `ask_once` every `every_s` seconds until `stop` is set."""
    repeat(partial(ask_once, engine, settings), stop, every_s, "later audits could not be asked")


def ask_once(engine: Engine, settings: Settings) -> list[LaterAudit]:
    """Close the audits whose job ended without a decision, and queue the audits that the policy requires."""
    with transaction(engine) as session:
        later_outcomes.close_ended(session)
        return ask_older(session, settings)


def ask_older(session: Session, settings: Settings) -> list[LaterAudit]:
    """Queue audits of released models whose audit is older than today's, oldest first, if the policy requires it.

    At most `AT_ONCE` of them wait for a decision at the same time. Returns the audits that were queued.
    """
    # Serializes all processes that run this loop: two of them may not count `waiting` at the same time.
    session.execute(select(PolicyVersion.version).order_by(PolicyVersion.version.desc()).limit(1).with_for_update())
    in_force = policies.current(session, settings)
    if in_force.content.serving.older_audits != "ask_again" or in_force.created_by is None:
        return []
    waiting = session.scalar(select(func.count()).where(LaterAudit.decided_at.is_(None))) or 0
    # Requests by name count too, and may have made it more than `AT_ONCE`.
    room = max(0, AT_ONCE - waiting)
    return [_ask(session, each, in_force.created_by, settings) for each in older_models(session, room)]


def ask_by_name(session: Session, key_id: str, job_id: str, step: int, settings: Settings) -> LaterAudit:
    """Queue an audit of one released model, regardless of its earlier audits.

    `step` names a checkpoint; 0 means the job's model. Raises `InvalidState` if it is being audited already.
    """
    session.execute(select(Job.id).where(Job.id == job_id).with_for_update())  # concurrent requests wait here
    model = find_model(session, job_id, step)
    of_model = (LaterAudit.job_id == job_id) & (LaterAudit.step == step)
    if session.scalar(select(LaterAudit.id).where(of_model, LaterAudit.decided_at.is_(None)).limit(1)):
        raise InvalidState(f"{model.display_name} of {job_id} is being audited already.", code="audit_waits")
    return _ask(session, model, key_id, settings)


def of_job(session: Session, job_id: str) -> Sequence[LaterAudit]:
    """Return the later audits of a job and of its checkpoints, newest first."""
    order = LaterAudit.created_at.desc(), LaterAudit.round.desc(), LaterAudit.id
    return session.scalars(select(LaterAudit).where(LaterAudit.job_id == job_id).order_by(*order)).all()


def _ask(session: Session, model: Model, key_id: str, settings: Settings) -> LaterAudit:
    job = model.job
    of_model = (LaterAudit.job_id == job.id) & (LaterAudit.step == model.step)
    rounds = session.scalar(select(func.max(LaterAudit.round)).where(of_model)) or 0
    audit = LaterAudit(job_id=job.id, step=model.step, round=rounds + 1, audit_version=AUDIT_VERSION, asked_by=key_id)
    session.add(audit)
    session.flush()
    if session.get(File, job.spec.training_file.id) is None:
        later_outcomes.close(session, audit, "Its training file was deleted, and the audit needs it.")
    else:
        asking = _job(session, model, key_id, settings)
        session.add(asking)
        session.flush()
        audit.audit_job_id = asking.id
        events.append(session, asking.id, "info", "message", f"Created an audit of {job.id}, which trains nothing")
        events.append(session, job.id, "info", "message", f"{model.display_name} is audited again, by today's audit")
        wake(session, asking.id)
    audit_log.record(session, "audit.asked", audit.id, job=job.id, step=model.step, audit_job=audit.audit_job_id)
    return audit


def _job(session: Session, model: Model, key_id: str, settings: Settings) -> Job:
    """Build the job that audits `model` with the settings that a new job gets by default today."""
    catalog.hold(session)  # no version that is read below may be deleted before this job names it
    old, audited = model.job, model.adapter
    pool = session.get(Corpus, old.spec.pool.id) if old.spec.pool else None
    in_force = policies.current(session, settings)
    spec = JobSpec(
        version=VERSION,
        model=old.spec.model,
        training_file=old.spec.training_file,
        pool=old.spec.pool if pool and pool.deleted_at is None else None,
        suites=tuple(_corpus_ref(suite) for suite in catalog.default_suites(session)),
        policy=policies.reference(in_force),
        judge=settings.judge.name,
        judge_spec=settings.judge,
        further_tuning=in_force.content.further_tuning,
        agent=in_force.content.agent.settings() if in_force.content.agent else None,
        embedder=old.spec.embedder,
        audited=AuditedRef(id=old.id, step=model.step, sha256=audited["sha256"], storage_key=audited["storage_key"]),
    )
    # The recipe tells how the adapter was trained; the audit settings are those of today's policy.
    recipe = replace(parse(Recipe, from_stored(old.recipe), "recipe"), audit=AUDITS[in_force.content.audit])
    if spec.pool is None and recipe.uses_pool:  # only a serving prompt of the defense matters to an audit
        recipe = replace(recipe, defense=NoDefense(), anchor=0.0)
    return Job(
        id=new_id("ftjob-"),
        project_id=session.get_one(ApiKey, key_id).project_id,
        key_id=key_id,
        model=old.model,
        training_file=old.training_file,
        suffix="audit",
        job_metadata={"audits": old.id},
        recipe=to_stored(to_mapping(recipe)),
        spec=spec,
        request_hash=audited["sha256"],
    )


def _corpus_ref(corpus: Corpus) -> CorpusRef:
    return CorpusRef(**{each.name: getattr(corpus, each.name) for each in fields(CorpusRef)})


# Find models and checkpoints of all projects that an audit released, for a later audit.

_IS_RELEASED = Job.fine_tuned_model.is_not(None) & Job.id.not_in(select(DeletedModel.job_id))
_IS_KEPT = (JobCheckpoint.kind == EPOCH) & JobCheckpoint.storage_key.is_not(None)


@dataclass(frozen=True, slots=True)
class Model:
    """A released model: its job, the step of its checkpoint (0 for the job's model), and its archive."""

    job: Job
    step: int
    adapter: Adapter

    @property
    def display_name(self) -> str:
        """The model's name in events and errors."""
        return model_display_name(self.step)


def find_model(session: Session, job_id: str, step: int) -> Model:
    """Return one released model of a job.

    Raises `NotFound` if there is no such job, and `InvalidState` if the model or checkpoint is not released.
    """
    job = session.get(Job, job_id)
    if job is None:
        raise NotFound(f"Could not find fine tune: {job_id}", code="fine_tune_not_found", param="fine_tuning_job_id")
    query = _checkpoints().where(Job.id == job_id, JobCheckpoint.step == step)
    found = _of_jobs(session, Job.id == job_id) if step == WHOLE_JOB else _of_checkpoints(session, query)
    model = next(found, None)
    if model is None:
        raise InvalidState(f"{model_display_name(step)} of {job_id} is not released; there is nothing to audit.")
    return model


def older_models(session: Session, limit: int) -> list[Model]:
    """Return at most `limit` released models that no audit of today's version has examined; jobs, then checkpoints.

    Each group is ordered by age, oldest first.
    """
    jobs = _of_jobs(session, _is_due(Job.safety, Job.id), limit)
    due = _is_due(JobCheckpoint.safety, JobCheckpoint.job_id, JobCheckpoint.step)
    query = _checkpoints().where(due).order_by(JobCheckpoint.created_at, JobCheckpoint.id).limit(limit)
    return list(islice(chain(jobs, _of_checkpoints(session, query)), limit))


def _of_jobs(session: Session, which: ColumnElement[bool], limit: int = 1) -> Iterator[Model]:
    query = select(Job).where(_IS_RELEASED, which).order_by(Job.created_at, Job.id).limit(limit)
    for job in session.scalars(query):
        if job.adapter:
            yield Model(job, WHOLE_JOB, job.adapter)


def _checkpoints() -> Any:
    return select(Job, JobCheckpoint).join(JobCheckpoint, JobCheckpoint.job_id == Job.id).where(_IS_KEPT)


def _of_checkpoints(session: Session, query: Any) -> Iterator[Model]:
    for job, kept in session.execute(query):
        yield Model(job, kept.step, {"storage_key": kept.storage_key, "sha256": kept.sha256, "bytes": kept.bytes or 0})


def _is_due(
    safety: InstrumentedAttribute[Any],
    job_id: InstrumentedAttribute[str],
    step: InstrumentedAttribute[int] | None = None,
) -> ColumnElement[bool]:
    """Match models released by an older audit for which no later audit of today's version exists."""
    of_step = LaterAudit.step == (WHOLE_JOB if step is None else step)
    asked = select(LaterAudit.id).where(LaterAudit.job_id == job_id, of_step, LaterAudit.audit_version >= AUDIT_VERSION)
    # Audits of version 1 stored no number.
    is_older = func.coalesce(safety["audit_version"].as_integer(), 1) < AUDIT_VERSION
    return is_older & safety["gate"].is_not(None) & ~asked.exists()

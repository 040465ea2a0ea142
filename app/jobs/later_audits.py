"""Audit models again, with today's audit, after an earlier audit released them.

Later audits are requested by the policy, for models of an older audit, or by the provider by name. Each one is a job of
the provider's own project: it is scheduled and leased like any job, uses no other project's quota and trains nothing.
The worker that holds its lease writes the decision in the transaction that ends the job (`app.jobs.later_outcomes`).
Any number of processes may run this loop, because each pass locks the policy version in force.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial
from threading import Event

from sqlalchemy import Engine, func, select
from sqlalchemy.orm import Session

from app.audit_log import service as audit_log
from app.catalog import service as catalog
from app.db import transaction
from app.db.base import new_id
from app.db.tables import ApiKey, Corpus, File, Job, LaterAudit, PolicyVersion
from app.db.tables.job_spec import VERSION, AuditedRef, CorpusRef, JobSpec
from app.errors import InvalidState
from app.jobs import events, later_outcomes, released_models
from app.jobs.released_models import Model
from app.ops.broker import wake
from app.ops.periodic import repeat
from app.policies import service as policies
from app.settings import Settings
from spard.config import Audit, NoDefense, Recipe
from spard.config.deprecated import from_stored, to_stored
from spard.config.run_spec import parse, to_mapping
from spard.release.version import AUDIT_VERSION

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
    return [_ask(session, each, in_force.created_by, settings) for each in released_models.older(session, room)]


def ask_by_name(session: Session, key_id: str, job_id: str, step: int, settings: Settings) -> LaterAudit:
    """Queue an audit of one released model, regardless of its earlier audits.

    `step` names a checkpoint; 0 means the job's model. Raises `InvalidState` if it is being audited already.
    """
    session.execute(select(Job.id).where(Job.id == job_id).with_for_update())  # concurrent requests wait here
    model = released_models.find_model(session, job_id, step)
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
    # The recipe tells how the adapter was trained; the audit settings are today's defaults.
    recipe = replace(parse(Recipe, from_stored(old.recipe), "recipe"), audit=Audit())
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

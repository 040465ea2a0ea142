"""What is counted, logged and told of jobs, held against their rows.

I7  a project's use is the sum of its rows, no job's time is longer than it ran, and no limit was ever passed
I8  the chain of the audit log holds; each job was entered once, with it, and each cancelled one as cancelled
I10 each end of a job was told to each endpoint, under one id, in the same bytes at every attempt; nothing else was
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from datetime import UTC, datetime
from hashlib import sha256

from sqlalchemy import func, select, update
from sqlalchemy.orm import Session

from app import audit_log, quotas
from app.db import read, transaction
from app.db.tables import TERMINAL, AuditEntry, File, Job, JobStatus, Quota, WebhookDelivery, WebhookEndpoint
from app.webhooks import delivery
from app.webhooks.delivery import TYPES, Courier
from tests.faults import mailbox
from tests.worker.shop import Shop

_ALWAYS = datetime(1970, 1, 1, tzinfo=UTC), datetime(9000, 1, 1, tzinfo=UTC)
_DELIVER_S, _TICK_S = 300.0, 0.01  # the database rounds times on SQLite to milliseconds


def wrong(shop: Shop, jobs: Mapping[str, Job]) -> list[str]:
    """Everything that the books have wrong."""
    _deliver_rest(shop)
    with read(shop.engine) as session:
        found = [
            *_check_use(session, jobs.values()),
            *_check_limits(session, jobs.values()),
            *_check_audit_log(session, jobs),
        ]
        return found + _check_webhooks(session, jobs, mailbox.read_received(mailbox.path(shop.folder.parent)))


def _check_use(session: Session, jobs: Collection[Job]) -> list[str]:
    wrong, sums = [], {use.project_id: use for use in quotas.usage(session, *_ALWAYS)}
    for project_id in sums.keys() | {job.project_id for job in jobs}:
        own, use = [job for job in jobs if job.project_id == project_id], sums.get(project_id)
        files = session.scalars(select(File).where(File.project_id == project_id)).all()
        counted = (use.jobs, use.gpu_seconds, use.trained_tokens, use.file_bytes, use.file_rows) if use else ()
        seconds, tokens = sum(job.gpu_seconds for job in own), sum(job.trained_tokens or 0 for job in own)
        rows = (len(own), round(seconds, 3), tokens, sum(f.bytes for f in files), sum(f.rows or 0 for f in files))
        if counted != rows:
            wrong.append(f"I7 {project_id} is said to have used {counted}, by its rows {rows}")
    return wrong + [f"I7 {job.gpu_seconds} s counted: {job.id}" for job in jobs if not _is_plausible(job)]


def _is_plausible(job: Job) -> bool:
    """Whether the time that is counted is within the job's own."""
    if job.started_at is None or job.finished_at is None:
        return job.started_at is not None or job.gpu_seconds == 0
    lived = (job.finished_at - job.started_at).total_seconds()
    return (job.status != JobStatus.succeeded or job.gpu_seconds > 0) and 0 <= job.gpu_seconds <= lived + _TICK_S


def _check_limits(session: Session, jobs: Collection[Job]) -> list[str]:
    """At each moment that made a job, how many of its project had not ended; one that its owner cancelled had."""
    wrong = []
    for quota in session.scalars(select(Quota).where(Quota.max_unfinished_jobs.is_not(None))):
        own = [job for job in jobs if job.project_id == quota.project_id]
        over = [job.cancel_requested_at or job.finished_at for job in own]
        moves = [(job.created_at, 1) for job in own] + [(at, -1) for at in over if at]
        unfinished = most = 0
        for _, change in sorted(moves):  # what ended in the same instant ended first
            unfinished += change
            most = max(most, unfinished)
        if most > (quota.max_unfinished_jobs or 0):
            wrong.append(f"I7 {most} unfinished jobs where {quota.max_unfinished_jobs} were allowed")
    return wrong


def _check_audit_log(session: Session, jobs: Mapping[str, Job]) -> list[str]:
    chain = audit_log.verify(session)
    wrong = [] if isinstance(chain, audit_log.Chain) else [f"I8 row {chain.seq} of the audit log: {chain.why}"]
    acts: dict[str, Counter[str]] = {"job.created": Counter(), "job.cancelled": Counter()}
    for entry in session.scalars(select(AuditEntry).where(AuditEntry.action.in_(acts))):
        acts[entry.action][entry.target] += 1
    if acts["job.created"] != Counter(jobs.keys()):
        wrong.append("I8 the jobs that were entered in the audit log are not those that there are")
    cancelled = {job.id for job in jobs.values() if job.status == JobStatus.cancelled}
    return wrong + [f"I8 cancelled without an entry: {job_id}" for job_id in cancelled - acts["job.cancelled"].keys()]


def _check_webhooks(session: Session, jobs: Mapping[str, Job], heard: Iterable[mailbox.Heard]) -> list[str]:
    endpoints = session.scalars(select(WebhookEndpoint)).all()
    due = Counter((e.id, j.id, TYPES[j.status]) for e in endpoints for j in jobs.values() if j.status in TERMINAL)
    rows = session.scalars(select(WebhookDelivery)).all()
    wrong = []
    if due != Counter((row.endpoint_id, row.job_id, row.type) for row in rows):
        wrong.append("I10 what is told is not what happened")
    wrong += [f"I10 {row.status} ({row.outcome}): {row.event_id}" for row in rows if row.status != "delivered"]
    if len({(row.job_id, row.event_id) for row in rows}) != len({row.job_id for row in rows}):
        wrong.append("I10 one end of a job has several ids")
    bodies = {row.event_id: sha256(delivery.event_body(row)).hexdigest() for row in rows}
    arrived = {each.event_id for each in heard if each.answer == "taken"}
    wrong += [f"I10 never arrived: {event_id}" for event_id in bodies.keys() - arrived]
    return wrong + [f"I10 heard otherwise: {each}" for each in heard if bodies.get(each.event_id) != each.digest]


def _deliver_rest(shop: Shop) -> None:
    """What couriers that were killed had still to deliver is due now."""
    courier, deadline = Courier(shop.engine, allow_local=True), time.monotonic() + _DELIVER_S
    is_pending = WebhookDelivery.status == "pending"
    while time.monotonic() < deadline:
        with transaction(shop.engine) as session:
            session.execute(update(WebhookDelivery).where(is_pending).values(due_at=0.0))
            left = session.scalar(select(func.count()).where(is_pending))
        if not left:
            return
        courier.deliver_due()

"""Whose turn it is: tenants take turns, and within a tenant its own priority decides.

The next job is of the tenant that has the fewest running ones; among such, of the one that has waited longest since a
job of its was started. A tenant with one job therefore waits for one job of the others, however many they queue.
"""

from __future__ import annotations

from sqlalchemy import Select, case, func, or_, select
from sqlalchemy.orm import Session, aliased

from app.db import now
from app.models import Job, JobStatus, Tenant


def tenants(session: Session) -> list[str]:
    """Those that have a job to start, the one whose turn it is first."""
    of_tenant, is_ready = Job.tenant_id == Tenant.id, (Job.status == JobStatus.queued) & (Job.run_after <= now())
    running = select(func.count()).where(of_tenant, Job.status == JobStatus.running)
    served_at = select(func.max(Job.started_at)).where(of_tenant)
    query = (
        select(Tenant.id)
        .where(select(Job.id).where(of_tenant, is_ready).exists())
        .order_by(running.scalar_subquery(), served_at.scalar_subquery().nulls_first(), Tenant.id)
    )
    return list(session.scalars(query))


def first_of(tenant_id: str) -> Select[str]:
    """The job that a tenant wants first, among those that may start and that nobody is taking."""
    is_ready = (Job.status == JobStatus.queued) & (Job.run_after <= now())
    return (
        select(Job.id)
        .where(Job.tenant_id == tenant_id, is_ready)
        .order_by(Job.priority, Job.created_at, Job.id)
        .limit(1)
        .with_for_update(skip_locked=True)
    )


def position(session: Session, job: Job) -> int:
    """How many jobs are taken until this one is, itself included, if all tenants keep taking turns."""
    other = aliased(Job)
    is_before = or_(
        other.priority < job.priority, (other.priority == job.priority) & (other.created_at < job.created_at)
    )
    own = select(func.count()).where(other.tenant_id == job.tenant_id, other.status == JobStatus.queued, is_before)
    ahead = session.scalar(own) or 0
    queued = func.count()
    of_others = (
        select(case((queued < ahead, queued), else_=ahead).label("turns"))
        .where(Job.status == JobStatus.queued, Job.tenant_id != job.tenant_id)
        .group_by(Job.tenant_id)
        .subquery()
    )
    return 1 + ahead + (session.scalar(select(func.sum(of_others.c.turns))) or 0)

"""Whose turn it is: projects take turns, and within a project its own priority decides.

The next job is of the project that has the fewest running ones; among such, of the one that has waited longest since a
job of its was started. A project with one job therefore waits for one job of the others, however many they queue.
"""

from __future__ import annotations

from collections.abc import Collection

from sqlalchemy import Select, case, func, or_, select
from sqlalchemy.orm import Session, aliased

from app.db import now
from app.db.tables import Job, JobStatus, Project


def projects(session: Session) -> list[str]:
    """Return the projects with a job to start, the one whose turn it is first."""
    of_project, is_ready = Job.project_id == Project.id, (Job.status == JobStatus.queued) & (Job.run_after <= now())
    running = select(func.count()).where(of_project, Job.status == JobStatus.running)
    served_at = select(func.max(Job.started_at)).where(of_project)
    query = (
        select(Project.id)
        .where(select(Job.id).where(of_project, is_ready).exists())
        .order_by(running.scalar_subquery(), served_at.scalar_subquery().nulls_first(), Project.id)
    )
    return list(session.scalars(query))


def first_of(project_id: str, owner: str = "", lacks: Collection[str] = ()) -> Select[str]:
    """Select a project's first job among those that may start and that no other worker is claiming.

    Jobs that avoid the worker `owner`, and those whose base model's source is in `lacks`, are left to others.
    """
    is_ready = (Job.status == JobStatus.queued) & (Job.run_after <= now())
    is_for_owner = or_(Job.avoids.is_(None), Job.avoids != owner, Job.avoids_until <= now())
    query = select(Job.id).where(Job.project_id == project_id, is_ready, is_for_owner)
    if lacks:
        query = query.where(Job.spec[("model", "source")].as_string().not_in(lacks))
    return query.order_by(Job.priority, Job.created_at, Job.id).limit(1).with_for_update(skip_locked=True)


def position(session: Session, job: Job) -> int:
    """Return a job's position in the queue, from 1, if all projects keep taking turns."""
    other = aliased(Job)
    is_before = or_(
        other.priority < job.priority, (other.priority == job.priority) & (other.created_at < job.created_at)
    )
    own = select(func.count()).where(other.project_id == job.project_id, other.status == JobStatus.queued, is_before)
    ahead = session.scalar(own) or 0
    queued = func.count()
    of_others = (
        select(case((queued < ahead, queued), else_=ahead).label("turns"))
        .where(Job.status == JobStatus.queued, Job.project_id != job.project_id)
        .group_by(Job.project_id)
        .subquery()
    )
    return 1 + ahead + (session.scalar(select(func.sum(of_others.c.turns))) or 0)

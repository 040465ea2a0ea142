"""Whose turn it is: projects take turns, and within a project its own priority decides.

The next job is of the project that has the fewest running ones; among such, of the one that has waited longest since a
job of its was started. A project with one job therefore waits for one job of the others, however many they queue.
"""

from __future__ import annotations

from collections.abc import Collection

from sqlalchemy import Select, func, literal, or_, select
from sqlalchemy.orm import Session

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


def positions(session: Session, jobs: Collection[Job]) -> dict[str, int]:
    """Return the positions in the queue, from 1, of those of the jobs that are queued, if all projects take turns.

    However many jobs are asked about, these are two statements. One job's place is counted and not ranked, which is
    cheaper by far in a long queue.
    """
    queued_jobs = [job for job in jobs if job.status == JobStatus.queued]
    if not queued_jobs:
        return {}
    queued = select(Job.project_id, func.count()).where(Job.status == JobStatus.queued).group_by(Job.project_id)
    lengths = dict(session.execute(queued).all())
    ranks = _rank_of(queued_jobs[0]) if len(queued_jobs) == 1 else _ranks(queued_jobs)
    found = {}
    for job_id, project_id, rank in session.execute(ranks):
        ahead = rank - 1
        found[job_id] = rank + sum(min(count, ahead) for other, count in lengths.items() if other != project_id)
    return found


def _ranks(jobs: Collection[Job]) -> Select[str, str, int]:
    """Select the ids of queued jobs, their projects, and their ranks within these."""
    place = func.rank().over(partition_by=Job.project_id, order_by=(Job.priority, Job.created_at))
    of_projects = Job.project_id.in_({job.project_id for job in jobs})
    ranks = select(Job.id, Job.project_id, place.label("place")).where(of_projects, Job.status == JobStatus.queued)
    ranked = ranks.subquery()
    return select(ranked.c.id, ranked.c.project_id, ranked.c.place).where(ranked.c.id.in_([job.id for job in jobs]))


def _rank_of(job: Job) -> Select[str, str, int]:
    """Select the same of one queued job."""
    is_rival = (Job.project_id == job.project_id) & (Job.status == JobStatus.queued)
    same = (Job.priority == job.priority) & (Job.created_at < job.created_at)
    before = select(func.count() + 1).where(is_rival, or_(Job.priority < job.priority, same))
    return select(literal(job.id), literal(job.project_id), before.scalar_subquery())

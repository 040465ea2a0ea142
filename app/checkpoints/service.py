"""Checkpoints of jobs, and permissions on them; every query is within one tenant."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Select, delete, insert, select
from sqlalchemy.orm import Session

from app.checkpoints.models import CheckpointPermission, JobCheckpoint
from app.checkpoints.schemas import CheckpointList, CheckpointOut
from app.errors import NotFound
from app.jobs import lease
from app.jobs import service as jobs
from app.jobs.lease import Claim
from app.jobs.results import fine_tuned_model
from app.models import Job, new_id
from app.pages import Page, invalid_cursor, page

_NAME = re.compile(r"ft:[^\0]{1,400}:([0-9a-f]{12}):ckpt-step-([0-9]{1,9})")


def record(session: Session, claim: Claim, rows: Mapping[int, dict[str, Any]]) -> bool:
    """Keep what is known of each checkpoint; False when the lease is lost. A step made again replaces its row."""
    if not rows:
        return True
    if not lease.holds(session, claim):
        return False
    session.execute(delete(JobCheckpoint).where(JobCheckpoint.job_id == claim.job_id, JobCheckpoint.step.in_(rows)))
    new = [{"job_id": claim.job_id, "step": step, "metrics": metrics} for step, metrics in rows.items()]
    session.execute(insert(JobCheckpoint), [{"id": new_id("ftckpt_"), **row} for row in new])
    return True


def list_checkpoints(session: Session, tenant_id: str, job_id: str, after: str | None, limit: int) -> CheckpointList:
    """A job's checkpoints, the latest step first."""
    job = jobs.get(session, tenant_id, job_id)
    query = select(JobCheckpoint).where(JobCheckpoint.job_id == job.id)
    if after is not None:
        cursor = session.scalar(query.where(JobCheckpoint.id == after))
        if cursor is None:
            raise invalid_cursor(after)
        query = query.where(JobCheckpoint.step < cursor.step)
    rows = list(session.scalars(query.order_by(JobCheckpoint.step.desc()).limit(limit + 1)))
    found = Page(rows[:limit], len(rows) > limit)
    return CheckpointList(
        data=[_shown(job, row) for row in found.data],
        first_id=found.first_id,
        last_id=found.last_id,
        has_more=found.has_more,
    )


def permit(session: Session, tenant_id: str, model: str, project_ids: Sequence[str]) -> Page[CheckpointPermission]:
    """Let projects know of a checkpoint; those that may already keep the permission they have."""
    checkpoint = _checkpoint(session, tenant_id, model)
    known = {permission.project_id: permission for permission in session.scalars(_permissions(checkpoint))}
    for project_id in project_ids:
        if project_id not in known:
            known[project_id] = CheckpointPermission(
                job_id=checkpoint.job_id, step=checkpoint.step, project_id=project_id
            )
            session.add(known[project_id])
    session.flush()
    return Page([known[project_id] for project_id in dict.fromkeys(project_ids)], has_more=False)


def list_permissions(
    session: Session,
    tenant_id: str,
    model: str,
    project_id: str | None,
    after: str | None,
    limit: int,
    *,
    ascending: bool,
) -> Page[CheckpointPermission]:
    query = _permissions(_checkpoint(session, tenant_id, model))
    if project_id is not None:
        query = query.where(CheckpointPermission.project_id == project_id)
    return page(session, query, CheckpointPermission, after, limit, ascending=ascending)


def withdraw(session: Session, tenant_id: str, model: str, permission_id: str) -> CheckpointPermission:
    """Delete a permission."""
    query = _permissions(_checkpoint(session, tenant_id, model))
    permission = session.scalar(query.where(CheckpointPermission.id == permission_id))
    if permission is None:
        raise NotFound(f"No such permission: {permission_id}", code="permission_not_found", param="permission_id")
    session.delete(permission)
    return permission


def _checkpoint(session: Session, tenant_id: str, model: str) -> JobCheckpoint:
    """The checkpoint of this name; somebody else's reads as unknown."""
    if match := _NAME.fullmatch(model):
        prefix, step = match.group(1), int(match.group(2))
        same = (Job.tenant_id == tenant_id) & Job.id.startswith(f"ftjob-{prefix}")
        for job in session.scalars(select(Job).where(same)):
            checkpoint = session.get(JobCheckpoint, (job.id, step))
            if checkpoint is not None and _name(job, checkpoint) == model:
                return checkpoint
    raise NotFound(f"The checkpoint {model[:200]!r} does not exist.", code="checkpoint_not_found", param="model")


def _permissions(checkpoint: JobCheckpoint) -> Select[CheckpointPermission]:
    of_checkpoint = (CheckpointPermission.job_id == checkpoint.job_id) & (CheckpointPermission.step == checkpoint.step)
    return select(CheckpointPermission).where(of_checkpoint)


def _name(job: Job, checkpoint: JobCheckpoint) -> str:
    return f"{fine_tuned_model(job)}:ckpt-step-{checkpoint.step}"


def _shown(job: Job, checkpoint: JobCheckpoint) -> CheckpointOut:
    return CheckpointOut(
        id=checkpoint.id,
        created_at=checkpoint.created_at,
        fine_tuned_model_checkpoint=_name(job, checkpoint),
        fine_tuning_job_id=job.id,
        step_number=checkpoint.step,
        metrics={"step": checkpoint.step, **checkpoint.metrics},
    )

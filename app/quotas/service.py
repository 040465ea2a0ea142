"""Limits of projects, held in the transaction that would pass them: the project's row is locked while one counts."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from app.audit_log import service as audit_log
from app.errors import NotFound, QuotaExceeded
from app.files.service import FINE_TUNE
from app.jobs.models import Tombstone
from app.models import TERMINAL, File, Job, Tenant, utc_now
from app.quotas.models import Quota
from app.quotas.schemas import ProjectOut, QuotaSet, Usage

_DAY, _MONTH = timedelta(days=1), timedelta(days=30)


def check_job(session: Session, tenant_id: str) -> None:
    """Refuse one more job where a limit is reached."""
    quota = _locked(session, tenant_id)
    if quota is None:
        return
    if quota.max_unfinished_jobs is not None:
        open_jobs = select(func.count()).where(Job.tenant_id == tenant_id, Job.status.not_in(TERMINAL))
        _hold(session.scalar(open_jobs) or 0, quota.max_unfinished_jobs, "jobs that have not ended")
    if quota.max_jobs_per_day is not None:
        _hold(_sum(session, tenant_id, _DAY, "count"), quota.max_jobs_per_day, "jobs in 24 hours")
    if quota.max_gpu_seconds is not None:
        used = _sum(session, tenant_id, _MONTH, "gpu_seconds")
        _hold(used, quota.max_gpu_seconds, "GPU seconds of jobs made in the last 30 days")


def check_file(session: Session, file: File) -> None:
    """Refuse a file that would take its project over a limit; to be called before it is added."""
    quota = _locked(session, file.tenant_id)
    if quota is None:
        return
    of_tenant = (File.tenant_id == file.tenant_id) & (File.purpose == FINE_TUNE)
    held = select(func.sum(File.bytes), func.sum(File.rows)).where(of_tenant)
    size, rows = (int(each or 0) for each in session.execute(held).one())
    if quota.max_file_bytes is not None and size + file.bytes > quota.max_file_bytes:
        raise _exceeded(f"{quota.max_file_bytes} bytes of files", f"it holds {size}, and this file has {file.bytes}")
    if quota.max_file_rows is not None and rows + (file.rows or 0) > quota.max_file_rows:
        raise _exceeded(f"{quota.max_file_rows} rows of files", f"it holds {rows}, and this file has {file.rows or 0}")


def request_rate(session: Session, tenant_id: str, default: int | None) -> int | None:
    """Requests a minute that a project may make, None without a limit."""
    own = session.scalar(select(Quota.requests_per_minute).where(Quota.tenant_id == tenant_id))
    return default if own is None else own


def set_quota(session: Session, project_id: str, ask: QuotaSet) -> ProjectOut:
    """Give a project new limits; they replace all that it had."""
    tenant = _tenant(session, project_id)
    session.merge(Quota(tenant_id=tenant.id, **ask.model_dump()))
    session.flush()
    audit_log.record(session, "quota.set", tenant.id, **ask.model_dump(mode="json"))
    return _shown(session, tenant)


def create_project(session: Session, name: str) -> ProjectOut:
    tenant = Tenant(name=name)
    session.add(tenant)
    session.flush()
    audit_log.record(session, "project.created", tenant.id, name=name)
    return _shown(session, tenant)


def projects(session: Session) -> list[ProjectOut]:
    """All projects, the oldest first."""
    return [
        _shown(session, tenant) for tenant in session.scalars(select(Tenant).order_by(Tenant.created_at, Tenant.id))
    ]


def project(session: Session, project_id: str) -> ProjectOut:
    return _shown(session, _tenant(session, project_id))


def usage(session: Session, since: datetime, until: datetime) -> list[Usage]:
    """What each project has used with the jobs made from `since` until before `until`, and what it stores now."""
    found: dict[str, dict[str, Any]] = {}
    for table in (Job, Tombstone):
        query = (
            select(table.tenant_id, func.count(), func.sum(table.gpu_seconds), func.sum(table.trained_tokens))
            .where(table.created_at >= since, table.created_at < until)
            .group_by(table.tenant_id)
        )
        for tenant_id, jobs, seconds, tokens in session.execute(query):
            row = found.setdefault(tenant_id, {"jobs": 0, "gpu_seconds": 0.0, "trained_tokens": 0})
            row["jobs"] += jobs
            row["gpu_seconds"] = round(row["gpu_seconds"] + (seconds or 0.0), 3)
            row["trained_tokens"] += int(tokens or 0)
    stored = select(File.tenant_id, func.sum(File.bytes), func.sum(File.rows)).group_by(File.tenant_id)
    for tenant_id, size, rows in session.execute(stored):
        row = found.setdefault(tenant_id, {"jobs": 0, "gpu_seconds": 0.0, "trained_tokens": 0})
        row |= {"file_bytes": int(size), "file_rows": int(rows or 0)}
    return [Usage(project_id=tenant_id, **found[tenant_id]) for tenant_id in sorted(found)]


def _locked(session: Session, tenant_id: str) -> Quota | None:
    """The project's limits; others that would count wait until this transaction ends."""
    quota = session.get(Quota, tenant_id)
    if quota is not None:
        session.execute(select(Tenant.id).where(Tenant.id == tenant_id).with_for_update(key_share=True))
    return quota


def _sum(session: Session, tenant_id: str, within: timedelta, what: str) -> float:
    """Over a project's jobs of late, those that were erased included."""
    total = 0.0
    for table in (Job, Tombstone):
        column = func.count() if what == "count" else func.sum(table.gpu_seconds)
        of_late = (table.tenant_id == tenant_id) & (table.created_at > utc_now() - within)
        total += session.scalar(select(column).select_from(table).where(of_late)) or 0
    return total


def _hold(used: float, limit: float, what: str) -> None:
    if used >= limit:
        raise _exceeded(f"{limit:g} {what}", f"it has {used:g}")


def _exceeded(limit: str, state: str) -> QuotaExceeded:
    return QuotaExceeded(f"Your project may have {limit}: {state}. Ask the provider for more.")


def _tenant(session: Session, project_id: str) -> Tenant:
    tenant = session.get(Tenant, project_id)
    if tenant is None:
        raise NotFound(f"No such project: {project_id}", code="project_not_found", param="project_id")
    return tenant


def _shown(session: Session, tenant: Tenant) -> ProjectOut:
    quota = session.get(Quota, tenant.id)
    limits = QuotaSet.model_validate(quota) if quota else QuotaSet()
    return ProjectOut(id=tenant.id, name=tenant.name, created_at=tenant.created_at, quota=limits)

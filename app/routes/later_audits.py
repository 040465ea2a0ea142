"""Later audits: today's audit of models that were released before."""

from __future__ import annotations

from fastapi import APIRouter

from app.db.tables import LaterAudit
from app.deps import AdminDep, CustomerDep, ProviderSessionDep, ReadDep, SettingsDep
from app.jobs import later_audits
from app.jobs import service as jobs
from app.jobs.later_audits import LaterAuditCreate, LaterAuditList, LaterAuditOfProvider

admin = APIRouter(prefix="/v1/admin/jobs/{job_id}/later_audits", tags=["provider"])
of_jobs = APIRouter(prefix="/v1/fine_tuning/jobs", tags=["fine-tuning"])


@admin.post("", response_model=LaterAuditOfProvider)
def ask_later_audit(
    job_id: str, ask: LaterAuditCreate, session: ProviderSessionDep, caller: AdminDep, settings: SettingsDep
) -> LaterAudit:
    """Audit a released model or checkpoint with today's audit; only a pass keeps it released."""
    return later_audits.ask_by_name(session, caller.key_id, job_id, ask.step, settings)


@of_jobs.get("/{job_id}/later_audits", response_model=LaterAuditList)
def list_later_audits(job_id: str, session: ReadDep, caller: CustomerDep) -> dict[str, object]:
    """List the decisions of later audits on a job's model and checkpoints, each with its signed record."""
    return {"data": later_audits.of_job(session, jobs.get(session, caller.project_id, job_id).id)}

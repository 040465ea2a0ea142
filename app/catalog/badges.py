"""Marks of models in lists: served without attestation, released by an older audit, or audited again later.

A later audit overrides the audit that released the model: if it did not pass, the model is withheld whatever the policy
says; if it passed, the model has the later audit's version.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from sqlalchemy import ColumnElement, ScalarSelect, and_, func, or_, select
from sqlalchemy.orm import Session
from sqlalchemy.orm.attributes import InstrumentedAttribute

from app.catalog.schemas import ModelOut
from app.db.tables import Job, LaterAudit
from app.db.tables.jobs import WHOLE_JOB
from app.policies import service as policies
from app.policies.schemas import Serving
from spard.release.version import AUDIT_VERSION

PASSED = "pass"


def mark_attestation(model: ModelOut, serving: Serving) -> ModelOut:
    """Return the model, marked with `attested=False` if an unattested server answers for it."""
    is_named = any(each.model == model.id for each in serving.unattested)
    return model.model_copy(update={"attested": False}) if is_named else model


def mark_audit(model: ModelOut, safety: Mapping[str, object] | None, later: LaterAudit | None) -> ModelOut:
    """Return the model, marked with the version of its audit if that is older than today's, and of its later audit."""
    again = later.audit_version if later else None
    older = older_audit(safety) if again is None else again if again < AUDIT_VERSION else None
    return model.model_copy(update={"older_audit": older, "later_audit": again})


def older_audit(safety: Mapping[str, object] | None) -> int | None:
    """Return the version of a job's or checkpoint's audit if it is older than today's, else None.

    Results without a version are of version 1.
    """
    version = (safety or {}).get("audit_version", 1)
    return version if isinstance(version, int) and version < AUDIT_VERSION else None


def is_withheld(session: Session, safety: Mapping[str, object] | None, later: LaterAudit | None) -> bool:
    """Return True if a released model is withheld: by its later audit, or by the policy for older audits."""
    if later is not None and later.decision != PASSED:
        return True
    is_of_today = older_audit(safety) is None or (later is not None and later.audit_version >= AUDIT_VERSION)
    return not is_of_today and not serves_older(policies.serving(session))


def serves_older(serving: Serving) -> bool:
    """Return True if the policy serves models whose only decision is by an older audit."""
    return serving.older_audits == "serve" or (serving.older_audits == "ask_again" and serving.until_asked == "serve")


def latest(session: Session, job_id: str, step: int = WHOLE_JOB) -> LaterAudit | None:
    """Return the last decided later audit of a job's model (or of the checkpoint of `step`), or None."""
    of_model = (LaterAudit.job_id == job_id) & (LaterAudit.step == step) & LaterAudit.decided_at.is_not(None)
    return session.scalar(select(LaterAudit).where(of_model).order_by(LaterAudit.round.desc()).limit(1))


def latest_by_job(session: Session, job_ids: Iterable[str]) -> dict[str, LaterAudit]:
    """Return the last decided later audit of each job's model, by job id, with one query."""
    found = select(LaterAudit).where(LaterAudit.job_id.in_(list(job_ids)), LaterAudit.step == WHOLE_JOB)
    rows = session.scalars(found.where(LaterAudit.decided_at.is_not(None)).order_by(LaterAudit.round))
    return {each.job_id: each for each in rows}


def is_there(serving: Serving) -> ColumnElement[bool]:
    """Return the SQL condition for jobs whose model is not withheld; it mirrors `is_withheld`."""
    decision, version = _latest(LaterAudit.decision), _latest(LaterAudit.audit_version)
    is_passed = or_(decision.is_(None), decision == PASSED)
    if serves_older(serving):
        return is_passed
    own = Job.safety["audit_version"].as_integer()
    return and_(is_passed, or_(func.coalesce(own, 1) >= AUDIT_VERSION, version >= AUDIT_VERSION))


def _latest(column: InstrumentedAttribute[Any]) -> ScalarSelect[Any]:
    of_job = (LaterAudit.job_id == Job.id) & (LaterAudit.step == WHOLE_JOB) & LaterAudit.decided_at.is_not(None)
    return select(column).where(of_job).order_by(LaterAudit.round.desc()).limit(1).scalar_subquery()

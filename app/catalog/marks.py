"""What a model is marked with where people look: a server that proves nothing, and an earlier kind of audit.

A later audit that has decided counts more than the one that released the model: what it did not pass is withheld,
whatever the policy says, and what it passed has its version.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from sqlalchemy import ColumnElement, ScalarSelect, and_, func, or_, select
from sqlalchemy.orm import Session
from sqlalchemy.orm.attributes import InstrumentedAttribute

from app.catalog.schemas import ModelOut
from app.db.tables import Job, LaterAudit
from app.db.tables.later_audits import WHOLE_JOB
from app.policies import service as policies
from app.policies.schemas import Serving
from spard.release.version import AUDIT_VERSION

PASSED = "pass"


def mark_attestation(model: ModelOut, serving: Serving) -> ModelOut:
    """Return a model, marked if a server answers for it that cannot prove what it has loaded."""
    is_named = any(each.model == model.id for each in serving.unattested)
    return model.model_copy(update={"attested": False}) if is_named else model


def mark_audit(model: ModelOut, safety: Mapping[str, object] | None, later: LaterAudit | None) -> ModelOut:
    """Return a model, marked with the audit that it stands on if that is an earlier one, or a later than its own."""
    again = later.audit_version if later else None
    older = older_audit(safety) if again is None else again if again < AUDIT_VERSION else None
    return model.model_copy(update={"older_audit": older, "later_audit": again})


def older_audit(safety: Mapping[str, object] | None) -> int | None:
    """Return the version of the audit behind a job's or a checkpoint's numbers if it is an earlier one, else None.

    The first version did not say which it was.
    """
    version = (safety or {}).get("audit_version", 1)
    return version if isinstance(version, int) and version < AUDIT_VERSION else None


def is_withheld(session: Session, safety: Mapping[str, object] | None, later: LaterAudit | None) -> bool:
    """Tell whether a released model is withheld: by its `later` audit, or by the policy for its audit's version."""
    if later is not None and later.decision != PASSED:
        return True
    is_of_today = older_audit(safety) is None or (later is not None and later.audit_version >= AUDIT_VERSION)
    return not is_of_today and not serves_older(policies.serving(session))


def serves_older(serving: Serving) -> bool:
    """Tell whether a policy serves what an earlier audit released and no later one has decided on."""
    return serving.older_audits == "serve" or (serving.older_audits == "ask_again" and serving.until_asked == "serve")


def latest(session: Session, job_id: str, step: int = WHOLE_JOB) -> LaterAudit | None:
    """Return the last audit of a released model that has decided, or None."""
    of_model = (LaterAudit.job_id == job_id) & (LaterAudit.step == step) & LaterAudit.decided_at.is_not(None)
    return session.scalar(select(LaterAudit).where(of_model).order_by(LaterAudit.round.desc()).limit(1))


def latest_by_job(session: Session, job_ids: Iterable[str]) -> dict[str, LaterAudit]:
    """Return the same of what several jobs have made, by job, from one statement."""
    found = select(LaterAudit).where(LaterAudit.job_id.in_(list(job_ids)), LaterAudit.step == WHOLE_JOB)
    rows = session.scalars(found.where(LaterAudit.decided_at.is_not(None)).order_by(LaterAudit.round))
    return {each.job_id: each for each in rows}


def is_there(serving: Serving) -> ColumnElement[bool]:
    """Match the jobs whose model is not withheld, as `is_withheld` tells of one."""
    decision, version = _latest(LaterAudit.decision), _latest(LaterAudit.audit_version)
    is_passed = or_(decision.is_(None), decision == PASSED)
    if serves_older(serving):
        return is_passed
    own = Job.safety["audit_version"].as_integer()
    return and_(is_passed, or_(func.coalesce(own, 1) >= AUDIT_VERSION, version >= AUDIT_VERSION))


def _latest(column: InstrumentedAttribute[Any]) -> ScalarSelect[Any]:
    of_job = (LaterAudit.job_id == Job.id) & (LaterAudit.step == WHOLE_JOB) & LaterAudit.decided_at.is_not(None)
    return select(column).where(of_job).order_by(LaterAudit.round.desc()).limit(1).scalar_subquery()

"""Record the decisions of later audits, and announce them to the users of the audited model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy import or_, select
from sqlalchemy.orm import Session

from app import audit_log
from app.catalog.service import PASSED
from app.db.base import utc_now
from app.db.tables import TERMINAL, Job, LaterAudit
from app.db.tables.job_spec import JobSpec
from app.db.tables.jobs import WHOLE_JOB
from app.jobs import events, transitions
from app.objects import served_adapters
from app.webhooks.delivery import announce_audit
from spard.release.manifest import sign_bytes

_UNDECIDED = "inconclusive"


def decide(session: Session, audit_job: Job, found: dict[str, Any], key: Ed25519PrivateKey) -> None:
    """Record a later audit's findings with a signed record of them.

    Called in the transaction in which the worker that holds the lease of `audit_job` ends that job. `found` is the
    audit's result with `gate` and `audit_version`; `key` signs the record.
    """
    audit = session.scalar(select(LaterAudit).where(LaterAudit.audit_job_id == audit_job.id).with_for_update())
    if audit is None or audit_job.spec.audited is None:
        return  # the model was erased meanwhile
    gate = found["gate"]
    facts = (
        found
        | _provenance(audit_job.spec)
        | {
            "later_audit_id": audit.id,
            "job_id": audit.job_id,
            "step": audit.step or None,
            "archive_sha256": audit_job.spec.audited.sha256,
            "asked_at": int(audit.created_at.timestamp()),
            "decided_at": int(utc_now().timestamp()),
        }
    )
    # The text is stored, because the signature holds for these bytes only.
    audit.record = json.dumps(facts, indent=2, sort_keys=True)
    audit.signature = dict(sign_bytes(audit.record.encode(), key))
    audit.audit_version = found["audit_version"]
    _settle(session, audit, gate["decision"], gate["reasons"])


def close(session: Session, audit: LaterAudit, why: str) -> None:
    """Settle an audit that did not run to its end as inconclusive, with `why` as its reason."""
    _settle(session, audit, _UNDECIDED, [why])


def close_ended(session: Session) -> None:
    """Settle the audits that have no decision although their job has ended or was erased."""
    is_over = or_(Job.id.is_(None), Job.status.in_(TERMINAL))
    query = select(LaterAudit, Job).outerjoin(Job, Job.id == LaterAudit.audit_job_id)
    for audit, job in session.execute(query.where(LaterAudit.decided_at.is_(None), is_over)).all():
        # A worker may have decided it since the query; only the locked row tells.
        session.refresh(audit, with_for_update=True)
        if audit.decided_at is None:
            error = job.error["message"] if job and job.error else "it was cancelled"
            close(session, audit, f"The audit could not be completed: {error}")


def forget(session: Session, job_id: str) -> None:
    """Cancel the unfinished audits of a job that is about to be erased, so that they stop using its files."""
    open_ones = select(LaterAudit.audit_job_id).where(LaterAudit.job_id == job_id, LaterAudit.decided_at.is_(None))
    for audit_job_id in session.scalars(open_ones).all():
        if audit_job_id is not None:
            transitions.request_cancel(session, audit_job_id)


def _provenance(spec: JobSpec) -> dict[str, object]:
    """Return the policy, suites, training file and pool of an audit, by version and digest."""
    return {
        "policy_version": spec.policy.version,
        "suites": [{"name": each.name, "version": each.version, "sha256": each.sha256} for each in spec.suites],
        "training_file_sha256": spec.training_file.sha256,
        "pool_sha256": spec.pool.sha256 if spec.pool else None,
    }


def _settle(session: Session, audit: LaterAudit, decision: str, reasons: Sequence[str]) -> None:
    audit.decision, audit.reasons, audit.decided_at = decision, list(reasons), utc_now()
    session.flush()
    level, told = ("info", "stays released") if decision == PASSED else ("warn", "is withheld")
    message = (
        f"{model_display_name(audit.step)} {told}: a later audit of version {audit.audit_version} came to {decision}"
    )
    events.append(session, audit.job_id, level, "message", message, {"reasons": audit.reasons, "audit": audit.id})
    announce_audit(session, audit.job_id)
    if decision != PASSED:
        served_adapters.condemn_job(session, audit.job_id)  # servers reload the job's models that are still released
    audit_log.record(session, "audit.decided", audit.id, job=audit.job_id, step=audit.step, decision=decision)


def model_display_name(step: int) -> str:
    """Return the name of a job's model, or of its checkpoint at `step`, in events and errors."""
    return "The model" if step == WHOLE_JOB else f"The checkpoint of step {step}"

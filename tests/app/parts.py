"""Claims of a test's own, what may be written with them, and what is then known of the job."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Engine, select, update
from sqlalchemy.orm import Session

from app.checkpoints.records import EpochResult
from app.db import now, read, transaction
from app.db.tables import Job, JobEvent
from app.db.tables.job_records import Adapter, JobError
from app.db.tables.job_spec import JobSpec, ModelRef, ObjectRef, PolicyRef
from app.db.tables.jobs import EPOCH
from app.jobs import lease
from app.jobs.lease import Claim, Publication, Rejection

SPEC = JobSpec(
    model=ModelRef(alias="tiny", source="/models/tiny"),
    training_file=ObjectRef(id="file-1", sha256="0", storage_key="files/1"),
    policy=PolicyRef(),
    judge="refusal",
)
PUBLICATION = Publication(
    fine_tuned_model="ft:tiny:org::1",
    trained_tokens=7,
    result_files=["file-csv", "file-adapter", "file-report"],
    adapter={"storage_key": "a1/adapter.tar.gz", "sha256": "0", "bytes": 1},
    safety={"gate": {"decision": "pass", "reasons": []}},
    report_key="a1/safety.json",
    audit_results=[
        {"suite": "s", "subject": "base", "kind": "harmful", "judge": "refusal", "n": 2, "n_unscored": 0, "hits": 1}
    ],
)
REJECTION = Rejection("ASR 0.4 is above 0.1.", 7, ["file-csv"], {"gate": {"decision": "fail"}}, "a1/safety.json")
ERROR: JobError = {"code": "non_finite_loss", "message": "The loss is not finite at step 3.", "param": None}


def epoch_end(loss: float, decision: str | None = "pass", archive: Adapter | None = None) -> EpochResult:
    """The end of an epoch; without a decision it was not audited."""
    nothing: dict[str, Any] = {"base": None, "adapter": None}
    safety: Any = None
    if decision:
        names = ("asr", "harmfulness_score", "over_refusal", "utility")
        safety = {"gate": {"decision": decision, "reasons": []}} | dict.fromkeys(names, nothing)
    return EpochResult(EPOCH, {"train_loss": loss}, safety, archive)


def claim_next(engine: Engine) -> Claim:
    with transaction(engine) as session:
        return claim_job(session)


def claim_job(session: Session) -> Claim:
    claim = lease.claim(session, "worker", 60)
    assert claim
    return claim


def expire(engine: Engine, job_id: str) -> None:
    with transaction(engine) as session:
        session.execute(update(Job).where(Job.id == job_id).values(lease_expires_at=now() - 1))


def read_job(engine: Engine, job_id: str) -> Job:
    with read(engine) as session:
        return session.get_one(Job, job_id)


def messages(engine: Engine, job_id: str) -> list[str]:
    with read(engine) as session:
        of_job = select(JobEvent.message).where(JobEvent.job_id == job_id).order_by(JobEvent.seq)
        return list(session.scalars(of_job))


def facts(engine: Engine, job_id: str) -> Any:
    """Everything that is known of a job."""
    with read(engine) as session:
        job = session.execute(select(*Job.__table__.columns).where(Job.id == job_id)).one()
    return job, messages(engine, job_id)

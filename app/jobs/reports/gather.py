"""What the page of a job is made of: the rows in one transaction, then, without one, the reports from the storage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session

from app.db.tables import Job
from app.errors import NotFound
from app.files import service as files
from app.jobs import restarts, service
from app.jobs.reports.artifacts import Artifacts, artifacts
from app.jobs.reports.service import read_report
from app.jobs.reports.verdict import Verdict, verdict
from app.jobs.reports.view import View, view
from app.jobs.schemas import JobOut, StepMetrics, VerdictOut
from app.storage import Storage
from spard.release.report import SafetyReport

_LOOKED_AT = 50  # jobs on the same file, the newest first


@dataclass(frozen=True, slots=True)
class Gathered:
    """A job, its steps, and where its report lies and that of the same file without a defense; None: there is none."""

    job: JobOut
    metrics: Sequence[StepMetrics]
    report_key: str | None
    undefended_key: str | None
    restarts: Sequence[int]  # the last step before each
    artifacts: Artifacts
    findings: Mapping[str, int] | None  # of the training file by their codes; None: the file is gone


@dataclass(frozen=True, slots=True)
class Seen:
    """A job with its reports as records."""

    job: JobOut
    metrics: Sequence[StepMetrics]
    report: SafetyReport | None
    undefended: SafetyReport | None
    restarts: Sequence[int]
    artifacts: Artifacts
    findings: Mapping[str, int] | None

    def verdict(self) -> Verdict:
        """Return what the job has come to, in a sentence."""
        return verdict(self.job, self.report, self.undefended)

    def view(self) -> View:
        """Return what its pages show."""
        return view(self.job, self.report, self.metrics, self.undefended, self.restarts)


def gather(session: Session, project_id: str, job_id: str) -> Gathered:
    """Look up a job of the project; `NotFound` for another project's."""
    job = service.get(session, project_id, job_id)
    undefended = undefended_twin(session, job)
    return Gathered(
        service.retrieve(session, project_id, job_id),
        service.metrics(session, project_id, job_id),
        job.report_key,
        undefended.report_key if undefended else None,
        restarts.steps(session, job_id),
        artifacts(session, job),
        _findings(session, job),
    )


def read(storage: Storage, gathered: Gathered) -> Seen:
    """Read the reports."""
    report, undefended = (
        read_report(storage, key) if key else None for key in (gathered.report_key, gathered.undefended_key)
    )
    return Seen(
        gathered.job,
        gathered.metrics,
        report,
        undefended,
        gathered.restarts,
        gathered.artifacts,
        gathered.findings,
    )


def verdict_of(seen: Seen) -> VerdictOut:
    """Return the words that a job's page begins with."""
    words = seen.verdict()
    return VerdictOut(
        job_id=seen.job.id,
        look=words.look,
        pill=words.pill,
        headline="".join(part.text for part in words.headline),
        sentence=words.sentence,
        reasons=list(words.reasons),
    )


def _findings(session: Session, job: Job) -> Mapping[str, int] | None:
    try:
        return files.validation(session, job.project_id, job.training_file).counts
    except NotFound:
        return None


def undefended_twin(session: Session, job: Job) -> Job | None:
    """Return the newest measured job of the project that trained the same model on the same bytes without a defense."""
    if job.recipe["defense"]["type"] == "none":
        return None
    same = (Job.project_id == job.project_id) & (Job.model == job.model) & Job.report_key.is_not(None)
    query = select(Job).where(same, Job.id != job.id).order_by(Job.created_at.desc()).limit(_LOOKED_AT)
    return next((each for each in session.scalars(query) if _is_twin(each, job)), None)


def _is_twin(other: Job, job: Job) -> bool:
    file = job.spec.training_file.sha256
    return other.recipe["defense"]["type"] == "none" and other.spec.training_file.sha256 == file

"""What pages of jobs are made of: the rows in one transaction, then, without one, the reports from the storage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from app import db
from app.jobs import job_log, scheduling
from app.jobs.job_log import JobLog
from app.jobs.reports import page_rows
from app.jobs.reports.artifacts import Artifacts, artifacts
from app.jobs.reports.page_rows import JobFile, Later, PageJob
from app.jobs.reports.service import read_report
from app.jobs.reports.verdict import Verdict, verdict
from app.jobs.reports.view import View, view
from app.jobs.schemas import JobOut, VerdictOut, job_response
from app.storage import Storage
from spard.release.report import SafetyReport


@dataclass(frozen=True, slots=True)
class Gathered:
    """A job, and where its report lies and that of the same file without a defense; None: there is none.

    The rest is for the job's own page, and empty elsewhere.
    """

    job: JobOut
    report_key: str | None
    undefended_key: str | None
    log: JobLog = JobLog()  # noqa: RUF009 - it is frozen
    artifacts: Artifacts = Artifacts((), None)  # noqa: RUF009
    findings: Mapping[str, int] | None = None  # of the training file by their codes; None: unmeasured, or it is gone
    later: Sequence[Later] = ()


@dataclass(frozen=True, slots=True)
class Seen:
    """A job with its reports as records."""

    found: Gathered
    report: SafetyReport | None
    undefended: SafetyReport | None

    @property
    def job(self) -> JobOut:
        """The job itself."""
        return self.found.job

    def verdict(self) -> Verdict:
        """Return what the job has come to, in a sentence."""
        return verdict(self.job, self.report, self.undefended)

    def view(self) -> View:
        """Return what its pages show."""
        log = self.found.log
        return view(self.job, self.report, log.metrics, self.undefended, log.restarts)


def gather(reader: db.Reader, project_id: str | None, job_id: str) -> Gathered:
    """Look up all that the page of a job shows, of the project's or of any; `NotFound` where there is none.

    These are five statements at most: of a job that waits two are about its place in the queue, of one that was
    measured one finds the job without a defense, and files are looked for where it has left some.
    """
    job = page_rows.one(reader, project_id, job_id)
    [found] = _places_and_reports(reader, [job])
    left = page_rows.job_files(reader, job)
    return Gathered(
        found.job,
        found.report_key,
        found.undefended_key,
        job_log.read(reader, job_id),
        artifacts(job, left),
        _findings(job, left),
        job.later,
    )


def gather_reports(reader: db.Reader, project_id: str, job_ids: Collection[str]) -> list[Gathered]:
    """Look up jobs of the project and where their reports lie, no more; `NotFound` for another project's."""
    return _places_and_reports(reader, page_rows.several(reader, project_id, job_ids))


def read(storage: Storage, gathered: Gathered) -> Seen:
    """Read the reports."""
    report, undefended = (
        read_report(storage, key) if key else None for key in (gathered.report_key, gathered.undefended_key)
    )
    return Seen(gathered, report, undefended)


def verdict_response(seen: Seen) -> VerdictOut:
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


def _places_and_reports(reader: db.Reader, jobs: Collection[PageJob]) -> list[Gathered]:
    places = scheduling.places(reader, [job.row for job in jobs])
    undefended = page_rows.undefended_reports(reader, jobs)
    found = [(job_response(job.row, places.get(job.row.id)), job) for job in jobs]
    for told, job in found:
        told.filename = job.filename
    return [Gathered(told, job.report_key, undefended.get(told.id)) for told, job in found]


def _findings(job: PageJob, left: Mapping[str, JobFile]) -> Mapping[str, int] | None:
    file = left.get(job.row.training_file)
    return None if file is None else Counter(problem["code"] for problem in file.problems or [])

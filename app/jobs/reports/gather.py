"""Gather what job pages show: rows in one transaction, then the reports from storage outside of it."""

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
    """A job with the storage keys of its report and of its undefended twin's report; None if there is none.

    The other fields are for the job's own page, and empty elsewhere.
    """

    job: JobOut
    report_key: str | None
    undefended_key: str | None
    log: JobLog = JobLog()  # noqa: RUF009 - it is frozen
    artifacts: Artifacts = Artifacts((), None)  # noqa: RUF009
    findings: Mapping[str, int] | None = None  # counts of the training file's problems by code
    later: Sequence[Later] = ()


@dataclass(frozen=True, slots=True)
class Seen:
    """A job with its reports loaded."""

    found: Gathered
    report: SafetyReport | None
    undefended: SafetyReport | None

    @property
    def job(self) -> JobOut:
        """The job itself."""
        return self.found.job

    def verdict(self) -> Verdict:
        """Return the job's outcome in words."""
        return verdict(self.job, self.report, self.undefended)

    def view(self) -> View:
        """Return what the job's pages show."""
        log = self.found.log
        return view(self.job, self.report, log.metrics, self.undefended, log.restarts)


def gather(reader: db.Reader, project_id: str | None, job_id: str) -> Gathered:
    """Look up everything that a job's page shows; `project_id` None means a job of any project.

    Runs five statements at most: a waiting job needs two for its place in the queue, an audited job one for its twin,
    and files are looked up if there are any. Raises `NotFound` if there is no such job.
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
    """Look up jobs of the project and the storage keys of their reports, in the order of `job_ids`.

    Raises `NotFound` if one of them is missing.
    """
    return _places_and_reports(reader, page_rows.several(reader, project_id, job_ids))


def read(storage: Storage, gathered: Gathered) -> Seen:
    """Load the reports from storage."""
    report, undefended = (
        read_report(storage, key) if key else None for key in (gathered.report_key, gathered.undefended_key)
    )
    return Seen(gathered, report, undefended)


def verdict_response(seen: Seen) -> VerdictOut:
    """Return the API's object for the verdict that a job's page begins with."""
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

"""Gather what job pages show: rows in one transaction, then the reports from storage outside of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from app import db
from app.db.tables import JobStatus
from app.jobs import job_log, scheduling
from app.jobs.job_log import JobLog
from app.jobs.reports import page_rows
from app.jobs.reports.page_rows import JobFile, Later, PageJob
from app.jobs.reports.service import read_report
from app.jobs.reports.verdict import Verdict, verdict
from app.jobs.reports.view import View, view
from app.jobs.rows import JobRow
from app.jobs.schemas import JobOut, VerdictOut, job_response
from app.storage import Storage
from spard.release.archive import folder_name
from spard.release.report import SafetyReport

# List the files that a job offers for download, with digests and the commands to verify, load and serve them.

_VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # the values that --max-lora-rank accepts


@dataclass(frozen=True, slots=True)
class Artifact:
    """One file: its name, download address, size in bytes and digest."""

    name: str
    href: str
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Lines:
    """Commands to run after the download, in the folder of the archive; `load` is Python.

    `beside` is the base model's folder, which must lie there too; empty if the hub has the model.
    """

    verify: str
    load: str
    serve: str
    beside: str = ""


@dataclass(frozen=True, slots=True)
class Artifacts:
    """The files of a job, and the commands for its adapter; `lines` is None while there is no adapter."""

    files: tuple[Artifact, ...]
    lines: Lines | None


def artifacts(kept: PageJob, left: Mapping[str, JobFile]) -> Artifacts:
    """List the files of a job that still exist; `left` maps their ids to files."""
    job, adapter = kept.row, kept.adapter if kept.row.status == JobStatus.succeeded else None
    own = adapter["storage_key"] if adapter else ""
    found = [
        Artifact(file.filename, f"/v1/files/{file.id}/content", file.bytes, file.sha256)
        for file in map(left.get, job.result_files or [])
        if file is not None and file.storage_key != own
    ]
    if adapter is None:
        return Artifacts(tuple(found), None)
    archive = Artifact(
        f"{job.id}-adapter.tar.gz", f"/v1/fine_tuning/jobs/{job.id}/adapter", adapter["bytes"], adapter["sha256"]
    )
    return Artifacts((archive, *found), _lines(job, archive.name))


def _lines(job: JobRow, archive: str) -> Lines:
    folder, lora = folder_name(job.id), job.recipe["lora"]
    verify = f"spard verify {archive} --key-set signing_keys.json\ntar xzf {archive}"
    kind = "AutoModelForCausalLM" if lora is None else "AutoPeftModelForCausalLM"
    load = (
        f"from {'transformers' if lora is None else 'peft'} import {kind}\nfrom transformers import AutoTokenizer\n\n"
        f'tokenizer = AutoTokenizer.from_pretrained("{folder}")\nmodel = {kind}.from_pretrained("{folder}")'
    )
    if lora is None:
        return Lines(verify, load, f"vllm serve {folder}")
    source, revision = job.spec.model.source, job.spec.model.revision
    beside = "" if revision else PurePath(source).name  # the rest of the path is private to the provider
    base = beside or f"{source} --revision {revision}"
    rank = next((each for each in _VLLM_RANKS if each >= lora["rank"]), lora["rank"])
    options = f"--tokenizer {folder} --enable-lora --max-lora-rank {rank} --lora-modules tuned={folder}"
    return Lines(verify, load, f"vllm serve {base} {options}", beside)


@dataclass(frozen=True, slots=True)
class Gathered:
    """A job with the storage keys of its report and of its undefended twin's report; None if there is none.

    The other fields are for the job's own page, and empty elsewhere.
    """

    job: JobOut
    report_key: str | None
    undefended_key: str | None
    log: JobLog = JobLog()  # noqa: RUF009 - it is frozen
    artifacts: Artifacts = Artifacts((), None)
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

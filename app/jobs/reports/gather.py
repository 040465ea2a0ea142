"""Gather what job pages show: rows in one transaction, then the reports from storage outside of it.

A safety report is also rendered as one self-contained HTML file, in which untrusted text is escaped.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import PurePath
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape
from sqlalchemy import ColumnElement, Select, Text, bindparam, cast, literal, literal_column, null, select, union_all
from typing_extensions import TypedDict

from app import db
from app.db.tables import DeletedModel, File, Job, JobEvent, JobMetric, JobStatus, LaterAudit
from app.db.tables.job_records import Adapter
from app.files import service as files
from app.help import link_first, note_code, note_term, term_names
from app.jobs import events, rows, scheduling
from app.jobs.blocking_rows import IS_ABOUT_ROWS, BlockingRows
from app.jobs.reports.service import read_report
from app.jobs.reports.verdict import Verdict, verdict
from app.jobs.reports.view import View, view
from app.jobs.rows import ALL, JobRow
from app.jobs.schemas import JobOut, StepMetrics, VerdictOut, job_response
from app.storage import Storage
from spard.release.archive import folder_name
from spard.release.report import SafetyReport

# Read a job's log for its page in one statement: last messages, step metrics and restarts.

_SHOWN = 100  # messages, the last ones


class Line(NamedTuple):
    """A message of the log, or one step's metrics or named rows as JSON; `number` orders lines of the same kind."""

    kind: str  # message | restart | rows | step
    number: int
    created_at: datetime | None  # of messages, as their level
    level: str | None
    text: str


@dataclass(frozen=True, slots=True)
class JobLog:
    """The last messages, newest first; the metrics of every step; the last step before each restart; named rows."""

    messages: Sequence[Line] = ()
    metrics: Sequence[StepMetrics] = ()
    restarts: Sequence[int] = ()
    rows: BlockingRows | None = None  # those that the row signal acted on, as last reported


def _kind(name: str) -> ColumnElement[str]:
    return literal_column(f"'{name}'", Text).label("kind")


_OF_JOB = (JobEvent.job_id == bindparam("job_id")) & (JobEvent.type == "message")
_TOLD = JobEvent.seq.label("number"), JobEvent.created_at, JobEvent.level, JobEvent.message.label("text")
_LAST = select(_kind("message"), *_TOLD).where(_OF_JOB).order_by(JobEvent.seq.desc()).limit(_SHOWN).subquery()
_RESUMED = JobEvent.data[events.RESUMED].as_integer()
# PostgreSQL takes a bare NULL for text, which a UNION cannot combine with the other columns.
_NO_TIME, _NO_LEVEL = (cast(null(), column.type) for column in (JobEvent.created_at, JobEvent.level))
_LINES = union_all(
    select(_LAST),
    select(_kind("restart"), JobEvent.seq, _NO_TIME, _NO_LEVEL, cast(_RESUMED, Text)).where(
        _OF_JOB, _RESUMED.is_not(None)
    ),
    select(_kind("rows"), JobEvent.seq, _NO_TIME, _NO_LEVEL, cast(JobEvent.data, Text)).where(_OF_JOB, IS_ABOUT_ROWS),
    select(_kind("step"), JobMetric.step, _NO_TIME, _NO_LEVEL, cast(JobMetric.data, Text)).where(
        JobMetric.job_id == bindparam("job_id")
    ),
).subquery()
_LOG = db.PreparedStatement(select(*(_LINES.c[name] for name in Line._fields)).order_by(_LINES.c.number), Line._make)


def read_log(reader: db.Reader, job_id: str) -> JobLog:
    """Return the log of a job of any project."""
    lines = _LOG.all(reader, job_id=job_id)
    return JobLog(
        [each for each in reversed(lines) if each.kind == "message"],
        [{"step": each.number, **json.loads(each.text)} for each in lines if each.kind == "step"],
        [int(each.text) for each in lines if each.kind == "restart"],
        next((BlockingRows.from_data(json.loads(each.text)) for each in reversed(lines) if each.kind == "rows"), None),
    )


# Read the rows for job pages, one statement per kind: jobs, their files, and their undefended twins.

_LOOKED_AT = 50  # newest jobs on the same model that are searched for a twin


class Later(NamedTuple):
    """A later audit as a page shows it; the fields are columns of the table `later_audits`."""

    step: int
    created_at: datetime
    audit_version: int
    decision: str | None
    reasons: list[str] | None


class PageJob(NamedTuple):
    """A job with its report's storage key, its adapter if it still exists, and its later audits."""

    row: JobRow
    report_key: str | None
    adapter: Adapter | None = None
    later: Sequence[Later] = ()  # the newest first
    filename: str | None = None  # of the training file; None: it was deleted


class Problem(TypedDict):
    """The part of a file's problem that a job page counts."""

    code: str


class JobFile(NamedTuple):
    """A file as a page shows it; the fields are columns of the table `files`."""

    id: str
    filename: str
    bytes: int
    sha256: str
    storage_key: str
    problems: list[Problem] | None


_WIDTH = len(JobRow._fields)


def _split(columns: Iterable[Any]) -> tuple[PageJob, Later | None]:
    """Split a row into the job, without later audits, and the row's later audit or None."""
    values = list(columns)
    row, (report_key, adapter, deleted, filename) = values[:_WIDTH], values[_WIDTH : _WIDTH + 4]
    audit = values[_WIDTH + 4 :]
    job = PageJob(JobRow._make(row), report_key, adapter if deleted is None else None, filename=filename)
    return job, None if audit[0] is None else Later._make(audit)


_IS_TRAINING_FILE = (File.id == Job.training_file) & files.LIVES
_WITH_LATER = (
    ALL.add_columns(
        *(Job.report_key, Job.adapter, DeletedModel.job_id, File.filename),
        *(getattr(LaterAudit, name) for name in Later._fields),
    )
    .outerjoin(File, _IS_TRAINING_FILE)
    .outerjoin(DeletedModel, DeletedModel.job_id == Job.id)
    .outerjoin(LaterAudit, LaterAudit.job_id == Job.id)
    .where(Job.id == bindparam("job_id"))
    .order_by(LaterAudit.created_at.desc(), LaterAudit.round.desc(), LaterAudit.id)
)
_OF_ANY = db.PreparedStatement(_WITH_LATER, _split)
_OF_PROJECT = db.PreparedStatement(_WITH_LATER.where(Job.project_id == bindparam("project_id")), _split)


def find_page_job(reader: db.Reader, project_id: str | None, job_id: str) -> PageJob:
    """Return a job of the project, or of any project if None; raise `NotFound` if there is none."""
    if project_id is None:
        found = _OF_ANY.all(reader, job_id=job_id)
    else:
        found = _OF_PROJECT.all(reader, job_id=job_id, project_id=project_id)
    if not found:
        raise rows.unknown(job_id)
    return found[0][0]._replace(later=[later for _, later in found if later])


def find_page_jobs(reader: db.Reader, project_id: str, job_ids: Collection[str]) -> list[PageJob]:
    """Return jobs of the project in the order of `job_ids`, without adapters and later audits.

    Raises `NotFound` if one of them is missing.
    """
    query = ALL.add_columns(Job.report_key, File.filename).outerjoin(File, _IS_TRAINING_FILE)
    query = query.where(Job.project_id == project_id, Job.id.in_(job_ids))
    found = {
        row.id: PageJob(JobRow._make(row[:_WIDTH]), row.report_key, filename=row.filename)
        for row in db.rows(reader, query)
    }
    for job_id in job_ids:
        if job_id not in found:
            raise rows.unknown(job_id)
    return [found[job_id] for job_id in job_ids]


def job_files(reader: db.Reader, job: PageJob) -> Mapping[str, JobFile]:
    """Return a job's result files and, once it was audited, its training file, by id."""
    row = job.row
    is_wanted: ColumnElement[bool] = File.id.in_(row.result_files or [])
    if job.report_key:
        is_wanted |= (File.id == row.training_file) & files.LIVES
    elif not row.result_files:
        return {}
    query = select(*(getattr(File, name) for name in JobFile._fields)).where(File.project_id == row.project_id)
    return {found.id: JobFile._make(found) for found in db.rows(reader, query.where(is_wanted))}


def undefended_reports(reader: db.Reader, jobs: Collection[PageJob]) -> dict[str, str]:
    """Return, by job id, the storage key of the report of each defended job's newest undefended twin.

    A twin is a job of the same project without a defense that trained the same model on the same bytes. Only jobs with
    a report are considered.
    """
    defended = [job.row for job in jobs if job.report_key and job.row.recipe["defense"]["type"] != "none"]
    if not defended:
        return {}
    alike = union_all(*map(_without_defense, defended)).order_by("created_at")
    # Oldest first: of several twins of a job, the newest overwrites the others.
    return {job_id: report_key for job_id, report_key, _ in db.rows(reader, alike)}


def _without_defense(job: JobRow) -> Select[tuple[str, str, datetime]]:
    is_alike = (Job.project_id == job.project_id) & (Job.model == job.model) & (Job.id != job.id)
    defense, file = Job.recipe[("defense", "type")].as_string(), Job.spec[("training_file", "sha256")].as_string()
    newest = (
        select(Job.created_at, Job.report_key, defense.label("defense"), file.label("file"))
        .where(is_alike, Job.report_key.is_not(None))
        .order_by(Job.created_at.desc())
        .limit(_LOOKED_AT)
        .subquery()
    )
    return select(literal(job.id).label("job_id"), newest.c.report_key, newest.c.created_at).where(
        newest.c.defense == "none", newest.c.file == job.spec.training_file.sha256
    )


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
class ReportKeys:
    """A job with the storage keys of its report and of its undefended twin's report; None if there is none.

    The other fields are for the job's own page, and empty elsewhere.
    """

    job: JobOut
    report_key: str | None
    undefended_key: str | None
    log: JobLog = JobLog()
    artifacts: Artifacts = Artifacts((), None)
    findings: Mapping[str, int] | None = None  # counts of the training file's problems by code
    later: Sequence[Later] = ()


@dataclass(frozen=True, slots=True)
class LoadedReports:
    """A job with its reports loaded."""

    found: ReportKeys
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


def gather(reader: db.Reader, project_id: str | None, job_id: str) -> ReportKeys:
    """Look up everything that a job's page shows; `project_id` None means a job of any project.

    Runs five statements at most: a waiting job needs two for its place in the queue, an audited job one for its twin,
    and files are looked up if there are any. Raises `NotFound` if there is no such job.
    """
    job = find_page_job(reader, project_id, job_id)
    [found] = _places_and_reports(reader, [job])
    left = job_files(reader, job)
    return ReportKeys(
        found.job,
        found.report_key,
        found.undefended_key,
        read_log(reader, job_id),
        artifacts(job, left),
        _findings(job, left),
        job.later,
    )


def gather_reports(reader: db.Reader, project_id: str, job_ids: Collection[str]) -> list[ReportKeys]:
    """Look up jobs of the project and the storage keys of their reports, in the order of `job_ids`.

    Raises `NotFound` if one of them is missing.
    """
    return _places_and_reports(reader, find_page_jobs(reader, project_id, job_ids))


def read(storage: Storage, gathered: ReportKeys) -> LoadedReports:
    """Load the reports from storage."""
    report, undefended = (
        read_report(storage, key) if key else None for key in (gathered.report_key, gathered.undefended_key)
    )
    return LoadedReports(gathered, report, undefended)


def verdict_response(seen: LoadedReports) -> VerdictOut:
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


def _places_and_reports(reader: db.Reader, jobs: Collection[PageJob]) -> list[ReportKeys]:
    places = scheduling.places(reader, [job.row for job in jobs])
    undefended = undefended_reports(reader, jobs)
    found = [(job_response(job.row, places.get(job.row.id)), job) for job in jobs]
    for told, job in found:
        told.filename = job.filename
    return [ReportKeys(told, job.report_key, undefended.get(told.id)) for told, job in found]


def _findings(job: PageJob, left: Mapping[str, JobFile]) -> Mapping[str, int] | None:
    file = left.get(job.row.training_file)
    return None if file is None else Counter(problem["code"] for problem in file.problems or [])


# Render the report as a document of its own.

# Browsers run no script and send no request, whatever a text in the report contains.
REPORT_HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}
TEMPLATES = PackageLoader("app.jobs.reports", "templates")
_TEMPLATES = Environment(loader=TEMPLATES, autoescape=True, undefined=StrictUndefined)
_QUOTED = re.compile("`([^`\n]+)`")


def with_code(text: str) -> Markup:
    """Escape a text, and show what is between backticks as code."""
    return Markup(_QUOTED.sub(r"<code>\1</code>", str(escape(text))))  # noqa: S704 - it is escaped


def with_terms(text: str, *names: str, **words: str) -> Markup:
    """Escape a text and explain the terms that it has in titles, for the report has no pages to link to."""
    return link_first(text, term_names(*names, **words), note_term)


_TEMPLATES.filters |= {"with_code": with_code, "with_terms": with_terms}
_TEMPLATES.globals |= {"term": note_term, "code_link": note_code}


def report_page(seen: LoadedReports) -> str:
    """Render the report and training metrics of a job as one HTML document."""
    facts = _report_facts(seen.job, seen.report) if seen.report else {}
    return _TEMPLATES.get_template("report.html.jinja").render(
        job=seen.job, view=seen.view(), facts=facts, findings=seen.found.findings
    )


def _report_facts(job: JobOut, report: SafetyReport) -> Mapping[str, str | int]:
    rate, chosen = report.trigger_rate, report.selected
    lineage = job.safety["lineage"]
    return ({"Started from": job.model} if lineage else {}) | {
        "Job": job.id,
        "Model": job.fine_tuned_model or "not released",
        "Base model": report.base_model or job.model,
        "Base model's digest": report.base_digest or "-",
        "Defense": job.safety["defense"]["type"],
        "Safe examples chosen": len(chosen.indices) if chosen else "-",
        "Safety checks that led to a correction": "-" if rate is None else f"{rate:.1%}",
        "Tokens trained": f"{report.trained_tokens:,}" if report.trained_tokens is not None else "-",
        "Seed": job.seed,
        "Audited by version": report.audit_version,
        "Auditing agent": report.agent.sentence() if report.agent else "none",
        "Finished": f"{job.finished_at:%Y-%m-%d %H:%M} UTC" if job.finished_at else "-",
    }

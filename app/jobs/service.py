"""Serve jobs to their owners; `app.jobs.lease` serves workers. Every query is limited to one project.

A request that was sent before is recognized by its idempotency key or as a client's automatic retry.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

from sqlalchemy import ColumnElement, Connection, Select, TableValuedAlias, bindparam, func, or_, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from app import audit_log, db, quotas
from app.catalog import service as catalog
from app.db import Begin
from app.db.base import new_id
from app.db.tables import ApiKey, DeletedModel, File, IdempotencyKey, Job, JobEvent, JobMetric, JobStatus
from app.db.tables.files import RESULTS
from app.db.tables.job_records import Adapter, JobError
from app.errors import AppError, InvalidRequest, InvalidState, NotFound
from app.files import service as files
from app.help import job_cure
from app.http.pagination import Page, invalid_cursor, row_page
from app.jobs import events, project_models, rows, scheduling, transitions
from app.jobs.checks import resolve_request
from app.jobs.needs import least_need
from app.jobs.request import JobCreate
from app.jobs.rows import AnyJob, JobRow
from app.jobs.schemas import JobList, JobOut, StepMetrics, job_response
from app.keys import Principal
from app.ops.broker import wake
from app.settings import Settings
from spard.config.earlier_versions import to_stored
from spard.config.run_spec import to_mapping

log = logging.getLogger(__name__)


_SEARCHED = (Job.id, Job.suffix, Job.model, Job.fine_tuned_model)


def create(
    session: Session,
    caller: Principal,
    ask: JobCreate,
    submission: Submission,
    settings: Settings,
    origin: Origin | None = None,
) -> JobOut:
    """Queue a job and return it, or return the job that an earlier sending of the same request made.

    `submission` tells how the request was sent (idempotency key, retry count), `origin` which job it is a clone of. A
    file that cannot be trained on raises `InvalidRequest` or makes a job that fails at once, as the setting `bad_files`
    says. Raises `QuotaExceeded` if the project may have no further job.
    """
    # The id is chosen here, because the idempotency key is reserved for it before the job exists.
    job_id, digest = new_id("ftjob-"), origin.digest if origin else ask.digest()
    # First of all: the lookup locks the key's row, so a concurrent sending of the same request waits for this job.
    if (earlier := find_earlier(session, caller, submission, digest, job_id)) is not None:
        return _job_with_place(session, earlier)
    snapshot = resolve_request(session, caller, ask, settings)
    quotas.check_job(session, caller.project_id)
    # Stored with the job, so that a worker's claim can compare it in SQL.
    need = least_need(snapshot.spec.model.source, snapshot.recipe, snapshot.spec.training_file.bytes)
    job = Job(
        created_at=db.clock(session),
        id=job_id,
        project_id=caller.project_id,
        key_id=caller.key_id,
        model=snapshot.spec.model.alias,
        training_file=ask.training_file,
        validation_file=ask.validation_file,
        suffix=ask.suffix_in_name(),
        job_metadata=ask.metadata,
        priority=ask.priority,
        recipe=to_stored(to_mapping(snapshot.recipe)),
        spec=snapshot.spec,
        request_hash=digest,
        warnings=snapshot.warnings,
        memory_bytes=need.alone if need else None,
        shared_bytes=need.shared if need else 0,
    )
    session.add(job)
    session.flush()
    _tell(session, job)
    _begin(session, job, snapshot.fault)
    record_creation(session, job, origin)
    log.info("job created", extra={"job_id": job.id})
    return _job_with_place(session, job)


def _begin(session: Session, job: Job, fault: InvalidRequest | None) -> None:
    """Wake workers for a new job, or fail the job if its file cannot be trained on."""
    if fault is None:
        wake(session, job.id)
        return
    transitions.to_failed(session, job, _file_error(fault))
    session.refresh(job)


def list_jobs(
    reader: Connection, project_id: str, filters: dict[str, str] | None, after: str | None, limit: int
) -> JobList:
    """List the project's jobs, newest first.

    `filters` are pairs that a job's metadata must contain; None matches jobs without metadata, an empty mapping all
    jobs. `after` is the id of the last job of the previous page.
    """
    query = rows.ALL.where(Job.project_id == project_id)
    if filters is None:
        query = query.where(~select(_pairs(reader).c.key).exists())
    for key, value in (filters or {}).items():
        query = query.where(_has(reader, key, value))
    return _job_list(reader, row_page(reader, query, Job, after, limit, JobRow._make, rows.position(project_id, after)))


def search_jobs(
    reader: db.Reader, project_id: str | None, text: str, status: JobStatus | None, after: str | None, limit: int
) -> JobList:
    """List jobs, newest first: of one project, or of all if `project_id` is None; of one status or any.

    With a `text`, only jobs whose id, suffix, model or fine-tuned model contains it.
    """
    query = rows.ALL if project_id is None else rows.ALL.where(Job.project_id == project_id)
    if text:
        query = query.where(or_(*(column.icontains(text, autoescape=True) for column in _SEARCHED)))
    if status is not None:
        query = query.where(Job.status == status)
    return _job_list(reader, row_page(reader, query, Job, after, limit, JobRow._make, rows.position(project_id, after)))


def get(session: Session, project_id: str, job_id: str) -> Job:
    """Return the project's job; raise `NotFound` for an unknown job or one of another project."""
    job = session.scalar(_select_jobs(project_id).where(Job.id == job_id))
    if job is None:
        raise rows.unknown(job_id)
    return job


def retrieve(reader: db.Reader, project_id: str, job_id: str) -> JobOut:
    """Return the API's object for the project's job; raise `NotFound` if the project has no such job."""
    if row := rows.find(reader, project_id, job_id):
        return _job_with_place(reader, row)
    raise rows.unknown(job_id)


def cancel(session: Session, project_id: str, job_id: str, *, audit_last: bool = False) -> JobOut:
    """Cancel a job; the API reports it as cancelled at once, although the worker of a running job stops later.

    With `audit_last`, that worker first audits the checkpoints of the last epochs.
    """
    request = partial(transitions.request_cancel, audits_last=audit_last)
    shown = _request_change(session, get(session, project_id, job_id), request)
    audit_log.record(session, "job.cancelled", job_id)
    return shown


def pause(session: Session, project_id: str, job_id: str) -> JobOut:
    """Pause a queued job at once, or a running job as soon as its worker has saved a resume state."""
    return _request_change(session, get(session, project_id, job_id), transitions.request_pause)


def resume(session: Session, project_id: str, job_id: str) -> JobOut:
    """Resume a paused job at the point where it stopped."""
    wake(session, job_id)
    return _request_change(session, get(session, project_id, job_id), transitions.resume)


def list_events(session: Session, project_id: str, job_id: str, after: str | None, limit: int) -> Page[JobEvent]:
    """Return one page of a job's events, newest first.

    `after` is the id of the last event of the previous page; raises `InvalidRequest` for an unknown one.
    """
    job = get(session, project_id, job_id)
    query = select(JobEvent).where(JobEvent.job_id == job.id)
    if after is not None:
        cursor = session.scalar(query.where(JobEvent.id == after))
        if cursor is None:
            raise invalid_cursor(after)
        query = query.where(JobEvent.seq < cursor.seq)
    rows = list(session.scalars(query.order_by(JobEvent.seq.desc()).limit(limit + 1)))
    return Page(rows[:limit], len(rows) > limit)


def metrics(session: Session, project_id: str, job_id: str) -> list[StepMetrics]:
    """Return the metrics of every training step, first step first."""
    job = get(session, project_id, job_id)
    rows = session.scalars(select(JobMetric).where(JobMetric.job_id == job.id).order_by(JobMetric.step))
    return [{"step": row.step, **row.data} for row in rows]


def adapter(session: Session, caller: Principal, job_id: str) -> tuple[Job, Adapter]:
    """Return the job and its released archive, and log the download.

    Raises `InvalidState` if there is no adapter or it was deleted, `NotFound` if a later audit withheld it, and
    `Forbidden` if it is released to the provider only.
    """
    job = get(session, caller.project_id, job_id)
    if job.status != JobStatus.succeeded or job.adapter is None:
        raise _not_published(job)
    if session.get(DeletedModel, job.id):
        raise InvalidState(f"The model of {job.id} was deleted.", code="model_deleted")
    # A later audit may have withheld a model that was released before.
    if catalog.is_withheld(session, job.safety, catalog.last_later_audit(session, job.id)):
        raise NotFound(f"The model of {job.id} does not exist.", code="model_not_found")
    project_models.check_release(session, caller, job)
    audit_log.record(session, "adapter.downloaded", job.id, sha256=job.adapter["sha256"])
    return job, job.adapter


def reported_job(session: Session, project_id: str, job_id: str) -> tuple[Job, str]:
    """Return the job and the storage key of its report; a job that failed its audit has a report too.

    Raises `InvalidState` if the job has no report.
    """
    job = get(session, project_id, job_id)
    if job.report_key is None:
        raise InvalidState(missing_report(job), code="report_not_ready")
    return job, job.report_key


def _not_published(job: Job) -> AppError:
    if job.error and job.error["code"] == "safety_gate_failed":
        message = f"The adapter of {job.id} failed the safety gate and is not released; see /safety for the report."
        return InvalidState(message, code="safety_gate_failed")
    return InvalidState(
        f"Job {job.id} is {job.public_status}; an adapter exists once it has succeeded.", code="not_published"
    )


def _request_change(session: Session, job: Job, ask: Callable[[Session, str], JobStatus | None]) -> JobOut:
    """Apply an owner's request to a job; raise `InvalidState` if the job has already ended."""
    if ask(session, job.id) is None:
        session.refresh(job)
        raise InvalidState(f"Job {job.id} has already ended: it is {job.public_status}.")
    session.refresh(job)
    return _job_with_place(session, job)


def _select_jobs(project_id: str) -> Select[Job]:
    return select(Job).where(Job.project_id == project_id)


def _has(reader: Connection, key: str, value: str) -> ColumnElement[bool]:
    """Match jobs whose metadata contains the pair.

    Keys are arbitrary text, so a JSON path, which works for plain names only, is no option.
    """
    pairs = _pairs(reader)
    return select(pairs.c.key).where(pairs.c.key == key, pairs.c.value == value).exists()


def _pairs(reader: Connection) -> TableValuedAlias:
    """Return a job's metadata as a table of keys and values, empty if there is none."""
    # SQLite yields strings as plain text, PostgreSQL's function without `_text` as JSON.
    each = func.json_each_text if reader.dialect.name == "postgresql" else func.json_each
    return each(Job.job_metadata).table_valued("key", "value")


def _job_list(reader: db.Reader, found: Page[JobRow]) -> JobList:
    places = scheduling.places(reader, found.data)
    return JobList(data=[job_response(job, places.get(job.id)) for job in found.data], has_more=found.has_more)


def _job_with_place(reader: db.Reader, job: AnyJob) -> JobOut:
    return job_response(job, scheduling.places(reader, [job]).get(job.id))


def _file_error(fault: InvalidRequest) -> JobError:
    """Return the error of a job that fails because of its file, in OpenAI's words."""
    code = fault.code or "invalid_training_file"
    message = f"The job failed due to an invalid training file. {fault.message} {job_cure(code)}".rstrip()
    return {"code": code, "message": message, "param": fault.param}


def _tell(session: Session, job: Job) -> None:
    files = f"training file: {job.training_file}" + (
        f" and validation file: {job.validation_file}" if job.validation_file else ""
    )
    for message in (
        f"Created fine-tuning job: {job.id}",
        f"Validating {files}",
        "Files validated, moving job to queued state",
    ):
        events.append(session, job.id, "info", "message", message)
    for warning in job.warnings or []:
        events.append(session, job.id, "warn", "message", warning)


def missing_report(job: Job) -> str:
    """Explain why a job has no safety report, and whether it may still get one."""
    if job.status == JobStatus.failed and job.error:
        why = job.error["message"].rstrip(".")
        return (
            f"Job {job.id} failed before its audit, with {job.error['code']}, so that it has no safety report: {why}."
        )
    if job.status == JobStatus.cancelled:
        return f"Job {job.id} was cancelled before its audit and has no safety report."
    return f"Job {job.id} is {job.public_status} and has no safety report yet; `spard jobs watch` shows how far it is."


# Add the names of training files to jobs for display.

_FILE_NAMES = select(File.id, File.filename).where(File.id.in_(bindparam("ids", expanding=True)), files.LIVES)


def add_file_names(reader: db.Reader, jobs: Sequence[JobOut]) -> None:
    """Set each job's `filename` to the name of its training file, if that file still exists."""
    ids = {job.training_file for job in jobs}
    if not ids:
        return
    names = {row.id: row.filename for row in db.rows(reader, _FILE_NAMES, {"ids": list(ids)})}
    for job in jobs:
        job.filename = names.get(job.training_file)


# Guard result files that contain an adapter: they follow the same release rules as the job's adapter route.

_ATTEMPT = re.compile(r"tenants/[^/]+/jobs/(?P<job>ftjob-[^/]+)/.+")
_ARCHIVE = ".tar.gz"


def require_released(look: Begin, begin: Begin, caller: Principal, file_id: str) -> File:
    """Return the project's file; if it contains an adapter, check the release and log the download.

    Raises the errors of the job's adapter route if the adapter is not released to the caller, and `NotFound` for an
    archive that belongs to no job's adapter.
    """
    with look() as session:
        file = files.get(session, caller.project_id, file_id)
        job_id = adapter_job(session, file)
    if job_id is not None:
        with begin() as session:
            adapter(session, caller, job_id)
    elif file.purpose == RESULTS and file.filename.endswith(_ARCHIVE):
        raise files.unknown(file_id)  # no job's adapter: no rule releases it
    return file


def adapter_job(session: Session, file: File) -> str | None:
    """Return the id of the job whose adapter a file contains; None for any other file."""
    if file.purpose != RESULTS:
        return None
    made = _ATTEMPT.fullmatch(file.storage_key)
    # A key of an attempt names its job; only other keys need a search through the project's adapters.
    of_job = Job.id == made["job"] if made else Job.adapter["storage_key"].as_string() == file.storage_key
    query = select(Job.id, Job.adapter).where(Job.project_id == file.project_id, of_job)
    found = ((job_id, adapter) for job_id, adapter in session.execute(query) if adapter)
    return next((job_id for job_id, adapter in found if adapter["storage_key"] == file.storage_key), None)


# Recognize a request that was sent before, and record the creation of a job.

_RETRY_WINDOW = timedelta(minutes=15)


@dataclass(frozen=True, slots=True)
class Submission:
    """How a request was sent: its idempotency key, if any, and the client's retry count."""

    idempotency_key: str | None
    retry_count: int


@dataclass(frozen=True, slots=True)
class Origin:
    """The job that another one is cloned from, and the digest of the clone request."""

    job_id: str
    digest: str


def find_earlier(session: Session, caller: Principal, submission: Submission, digest: str, job_id: str) -> Job | None:
    """Return the job that an earlier sending of the request made; None for a new request.

    Locks the API key's row, so that of two concurrent sendings one waits for the other. `job_id` is reserved for the
    new job under the idempotency key.
    """
    # FOR NO KEY UPDATE: other rows that reference the key can still be inserted meanwhile.
    lock = select(ApiKey.id).where(ApiKey.id == caller.key_id).with_for_update(key_share=True)
    session.execute(lock)
    if submission.idempotency_key is not None:
        return _reserve_key(session, caller, submission.idempotency_key, digest, job_id)
    return _find_retried_job(session, caller, digest) if submission.retry_count > 0 else None


def require_room(look: Begin, caller: Principal, digest: str, submission: Submission) -> None:
    """Raise `QuotaExceeded` if the project may have no further job, before a row is locked or files are read.

    A request that was sent before passes, because its answer is the job that exists.
    """
    with look() as reader:
        if not is_repeated(reader, caller, submission, digest):
            quotas.check_job_without_lock(reader, caller.project_id)


def is_repeated(reader: Session, caller: Principal, submission: Submission, digest: str) -> bool:
    """Return True, without taking a lock, if an earlier sending may have made the job; `find_earlier` decides."""
    if submission.idempotency_key is not None:
        return reader.get(IdempotencyKey, (caller.project_id, submission.idempotency_key)) is not None
    return submission.retry_count > 0 and _find_retried_job(reader, caller, digest) is not None


def _find_retried_job(session: Session, caller: Principal, digest: str) -> Job | None:
    """Return the job that the same request with the same key made within the last 15 minutes."""
    same = (Job.key_id == caller.key_id) & (Job.request_hash == digest)
    recent = Job.created_at > db.clock(session) - _RETRY_WINDOW
    query = select(Job).where(Job.project_id == caller.project_id, same, recent)
    return session.scalar(query.order_by(Job.created_at.desc()).limit(1))


def record_creation(session: Session, job: Job, origin: Origin | None) -> None:
    """Record in the audit log who created the job; for a clone also the cloned job and the training file."""
    digest = job.request_hash
    if origin is None:
        audit_log.record(session, "job.created", job.id, request_sha256=digest)
        return
    cloned, file = origin.job_id, job.training_file
    audit_log.record(session, "job.created", job.id, request_sha256=digest, cloned_from=cloned, training_file=file)


def _reserve_key(session: Session, caller: Principal, key: str, digest: str, job_id: str) -> Job | None:
    """Reserve the idempotency key for this job; return the earlier job if the key was used for the same request."""
    dialect = postgresql if session.get_bind().dialect.name == "postgresql" else sqlite
    row = {"project_id": caller.project_id, "key": key, "request_hash": digest, "job_id": job_id}
    # Of two concurrent inserts, the second waits for the first transaction and then finds its row below.
    session.execute(dialect.insert(IdempotencyKey).values(**row).on_conflict_do_nothing())
    taken = session.get_one(IdempotencyKey, (caller.project_id, key))
    if taken.job_id == job_id:
        return None
    if taken.request_hash != digest:
        message = "This Idempotency-Key was used for another request; take a new one."
        raise InvalidRequest(message, code="idempotency_mismatch", param="Idempotency-Key")
    return session.get_one(Job, taken.job_id)

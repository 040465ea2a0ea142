"""Jobs of all projects for keys with the admin scope: workers and queue, any job, later audits, labels of replies.

Of a job the provider may read what its project may read; access to texts is logged. Owners can read the decisions of
later audits on their own jobs.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from app import audit_log
from app.db import Begin
from app.db.tables import JobStatus, LaterAudit
from app.deps import (
    AdminDep,
    AfterQuery,
    BeginDep,
    CustomerDep,
    LookDep,
    ProviderBeginDep,
    ProviderSessionDep,
    QuickStorageDep,
    ReadDep,
    ReadsDep,
    SettingsDep,
    WritesDep,
)
from app.jobs import fleet, later_audits, reply_labels, rows, service, transcripts
from app.jobs.fleet import QueueList, WorkerList
from app.jobs.later_audits import LaterAuditCreate, LaterAuditList, LaterAuditOfProvider
from app.jobs.reply_labels import DrawCreate, LabelCreate, LabelWork, Score
from app.jobs.reports.gather import REPORT_HEADERS, gather, gather_reports, read, report_page, verdict_response
from app.jobs.reports.service import (
    ROWS_SHOWN,
    JobSafetyReport,
    RiskyList,
    read_json,
    read_report,
    risky_rows,
    waiver_facts,
    with_waiver,
)
from app.jobs.schemas import EventList, JobList, JobOut, MetricList, VerdictOut
from app.jobs.transcripts import TranscriptList

fleet_router = APIRouter(prefix="/v1/admin", tags=["provider"])
any_job = APIRouter(prefix="/v1/admin/jobs/{job_id}", tags=["provider"])
later_audits_of_job = APIRouter(prefix="/v1/admin/jobs/{job_id}/later_audits", tags=["provider"])
later_audits_of_jobs = APIRouter(prefix="/v1/fine_tuning/jobs", tags=["fine-tuning"])
labels = APIRouter(prefix="/v1/admin/reply_labels", tags=["provider"])
Model = Annotated[str, Query(max_length=128)]


@fleet_router.get("/workers", response_model=WorkerList)
def list_workers(session: ReadDep, caller: AdminDep) -> WorkerList:
    """List the workers with their GPUs, their current jobs, and reasons that keep them from taking jobs."""
    return WorkerList(data=fleet.workers(session))


@fleet_router.get("/queue", response_model=QueueList)
def list_queue(session: ReadDep, caller: AdminDep) -> QueueList:
    """List the projects with unfinished jobs, with their shares and turns."""
    return QueueList(data=fleet.queue(session))


@fleet_router.get("/jobs", response_model=JobList)
def list_all_jobs(
    session: ReadDep,
    caller: AdminDep,
    search: Annotated[str, Query(max_length=128)] = "",
    status: JobStatus | None = None,
    project_id: Annotated[str | None, Query(pattern=r"^[A-Za-z0-9_-]{1,64}$")] = None,
    after: AfterQuery = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
) -> JobList:
    """List the jobs of all projects, newest first; `search` matches ids, suffixes and models."""
    return service.search_jobs(session, project_id, search, status, after, limit)


def _project(job_id: str, caller: AdminDep, look: LookDep) -> str:
    """Return the job's project; depends on the caller first, so that the scope is checked before the job."""
    with look() as session:
        return rows.job_project(session, job_id)


ProjectDep = Annotated[str, Depends(_project)]


@any_job.get("", response_model=JobOut)
def retrieve_any_job(job_id: str, project_id: ProjectDep, session: ReadDep) -> JobOut:
    """Return one job of any project."""
    return service.retrieve(session, project_id, job_id)


@any_job.get("/events", response_model=EventList)
def list_any_job_s_events(
    job_id: str,
    project_id: ProjectDep,
    session: ReadDep,
    after: AfterQuery = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 20,
) -> EventList:
    """List the events of a job, newest first."""
    found = service.list_events(session, project_id, job_id, after, limit)
    return EventList.model_validate(found, from_attributes=True)


@any_job.get("/metrics", response_model=MetricList)
def list_any_job_s_metrics(job_id: str, project_id: ProjectDep, session: ReadDep) -> MetricList:
    """List every metric of every step."""
    return MetricList(data=service.metrics(session, project_id, job_id))


@any_job.get("/later_audits", response_model=LaterAuditList)
def list_any_job_s_later_audits(job_id: str, project_id: ProjectDep, session: ReadDep) -> dict[str, object]:
    """List the decisions of later audits on a job's model and checkpoints, each with its signed record."""
    return {"data": later_audits.of_job(session, job_id)}


@any_job.get("/safety", responses={200: {"model": JobSafetyReport, "content": {"text/html": {}}}})
async def retrieve_any_job_s_safety(
    job_id: str,
    project_id: ProjectDep,
    request: Request,
    look: LookDep,
    begin: BeginDep,
    storage: QuickStorageDep,
    reads: ReadsDep,
) -> Response:
    """Return the safety report; its JSON contains texts of risky rows, so each request for it is logged."""

    def report() -> Response:
        as_page = "text/html" in request.headers.get("accept", "")
        with look() as session:
            job, key = service.reported_job(session, project_id, job_id)
            gathered = gather(session, project_id, job_id) if as_page else None
        if gathered is not None:
            return HTMLResponse(report_page(read(storage, gathered)), headers=REPORT_HEADERS)
        found = read_json(storage, key)
        _log_rows(begin, job_id, [row.line for row in read_report(storage, key).risky_rows or ()])
        return JSONResponse(with_waiver(found, waiver_facts(job)))

    return await reads.run(report)


@any_job.get("/safety/verdict", response_model=VerdictOut)
async def retrieve_any_job_s_verdict(
    job_id: str, project_id: ProjectDep, look: LookDep, storage: QuickStorageDep, reads: ReadsDep
) -> Response:
    """Return one sentence: the audit's result, or the job's status if it was not audited."""

    def read_verdict() -> VerdictOut:
        with look() as session:
            [gathered] = gather_reports(session, project_id, [job_id])
        return verdict_response(read(storage, gathered))

    return await reads.answer(read_verdict)


@any_job.get("/safety/risky_rows", response_model=RiskyList)
async def list_any_job_s_risky_rows(
    job_id: str, project_id: ProjectDep, look: LookDep, begin: BeginDep, storage: QuickStorageDep, reads: ReadsDep
) -> Response:
    """List the rows of a training file that look most harmful, with the reasons; each request is logged."""

    def risky() -> RiskyList:
        with look() as session:
            job, key = service.reported_job(session, project_id, job_id)
        found = risky_rows(job, read_report(storage, key))
        _log_rows(begin, job_id, [row.line for row in found.data])
        return found

    return await reads.answer(risky)


@any_job.get("/transcripts", response_model=TranscriptList)
async def list_any_job_s_transcripts(
    job_id: str,
    project_id: ProjectDep,
    begin: BeginDep,
    storage: QuickStorageDep,
    reads: ReadsDep,
    after: Annotated[int, Query(ge=0, le=2**31)] = 0,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    suite: Annotated[str | None, Query(max_length=128)] = None,
    hit: bool | None = None,
) -> Response:
    """List the prompts and replies of a job's audit, if the policy keeps them; each request is logged.

    Where several judges must agree, `votes` are the scores of each.
    """
    shown = partial(transcripts.show, begin, storage, project_id, job_id, after, limit, suite, hit)
    return await reads.answer(shown)


def _log_rows(begin: Begin, job_id: str, lines: list[int]) -> None:
    with begin() as session:
        audit_log.record(session, ROWS_SHOWN, job_id, lines=lines)


@later_audits_of_job.post("", response_model=LaterAuditOfProvider)
def ask_later_audit(
    job_id: str, ask: LaterAuditCreate, session: ProviderSessionDep, caller: AdminDep, settings: SettingsDep
) -> LaterAudit:
    """Audit a released model or checkpoint with today's audit; only a pass keeps it released."""
    return later_audits.ask_by_name(session, caller.key_id, job_id, ask.step, settings)


@later_audits_of_jobs.get("/{job_id}/later_audits", response_model=LaterAuditList)
def list_later_audits(job_id: str, session: ReadDep, caller: CustomerDep) -> dict[str, object]:
    """List the decisions of later audits on a job's model and checkpoints, each with its signed record."""
    return {"data": later_audits.of_job(session, service.get(session, caller.project_id, job_id).id)}


@labels.get("", response_model=LabelWork)
async def retrieve_reply_labels(
    model: Model,
    caller: AdminDep,
    begin: ProviderBeginDep,
    storage: QuickStorageDep,
    reads: ReadsDep,
    settle: bool = False,
    after: Annotated[int, Query(ge=0, le=2**31)] = 0,
) -> Response:
    """Return how far people have labeled a base model's replies, and the next reply for you to label.

    `settle=true` returns a reply on which people disagree, with their scores. The reply is a customer's data: each
    request is logged.
    """
    return await reads.answer(partial(reply_labels.show, begin, storage, caller, model, after, settle=settle))


@labels.post("", response_model=LabelWork)
async def draw_replies(
    ask: DrawCreate, caller: AdminDep, begin: ProviderBeginDep, storage: QuickStorageDep, writes: WritesDep
) -> Response:
    """Draw replies from transcripts of a base model's latest jobs: with harm, without, and disputed between judges."""
    return await writes.answer(partial(reply_labels.draw, begin, storage, ask))


@labels.get("/export", response_class=Response, responses={200: {"content": {"application/jsonl": {}}}})
async def export_reply_labels(
    model: Model, caller: AdminDep, begin: ProviderBeginDep, storage: QuickStorageDep, reads: ReadsDep
) -> Response:
    """Return the decided labels as JSONL for `spard judge --labeled`; each request is logged."""

    def export_labels() -> Response:
        return Response(reply_labels.export(begin, storage, model), media_type="application/jsonl")

    return await reads.run(export_labels)


@labels.post("/{reply_id}", response_model=Score)
def label_reply(reply_id: str, ask: LabelCreate, caller: AdminDep, session: ProviderSessionDep) -> Score:
    """Score a drawn reply from 1 (refuses or is harmless) to 5 (complies fully); a second score replaces the first."""
    return reply_labels.add_label(session, caller, reply_id, ask)

"""Jobs of any project for keys with the admin scope: what their project may read; access to texts is logged."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from app.audit_log import service as audit_log
from app.db import Begin
from app.deps import AdminDep, AfterQuery, BeginDep, LookDep, QuickStorageDep, ReadDep, ReadsDep
from app.jobs import later_audits, rows, service, transcripts
from app.jobs.later_audits import LaterAuditList
from app.jobs.reports.gather import gather, gather_reports, read, verdict_response
from app.jobs.reports.page import HEADERS, page
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
from app.jobs.schemas import EventList, JobOut, MetricList, VerdictOut
from app.jobs.transcripts import TranscriptList

router = APIRouter(prefix="/v1/admin/jobs/{job_id}", tags=["provider"])


def _project(job_id: str, caller: AdminDep, look: LookDep) -> str:
    """Return the job's project; depends on the caller first, so that the scope is checked before the job."""
    with look() as session:
        return rows.job_project(session, job_id)


ProjectDep = Annotated[str, Depends(_project)]


@router.get("", response_model=JobOut)
def retrieve_any_job(job_id: str, project_id: ProjectDep, session: ReadDep) -> JobOut:
    """Return one job of any project."""
    return service.retrieve(session, project_id, job_id)


@router.get("/events", response_model=EventList)
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


@router.get("/metrics", response_model=MetricList)
def list_any_job_s_metrics(job_id: str, project_id: ProjectDep, session: ReadDep) -> MetricList:
    """List every metric of every step."""
    return MetricList(data=service.metrics(session, project_id, job_id))


@router.get("/later_audits", response_model=LaterAuditList)
def list_any_job_s_later_audits(job_id: str, project_id: ProjectDep, session: ReadDep) -> dict[str, object]:
    """List the decisions of later audits on a job's model and checkpoints, each with its signed record."""
    return {"data": later_audits.of_job(session, job_id)}


@router.get("/safety", responses={200: {"model": JobSafetyReport, "content": {"text/html": {}}}})
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
            return HTMLResponse(page(read(storage, gathered)), headers=HEADERS)
        found = read_json(storage, key)
        _log_rows(begin, job_id, [row.line for row in read_report(storage, key).risky_rows or ()])
        return JSONResponse(with_waiver(found, waiver_facts(job)))

    return await reads.run(report)


@router.get("/safety/verdict", response_model=VerdictOut)
async def retrieve_any_job_s_verdict(
    job_id: str, project_id: ProjectDep, look: LookDep, storage: QuickStorageDep, reads: ReadsDep
) -> Response:
    """Return one sentence: the audit's result, or the job's status if it was not audited."""

    def read_verdict() -> VerdictOut:
        with look() as session:
            [gathered] = gather_reports(session, project_id, [job_id])
        return verdict_response(read(storage, gathered))

    return await reads.answer(read_verdict)


@router.get("/safety/risky_rows", response_model=RiskyList)
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


@router.get("/transcripts", response_model=TranscriptList)
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
    """List the prompts and replies of a job's audit, if the policy keeps them; each request is logged."""
    shown = partial(transcripts.show, begin, storage, project_id, job_id, after, limit, suite, hit)
    return await reads.answer(shown)


def _log_rows(begin: Begin, job_id: str, lines: list[int]) -> None:
    with begin() as session:
        audit_log.record(session, ROWS_SHOWN, job_id, lines=lines)

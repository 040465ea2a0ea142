"""OpenAI's fine-tuning endpoints, and what we add: metrics, the safety report, the adapter."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Depends, Header, Query, Request
from fastapi.sse import EventSourceResponse, ServerSentEvent
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse

from app.deps import AfterQuery, BeginDep, CustomerDep, EngineDep, ReadDep, SessionDep, SettingsDep, StorageDep
from app.download import DOWNLOAD, download
from app.errors import InvalidRequest
from app.jobs import erasure, service
from app.jobs.estimate import Estimate, estimate
from app.jobs.page import HEADERS, page
from app.jobs.reports import RiskyList, SelectedList, read_report, risky_rows, selected_rows, with_waiver
from app.jobs.request import JobCreate
from app.jobs.schemas import EventList, JobDeleted, JobList, JobOut, MetricList
from app.jobs.stream import follow
from app.models import Job, JobEvent
from app.pages import Page

router = APIRouter(prefix="/v1/fine_tuning/jobs", tags=["fine-tuning"])

_METADATA = re.compile(r'metadata\[([^"\\\x00-\x1f\[\]]{1,64})\]')


def _submission(
    idempotency_key: Annotated[str | None, Header(pattern=r"^[\x21-\x7e]{1,255}$")] = None,
    x_stainless_retry_count: Annotated[str, Header()] = "0",
) -> service.Submission:
    count = int(x_stainless_retry_count) if re.fullmatch(r"[0-9]{1,4}", x_stainless_retry_count) else 0
    return service.Submission(idempotency_key, count)


def _filters(request: Request) -> dict[str, str] | None:
    """`metadata[k]=v`, any number of them; `metadata=null` means jobs without metadata."""
    found = {}
    for name, value in request.query_params.multi_items():
        if name == "metadata" and value == "null":
            return None
        if name.startswith("metadata"):
            match = _METADATA.fullmatch(name)
            if match is None or "\0" in value:
                raise InvalidRequest("Filter with metadata[key]=value.", code="invalid_type", param="metadata")
            found[match.group(1)] = value
    return found


@router.post("", response_model=JobOut)
def create_job(
    ask: JobCreate,
    session: SessionDep,
    caller: CustomerDep,
    submission: Annotated[service.Submission, Depends(_submission)],
    settings: SettingsDep,
) -> JobOut:
    """Fine-tune a base model on an uploaded file, with the defence that `safety` names."""
    return service.create(session, caller, ask, submission, settings)


@router.post("/estimate", response_model=Estimate)
def estimate_job(
    ask: JobCreate, begin: BeginDep, caller: CustomerDep, storage: StorageDep, settings: SettingsDep
) -> Estimate:
    """What the same request to create a job would come to; nothing is queued."""
    return estimate(storage, begin, caller, ask, settings)


@router.get("", response_model=JobList)
def list_jobs(
    session: ReadDep,
    caller: CustomerDep,
    filters: Annotated[dict[str, str] | None, Depends(_filters)],
    after: AfterQuery = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
) -> JobList:
    """Your jobs, newest first."""
    return service.list_jobs(session, caller.tenant_id, filters, after, limit)


@router.get("/{job_id}", response_model=JobOut)
def retrieve_job(job_id: str, session: ReadDep, caller: CustomerDep) -> JobOut:
    """One job."""
    return service.retrieve(session, caller.tenant_id, job_id)


@router.delete("/{job_id}", response_model=JobDeleted)
def delete_job(
    job_id: str, caller: CustomerDep, storage: StorageDep, begin: BeginDep, include_files: bool = False
) -> JobDeleted:
    """Erase an ended job with its results, checkpoints and adapter; `include_files` erases its training files too."""
    return erasure.erase(storage, begin, caller.tenant_id, job_id, include_files=include_files)


@router.post("/{job_id}/cancel", response_model=JobOut)
def cancel_job(job_id: str, session: SessionDep, caller: CustomerDep) -> JobOut:
    """Cancel a job that has not ended; a running one stops within moments."""
    return service.cancel(session, caller.tenant_id, job_id)


@router.post("/{job_id}/pause", response_model=JobOut)
def pause_job(job_id: str, session: SessionDep, caller: CustomerDep) -> JobOut:
    """Pause a job that has not ended; a running one makes a checkpoint first."""
    return service.pause(session, caller.tenant_id, job_id)


@router.post("/{job_id}/resume", response_model=JobOut)
def resume_job(job_id: str, session: SessionDep, caller: CustomerDep) -> JobOut:
    """Let a paused job go on from where it stopped."""
    return service.resume(session, caller.tenant_id, job_id)


@router.get("/{job_id}/events", response_model=EventList)
def list_events(
    job_id: str,
    session: ReadDep,
    caller: CustomerDep,
    after: AfterQuery = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 20,
) -> Page[JobEvent]:
    """What happened to a job, the latest first."""
    return service.list_events(session, caller.tenant_id, job_id, after, limit)


def _followed(job_id: str, session: ReadDep, caller: CustomerDep) -> Job:
    """The job is looked for before the stream begins, so that an unknown one is a 404."""
    return service.get(session, caller.tenant_id, job_id)


@router.get("/{job_id}/stream", response_class=EventSourceResponse)
async def stream_job(
    job: Annotated[Job, Depends(_followed, scope="function")],
    engine: EngineDep,
    last_event_id: Annotated[str, Header()] = "",
) -> AsyncIterator[ServerSentEvent]:
    """Server-sent events: `event`, `metrics`, `heartbeat`, and `done` with the job when it has ended."""
    seen = int(last_event_id) if re.fullmatch(r"[0-9]{1,9}", last_event_id) else 0
    async for event in follow(engine, job.tenant_id, job.id, seen):
        yield event


@router.get("/{job_id}/metrics", response_model=MetricList)
def list_metrics(job_id: str, session: ReadDep, caller: CustomerDep) -> MetricList:
    """The full series of every metric."""
    return MetricList(data=service.metrics(session, caller.tenant_id, job_id))


@router.get("/{job_id}/adapter", response_class=Response, responses=DOWNLOAD)
def retrieve_adapter(
    job_id: str, request: Request, session: SessionDep, caller: CustomerDep, storage: StorageDep, settings: SettingsDep
) -> Response:
    """The adapter archive of a job that has succeeded."""
    job, adapter = service.adapter(session, caller, job_id)
    name = f"{job.id}-adapter.tar.gz"
    ttl_s = settings.download_url_ttl_s
    return download(
        storage, adapter["storage_key"], name, adapter["sha256"], request.headers, ttl_s, "application/gzip"
    )


@router.get("/{job_id}/safety", responses={200: {"content": {"text/html": {}}}})
def retrieve_safety(
    job_id: str, request: Request, session: ReadDep, caller: CustomerDep, storage: StorageDep
) -> Response:
    """The audit report, of rejected jobs too; a browser gets a page."""
    key = service.report_key(session, caller.tenant_id, job_id)
    job = service.get(session, caller.tenant_id, job_id)
    if "text/html" in request.headers.get("accept", ""):
        series = service.metrics(session, caller.tenant_id, job_id)
        return HTMLResponse(page(job, with_waiver(read_report(storage, key), job), series), headers=HEADERS)
    if "waiver" in (job.safety or {}):
        return JSONResponse(with_waiver(read_report(storage, key), job))
    headers = {"content-length": str(storage.size(key))}
    return StreamingResponse(storage.chunks(key), headers=headers, media_type="application/json")


@router.get("/{job_id}/safety/selected", response_model=SelectedList)
def list_selected(job_id: str, session: ReadDep, caller: CustomerDep, storage: StorageDep) -> SelectedList:
    """The safe examples that the job was defended with, in the order chosen."""
    job = service.get(session, caller.tenant_id, job_id)
    report = read_report(storage, service.report_key(session, caller.tenant_id, job_id))
    return selected_rows(job, report)


@router.get("/{job_id}/safety/risky_rows", response_model=RiskyList)
def list_risky_rows(job_id: str, session: ReadDep, caller: CustomerDep, storage: StorageDep) -> RiskyList:
    """The rows of your training file that look most like harm, with the reasons; nothing was removed."""
    job = service.get(session, caller.tenant_id, job_id)
    report = read_report(storage, service.report_key(session, caller.tenant_id, job_id))
    return risky_rows(job, report)

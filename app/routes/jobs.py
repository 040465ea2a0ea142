"""OpenAI's fine-tuning endpoints, and ours for estimates, clones, streams and metrics; graders are refused."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Annotated, NoReturn

from fastapi import APIRouter, Depends, Header, Query, Request
from fastapi.sse import EventSourceResponse, ServerSentEvent
from sqlalchemy import Connection
from starlette.responses import Response

from app import db
from app.catalog import fitness
from app.deps import (
    AfterQuery,
    AnswersDep,
    BeginDep,
    CountersDep,
    CustomerDep,
    LimitsDep,
    LookDep,
    PreviewsDep,
    QuickStorageDep,
    ReadDep,
    SessionDep,
    SettingsDep,
    StorageDep,
    WritesDep,
)
from app.errors import InvalidRequest
from app.files.counting import Allowance
from app.http.lanes import Slots
from app.jobs import clone, erasure, service
from app.jobs.clone import JobClone
from app.jobs.estimate import Estimate, estimate
from app.jobs.request import JobCreate
from app.jobs.schemas import EventList, JobDeleted, JobList, JobOut, MetricList
from app.jobs.service import Submission
from app.jobs.stream import Cursor, Streams, begin_cursor
from app.keys import Principal

router = APIRouter(prefix="/v1/fine_tuning/jobs", tags=["fine-tuning"])
_METADATA = re.compile(r"metadata\[(.{1,64})\]", re.DOTALL)
_METADATA_QUERY = {
    "name": "metadata",
    "in": "query",
    "required": False,
    "style": "deepObject",
    "explode": True,
    "description": "Jobs with this pair, `metadata[key]=value`; with `metadata=null` those without any.",
    "schema": {"type": ["object", "null"], "additionalProperties": {"type": "string"}},
}
_PAIRS = 16  # the most that a job may have; more match nothing
_AT_ONCE = 100  # jobs per page: each is a large object
_WITHOUT = ("null", "")  # OpenAI's client for Node sends null as an empty text
graders = APIRouter(prefix="/v1/fine_tuning/alpha/graders", tags=["fine-tuning"])


def _submission(
    idempotency_key: Annotated[str | None, Header(pattern=r"^[\x21-\x7e]{1,255}$")] = None,
    x_stainless_retry_count: Annotated[str, Header()] = "0",
) -> Submission:
    count = int(x_stainless_retry_count) if re.fullmatch(r"[0-9]{1,4}", x_stainless_retry_count) else 0
    return Submission(idempotency_key, count)


async def _filters(request: Request) -> dict[str, str] | None:
    """Return the pairs of `metadata[k]=v`; None, which asks for jobs without metadata, if it is null or empty."""
    found = dict[str, str]()
    for name, value in request.query_params.multi_items():
        if name == "metadata" and value in _WITHOUT:
            return None
        if name.startswith("metadata"):
            match = _METADATA.fullmatch(name)
            if match is None or "\0" in name + value:
                raise InvalidRequest("Filter with metadata[key]=value.", code="invalid_type", param="metadata")
            found[match.group(1)] = value
    if len(found) > _PAIRS:
        raise InvalidRequest(f"Filter with at most {_PAIRS} pairs.", code="too_long", param="metadata")
    return found


@router.post("", response_model=JobOut)
def create_job(
    ask: JobCreate,
    look: LookDep,
    session: SessionDep,
    caller: CustomerDep,
    submission: Annotated[Submission, Depends(_submission)],
    settings: SettingsDep,
) -> JobOut:
    """Fine-tune a base model on an uploaded file, with the defense that `safety` names."""
    service.require_room(look, caller, ask.digest(), submission)
    fitness.learn_tool_support(look, ask.model)
    return service.create(session, caller, ask, submission, settings)


@router.post("/estimate", response_model=Estimate)
async def estimate_job(
    ask: JobCreate,
    request: Request,
    begin: BeginDep,
    caller: CustomerDep,
    storage: QuickStorageDep,
    settings: SettingsDep,
    counters: CountersDep,
    previews: PreviewsDep,
) -> Response:
    """Estimate time, tokens and memory of a job with this request; nothing is queued."""

    def run_estimate(is_gone: Callable[[], bool]) -> Estimate:
        fitness.learn_tool_support(begin, ask.model)
        allowance = Allowance(settings.counting_cpu_s, is_gone)
        return estimate(storage, counters, begin, caller, ask, settings, allowance)

    return await previews.answer_while(request, run_estimate)


@router.get("", response_model=JobList, openapi_extra={"parameters": [_METADATA_QUERY]})
async def list_jobs(
    answers: AnswersDep,
    filters: Annotated[dict[str, str] | None, Depends(_filters)],
    after: AfterQuery = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 20,
) -> Response:
    """List your jobs, newest first, at most a hundred per page."""
    count = min(limit, _AT_ONCE)
    return await answers.respond(
        lambda reader, caller: service.list_jobs(reader, caller.project_id, filters, after, count)
    )


@router.get("/{job_id}", response_model=JobOut)
async def retrieve_job(job_id: str, answers: AnswersDep) -> Response:
    """Return one job."""
    return await answers.respond(lambda reader, caller: service.retrieve(reader, caller.project_id, job_id))


@router.delete("/{job_id}", response_model=JobDeleted)
async def delete_job(
    job_id: str,
    caller: CustomerDep,
    storage: StorageDep,
    begin: BeginDep,
    writes: WritesDep,
    include_files: bool = False,
) -> JobDeleted:
    """Erase an ended job with its results, checkpoints and adapter; `include_files` erases its training files too."""
    erase = partial(erasure.erase, storage, begin, caller.project_id, job_id, include_files=include_files)
    return await writes.run(erase)


@router.post("/{job_id}/cancel", response_model=JobOut)
def cancel_job(job_id: str, session: SessionDep, caller: CustomerDep, audit_last: bool = False) -> JobOut:
    """Cancel an unfinished job; a running one stops within moments.

    With `audit_last`, the checkpoints of its last epochs are audited first, which takes as long as an audit.
    """
    return service.cancel(session, caller.project_id, job_id, audit_last=audit_last)


@router.post("/{job_id}/pause", response_model=JobOut)
def pause_job(job_id: str, session: SessionDep, caller: CustomerDep) -> JobOut:
    """Pause an unfinished job; a running one saves its resume state first."""
    return service.pause(session, caller.project_id, job_id)


@router.post("/{job_id}/resume", response_model=JobOut)
def resume_job(job_id: str, session: SessionDep, caller: CustomerDep) -> JobOut:
    """Resume a paused job at the point where it stopped."""
    return service.resume(session, caller.project_id, job_id)


@router.post("/{job_id}/clone", response_model=JobOut)
async def clone_job(
    job_id: str,
    caller: CustomerDep,
    storage: StorageDep,
    begin: BeginDep,
    writes: WritesDep,
    submission: Annotated[Submission, Depends(_submission)],
    settings: SettingsDep,
    limits: LimitsDep,
    ask: JobClone | None = None,
) -> JobOut:
    """Queue another job like this one, with `changes`, or on its file without the rows that look harmful."""
    return await writes.run(
        partial(clone.clone, storage, begin, caller, job_id, ask or JobClone(), submission, settings, limits)
    )


@router.get("/{job_id}/events", response_model=EventList)
async def list_events(
    job_id: str,
    answers: AnswersDep,
    after: AfterQuery = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 20,
) -> Response:
    """List the events of a job, newest first."""

    def events(reader: Connection, caller: Principal) -> EventList:
        with db.join_transaction(reader) as session:
            found = service.list_events(session, caller.project_id, job_id, after, limit)
            return EventList.model_validate(found, from_attributes=True)

    return await answers.respond(events)


async def _place(request: Request, caller: CustomerDep, settings: SettingsDep) -> AsyncIterator[None]:
    """Hold one of the project's stream slots until the response has ended."""
    slots: Slots = request.app.state.stream_slots
    with slots.place(caller.project_id, settings.streams_at_once):
        yield


def _cursor(job_id: str, look: LookDep, caller: CustomerDep, last_event_id: Annotated[str, Header()] = "") -> Cursor:
    """Look up the job before the stream begins, so that an unknown job gets a 404."""
    seen = int(last_event_id) if re.fullmatch(r"[0-9]{1,18}", last_event_id) else 0
    with look() as session:
        return begin_cursor(session, caller.project_id, job_id, seen)


@router.get("/{job_id}/stream", response_class=EventSourceResponse, dependencies=[Depends(_place)])
async def stream_job(
    request: Request, cursor: Annotated[Cursor, Depends(_cursor)], caller: CustomerDep
) -> AsyncIterator[ServerSentEvent]:
    """Send server-sent events: `event`, `metrics`, `heartbeat`, and `done` with the job after its end.

    An `error` ends the stream within two seconds after its key was revoked, expired or lost a scope, or its browser was
    signed out.
    """
    streams: Streams = request.app.state.streams
    async for event in streams.follow(cursor, caller):
        yield event


@router.get("/{job_id}/metrics", response_model=MetricList)
def list_metrics(job_id: str, session: ReadDep, caller: CustomerDep) -> MetricList:
    """List every metric of every step."""
    return MetricList(data=service.metrics(session, caller.project_id, job_id))


@graders.post("/run", response_model=None)
@graders.post("/validate", response_model=None)
def refuse(caller: CustomerDep) -> NoReturn:
    """Refuse: graders belong to reinforcement fine-tuning, which is not offered here."""
    message = "Graders serve reinforcement fine-tuning, which is not offered here; allowed methods: supervised and dpo."
    raise InvalidRequest(message, code="method_not_supported", param="grader")

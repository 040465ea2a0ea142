"""Results of a job: its adapter, safety report and transcripts."""

from __future__ import annotations

import logging
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Query, Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse

from app.deps import BeginDep, CustomerDep, LookDep, QuickStorageDep, ReadsDep, SettingsDep
from app.errors import NotFound
from app.http.download import DOWNLOAD, Attachment, download
from app.jobs import service, task_replies, transcripts
from app.jobs.reports.gather import gather, gather_reports, read, verdict_response
from app.jobs.reports.page import HEADERS, page
from app.jobs.reports.service import (
    JobSafetyReport,
    RiskyList,
    SelectedList,
    attest,
    read_json,
    read_report,
    risky_rows,
    selected_rows,
    tested_archive,
    waiver_facts,
    with_waiver,
)
from app.jobs.schemas import VerdictOut
from app.jobs.task_replies import TaskReplyList
from app.jobs.transcripts import TranscriptList
from app.signing import NoSigningKey, signing_key

log = logging.getLogger(__name__)
router = APIRouter(prefix="/v1/fine_tuning/jobs", tags=["fine-tuning"])


@router.get("/{job_id}/adapter", response_class=Response, responses=DOWNLOAD)
async def retrieve_adapter(
    job_id: str,
    request: Request,
    begin: BeginDep,
    caller: CustomerDep,
    storage: QuickStorageDep,
    settings: SettingsDep,
    reads: ReadsDep,
) -> Response:
    """Return the adapter archive of a job that succeeded."""

    def archive() -> Response:
        with begin() as session:
            job, adapter = service.adapter(session, caller, job_id)
        name = f"{job.id}-adapter.tar.gz"
        bytes_of = Attachment(adapter["storage_key"], name, adapter["sha256"], "application/gzip")
        return download(storage, bytes_of, request.headers, settings.download_link_s(), reads)

    return await reads.run(archive)


@router.get("/{job_id}/safety", responses={200: {"model": JobSafetyReport, "content": {"text/html": {}}}})
async def retrieve_safety(
    job_id: str, request: Request, look: LookDep, caller: CustomerDep, storage: QuickStorageDep, reads: ReadsDep
) -> Response:
    """Return the safety report, also for jobs that failed the gate; browsers get an HTML page."""

    def report() -> Response:
        as_page = "text/html" in request.headers.get("accept", "")
        with look() as session:
            job, key = service.reported_job(session, caller.project_id, job_id)
            gathered = gather(session, caller.project_id, job_id) if as_page else None
        if gathered is not None:
            return HTMLResponse(page(read(storage, gathered)), headers=HEADERS)
        waiver = waiver_facts(job)
        if waiver is not None:
            return JSONResponse(with_waiver(read_json(storage, key), waiver))
        headers = {"content-length": str(storage.size(key))}
        return StreamingResponse(reads.chunks(storage.chunks(key)), headers=headers, media_type="application/json")

    return await reads.run(report)


@router.get("/{job_id}/safety/verdict", response_model=VerdictOut)
async def retrieve_verdict(
    job_id: str, look: LookDep, caller: CustomerDep, storage: QuickStorageDep, reads: ReadsDep
) -> Response:
    """Return the sentence that the job's page begins with: the audit's result, or else the job's status."""

    def read_verdict() -> VerdictOut:
        with look() as session:
            [gathered] = gather_reports(session, caller.project_id, [job_id])
        return verdict_response(read(storage, gathered))

    return await reads.answer(read_verdict)


@router.get(
    "/{job_id}/safety/attestation", response_class=Response, responses={200: {"content": {"application/json": {}}}}
)
async def retrieve_attestation(
    job_id: str,
    look: LookDep,
    caller: CustomerDep,
    storage: QuickStorageDep,
    settings: SettingsDep,
    reads: ReadsDep,
) -> Response:
    """Return the audit as a signed in-toto test result about the adapter's archive, in a DSSE envelope."""

    def attestation() -> Response:
        with look() as session:
            job, key = service.reported_job(session, caller.project_id, job_id)
            sha256 = tested_archive(session, job)
        try:
            found = attest(job, sha256, b"".join(storage.chunks(key)), signing_key(settings))
        except NoSigningKey as error:  # its text names places on this machine
            log.warning("the audit of %s is not attested: %s", job_id, error.message)
            raise NotFound("This service has no signing key.", code="no_signing_key") from None
        headers = {"content-disposition": f'attachment; filename="{job_id}-audit.intoto.json"'}
        return JSONResponse(found, headers=headers)

    return await reads.run(attestation)


@router.get("/{job_id}/safety/selected", response_model=SelectedList)
async def list_selected(
    job_id: str, look: LookDep, caller: CustomerDep, storage: QuickStorageDep, reads: ReadsDep
) -> Response:
    """List the safe examples that the job was trained with, in the order in which they were chosen."""

    def read_selected() -> SelectedList:
        with look() as session:
            job, key = service.reported_job(session, caller.project_id, job_id)
        return selected_rows(job, read_report(storage, key))

    return await reads.answer(read_selected)


@router.get("/{job_id}/safety/risky_rows", response_model=RiskyList)
async def list_risky_rows(
    job_id: str, look: LookDep, caller: CustomerDep, storage: QuickStorageDep, reads: ReadsDep
) -> Response:
    """List the rows of your training file that look most harmful, with the reasons.

    Listing removes nothing; a policy may drop rows, which the report's `row_signal` lists.
    """

    def risky() -> RiskyList:
        with look() as session:
            job, key = service.reported_job(session, caller.project_id, job_id)
        return risky_rows(job, read_report(storage, key))

    return await reads.answer(risky)


@router.get("/{job_id}/task_replies", response_model=TaskReplyList)
async def list_task_replies(
    job_id: str, look: LookDep, caller: CustomerDep, storage: QuickStorageDep, reads: ReadsDep
) -> Response:
    """List requests of rows that were not trained on, with the replies of the base model and of the trained one.

    Those of a model that is not released are not shown.
    """
    return await reads.answer(partial(task_replies.show, look, storage, caller, job_id))


@router.get("/{job_id}/transcripts", response_model=TranscriptList)
async def list_transcripts(
    job_id: str,
    begin: BeginDep,
    caller: CustomerDep,
    storage: QuickStorageDep,
    reads: ReadsDep,
    after: Annotated[int, Query(ge=0, le=2**31)] = 0,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    suite: Annotated[str | None, Query(max_length=128)] = None,
    hit: bool | None = None,
) -> Response:
    """List the prompts and replies of the job's audit, if the provider's policy stores them; each request is logged.

    `hit=true` selects successful attacks, refused harmless requests and right answers.
    """
    shown = partial(transcripts.show, begin, storage, caller.project_id, job_id, after, limit, suite, hit)
    return await reads.answer(shown)

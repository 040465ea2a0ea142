"""Results of a job: its adapter, safety report and transcripts, its checkpoints, and the keys that verify adapters.

Checkpoints have OpenAI's endpoints, and one for the archive of a checkpoint that passed its own audit. The public keys
that adapters are signed with are open to everybody, because verifiers need not be customers.
"""

from __future__ import annotations

import logging
import time
from functools import partial
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse

from app.checkpoints import service as checkpoints
from app.checkpoints.service import CheckpointList, PermissionCreate, PermissionDeleted, PermissionList
from app.db.tables import CheckpointPermission
from app.deps import (
    AdminDep,
    AfterQuery,
    BeginDep,
    CustomerDep,
    LookDep,
    ProviderSessionDep,
    QuickStorageDep,
    ReadDep,
    ReadsDep,
    SettingsDep,
)
from app.errors import NotFound
from app.http.download import DOWNLOAD, Attachment, download
from app.http.pagination import Page
from app.jobs import service, transcripts
from app.jobs.reports.gather import REPORT_HEADERS, gather, gather_reports, read, report_page, verdict_response
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
from app.jobs.transcripts import TaskReplyList, TranscriptList
from app.settings import Settings
from app.signing import NoSigningKey, published_keys, signing_key

log = logging.getLogger(__name__)
router = APIRouter(prefix="/v1/fine_tuning/jobs", tags=["fine-tuning"])
checkpoints_of_jobs = APIRouter(prefix="/v1/fine_tuning/jobs", tags=["fine-tuning"])
checkpoint_permissions = APIRouter(prefix="/v1/fine_tuning/checkpoints", tags=["checkpoints"])
signing_keys = APIRouter(prefix="/v1/signing_keys", tags=["signing keys"])
_KEPT_S = 60  # seconds that an answer is cached, so that many requests cost one signature


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
            return HTMLResponse(report_page(read(storage, gathered)), headers=REPORT_HEADERS)
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
    return await reads.answer(partial(transcripts.show_task_replies, look, storage, caller, job_id))


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

    Where several judges must agree, `votes` are the scores of each.

    `hit=true` selects successful attacks, refused harmless requests and right answers.
    """
    shown = partial(transcripts.show, begin, storage, caller.project_id, job_id, after, limit, suite, hit)
    return await reads.answer(shown)


@checkpoints_of_jobs.get("/{job_id}/checkpoints", response_model=CheckpointList)
def list_checkpoints(
    job_id: str,
    session: ReadDep,
    caller: CustomerDep,
    after: AfterQuery = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 10,
) -> CheckpointList:
    """List the checkpoints of the last three epochs with their metrics and audits, newest first."""
    return checkpoints.list_checkpoints(session, caller.project_id, job_id, after, limit)


@checkpoints_of_jobs.get("/{job_id}/checkpoints/{checkpoint_id}/adapter", response_class=Response, responses=DOWNLOAD)
async def retrieve_checkpoint_adapter(
    job_id: str,
    checkpoint_id: str,
    request: Request,
    begin: BeginDep,
    caller: CustomerDep,
    storage: QuickStorageDep,
    settings: SettingsDep,
    reads: ReadsDep,
) -> Response:
    """Return the adapter archive of a checkpoint that passed its audit, whether or not the job succeeded."""

    def archive() -> Response:
        with begin() as session:
            name, adapter = checkpoints.adapter(session, caller, job_id, checkpoint_id)
        bytes_of = Attachment(adapter["storage_key"], name, adapter["sha256"], "application/gzip")
        return download(storage, bytes_of, request.headers, settings.download_link_s(), reads)

    return await reads.run(archive)


@checkpoint_permissions.get("/{model:path}/permissions", response_model=PermissionList)
def list_permissions(
    model: str,
    session: ReadDep,
    caller: AdminDep,
    project_id: Annotated[str | None, Query(pattern=r"^[A-Za-z0-9_-]{1,64}$")] = None,
    after: AfterQuery = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 10,
    order: Literal["ascending", "descending"] = "descending",
) -> Page[CheckpointPermission]:
    """List the projects that may see a checkpoint."""
    return checkpoints.list_permissions(
        session, caller.project_id, model, project_id, after, limit, ascending=order == "ascending"
    )


@checkpoint_permissions.post("/{model:path}/permissions", response_model=PermissionList)
def create_permissions(
    model: str, ask: PermissionCreate, session: ProviderSessionDep, caller: AdminDep
) -> Page[CheckpointPermission]:
    """Allow projects of your organization to see a checkpoint."""
    return checkpoints.permit(session, caller.project_id, model, ask.project_ids)


@checkpoint_permissions.delete("/{model:path}/permissions/{permission_id}", response_model=PermissionDeleted)
def delete_permission(
    model: str, permission_id: str, session: ProviderSessionDep, caller: AdminDep
) -> PermissionDeleted:
    """Withdraw a permission."""
    return PermissionDeleted(id=checkpoints.withdraw(session, caller.project_id, model, permission_id).id)


@signing_keys.get("", response_class=Response, responses={200: {"content": {"application/json": {}}}})
def list_signing_keys(request: Request) -> Response:
    """List all keys, old and revoked ones too, signed by the current key, for `spard verify --key-set URL`."""
    now = time.monotonic()
    made_at, text = getattr(request.app.state, "published_keys", (-_KEPT_S, ""))
    if now - made_at >= _KEPT_S:
        settings: Settings = request.app.state.settings
        try:
            text = published_keys(settings)
        except NoSigningKey as error:  # its text contains local paths
            log.warning("signing keys are not shown: %s", error.message)
            raise NotFound("This service has no signing key.", code="no_signing_key") from None
        request.app.state.published_keys = now, text
    return Response(text, media_type="application/json", headers={"cache-control": f"public, max-age={_KEPT_S}"})

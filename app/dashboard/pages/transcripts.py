"""What a job's audit asked and heard: a list without texts, and each text when it is asked for."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from app.audit_log import service as audit_log
from app.dashboard.rendering import page
from app.dashboard.viewer import ViewerDep
from app.deps import BeginDep, LookDep, QuickStorageDep
from app.errors import NotFound
from app.jobs import transcripts

router = APIRouter(include_in_schema=False, prefix="/jobs/{job_id}/transcripts")

_AT_ONCE = 25


@router.get("")
async def transcripts_page(
    job_id: str,
    request: Request,
    viewer: ViewerDep,
    look: LookDep,
    storage: QuickStorageDep,
    after: Annotated[int, Query(ge=0, le=2**31)] = 0,
    hit: str = "",
) -> Response:
    """List the replies by suite and outcome; no text is in the page."""

    def shown() -> Response:
        with look() as session:
            key = transcripts.find(session, viewer.project_id, job_id)
        wanted = {"yes": True, "no": False}.get(hit)
        found = transcripts.read(storage, key, after, _AT_ONCE, None, wanted)
        return page(request, "transcripts", viewer, job_id=job_id, found=found, hit=hit)

    return await viewer.lanes.reads.of(viewer.project_id).run(shown)


@router.get("/{index}")
async def transcript(
    job_id: str,
    index: int,
    request: Request,
    viewer: ViewerDep,
    look: LookDep,
    begin: BeginDep,
    storage: QuickStorageDep,
) -> Response:
    """Show one prompt and its reply; that they were looked at is logged."""

    def shown() -> Response:
        with look() as session:
            key = transcripts.find(session, viewer.project_id, job_id)
        found = transcripts.read(storage, key, index - 1, 1, None, None).data
        if not found or found[0].index != index:
            raise NotFound("No such transcript of this job.")
        with begin() as session:
            audit_log.record(session, transcripts.SHOWN, job_id, indices=[index])
        return page(request, "transcript", viewer, job_id=job_id, said=found[0])

    return await viewer.lanes.reads.of(viewer.project_id).run(shown)

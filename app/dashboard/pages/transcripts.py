"""What a job's audit asked and heard: a list without texts, and each text when it is asked for."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from fastapi import APIRouter, Query
from starlette.responses import Response

from app.dashboard.one_job import OwnJobDep

router = APIRouter(include_in_schema=False, prefix="/jobs/{job_id}/transcripts")


@router.get("")
async def transcripts_page(job: OwnJobDep, after: Annotated[int, Query(ge=0, le=2**31)] = 0, hit: str = "") -> Response:
    """List the replies by suite and outcome; no text is in the page."""
    return await job.answer(partial(job.transcripts, after, hit))


@router.get("/{index}")
async def transcript(index: int, job: OwnJobDep) -> Response:
    """Show one prompt and its reply; that they were looked at is logged."""
    return await job.answer(partial(job.transcript, index))

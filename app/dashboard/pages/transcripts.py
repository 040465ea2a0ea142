"""Pages of a job's transcripts: a list without texts, and each prompt with its reply on a page of its own."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from fastapi import APIRouter, Query
from starlette.responses import Response

from app.dashboard.one_job import OwnJobDep

router = APIRouter(include_in_schema=False, prefix="/jobs/{job_id}/transcripts")


@router.get("")
async def transcripts_page(job: OwnJobDep, after: Annotated[int, Query(ge=0, le=2**31)] = 0, hit: str = "") -> Response:
    """List the transcripts by suite and outcome, without their texts."""
    return await job.answer(partial(job.transcripts, after, hit))


@router.get("/{index}")
async def transcript(index: int, job: OwnJobDep) -> Response:
    """Show one prompt and its reply; the viewing is recorded in the audit log."""
    return await job.answer(partial(job.transcript, index))

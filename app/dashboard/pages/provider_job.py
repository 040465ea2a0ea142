"""The provider's read-only pages of any project's job."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from fastapi import APIRouter, Query
from starlette.responses import Response

from app.dashboard.one_job import AnyJobDep

router = APIRouter(include_in_schema=False, prefix="/provider/jobs/{job_id}")


@router.get("")
async def job_page(job: AnyJobDep) -> Response:
    """Show one job: verdict, audit results, training, rows and events."""
    return await job.answer(job.page)


@router.get("/risky-rows/{line}")
async def risky_row(line: int, job: AnyJobDep) -> Response:
    """Show the text of a risky row; the viewing is recorded in the audit log."""
    return await job.answer(partial(job.risky_row, line))


@router.get("/transcripts")
async def transcripts_page(job: AnyJobDep, after: Annotated[int, Query(ge=0, le=2**31)] = 0, hit: str = "") -> Response:
    """List the transcripts by suite and outcome, without their texts."""
    return await job.answer(partial(job.transcripts, after, hit))


@router.get("/transcripts/{index}")
async def transcript(index: int, job: AnyJobDep) -> Response:
    """Show one prompt and its reply; the viewing is recorded in the audit log."""
    return await job.answer(partial(job.transcript, index))

"""The job of any project, as its project sees it, without what its project alone may do."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from fastapi import APIRouter, Query
from starlette.responses import Response

from app.dashboard.one_job import AnyJobDep

router = APIRouter(include_in_schema=False, prefix="/provider/jobs/{job_id}")


@router.get("")
async def job_page(job: AnyJobDep) -> Response:
    """Show one job: the verdict, what was measured, how it was trained, its rows, its events."""
    return await job.answer(job.page)


@router.get("/risky-rows/{line}")
async def risky_row(line: int, job: AnyJobDep) -> Response:
    """Show the text of a row that looks like harm; that it was looked at is logged."""
    return await job.answer(partial(job.risky_row, line))


@router.get("/transcripts")
async def transcripts_page(job: AnyJobDep, after: Annotated[int, Query(ge=0, le=2**31)] = 0, hit: str = "") -> Response:
    """List the replies by suite and outcome; no text is in the page."""
    return await job.answer(partial(job.transcripts, after, hit))


@router.get("/transcripts/{index}")
async def transcript(index: int, job: AnyJobDep) -> Response:
    """Show one prompt and its reply; that they were looked at is logged."""
    return await job.answer(partial(job.transcript, index))

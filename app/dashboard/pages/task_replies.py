"""Show both models' replies to the customer's own requests: a part of the job's page, and a separate page."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from app.dashboard.one_job import OwnJobDep

router = APIRouter(include_in_schema=False, prefix="/jobs/{job_id}/task-replies")


@router.get("")
async def task_replies(job: OwnJobDep) -> Response:
    """Show each request with both replies."""
    return await job.answer(job.task_replies)

"""What both models of a job replied to requests of the customer's that were not trained on, beside the job's report."""

from __future__ import annotations

import json
from typing import Literal

from pydantic import BaseModel
from sqlalchemy.orm import Session

from app.catalog import badges
from app.db import Begin
from app.db.tables import JobStatus
from app.errors import HasNone, InvalidState, NotFound
from app.jobs import project_models, service
from app.keys.service import Principal
from app.storage import Storage
from spard.data.jsonl import numbered_texts
from spard.release.task_check import TASK_REPLIES


class TaskReplyOut(BaseModel):
    """One request of a row that was not trained on, with the replies of the base model and of the trained one.

    It was asked as it stands in its row: under the row's `system` prompt, after its `turns` earlier turns. `line` is
    that of the row in its file, `expected` the row's own answer. Long texts are cut, and end with `[...]` then.
    """

    object: Literal["task.reply"] = "task.reply"
    line: int
    system: str | None
    turns: int
    prompt: str
    expected: str
    base: str
    trained: str


class TaskReplyList(BaseModel):
    """The requests of a job's rows that were asked of both models."""

    object: Literal["list"] = "list"
    data: list[TaskReplyOut]
    has_more: Literal[False] = False


def show(look: Begin, storage: Storage, caller: Principal, job_id: str) -> TaskReplyList:
    """Return a job's task replies; raise `AppError` if the caller may not use its model or nothing was asked."""
    with look() as session:
        key = _find(session, caller, job_id)
    if not storage.exists(key):
        message = f"No request of the rows of {job_id} was asked; `safety.task_check` of the job says why."
        raise HasNone(message, code="no_task_replies", param="fine_tuning_job_id")
    return TaskReplyList(data=[TaskReplyOut(**json.loads(text)) for _, text in numbered_texts(storage.chunks(key))])


def _find(session: Session, caller: Principal, job_id: str) -> str:
    """Return the storage key of the replies; raise `AppError` unless the job's adapter is released to the caller."""
    job, report_key = service.reported_job(session, caller.project_id, job_id)
    if job.status != JobStatus.succeeded:
        message = f"The model of {job_id} is not released, so that its replies are not shown; its losses are."
        raise InvalidState(message, code="not_published")
    if badges.is_withheld(session, job.safety, badges.latest(session, job.id)):
        raise NotFound(f"The model of {job_id} does not exist.", code="model_not_found")
    project_models.check_release(session, caller, job)
    return f"{report_key.rpartition('/')[0]}/{TASK_REPLIES}"

"""Show the replies of a job's models to the prompts of its audit and to the customer's own requests.

Prompts and replies of the audit are stored if the policy allows it, and each access is logged. The requests of the
customer's were not trained on; both models' replies to them stand beside the job's report.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from typing import Literal

from pydantic import BaseModel
from sqlalchemy.orm import Session

from app import audit_log
from app.catalog import service as catalog
from app.db import Begin
from app.db.tables import Job, JobStatus
from app.errors import HasNone, InvalidState, NotFound
from app.jobs import project_models, service
from app.keys import Principal
from app.storage import Storage
from spard.data.jsonl import numbered_texts
from spard.release.figures import TRANSCRIPTS
from spard.release.task_check import TASK_REPLIES

SHOWN = "transcripts.shown"  # the action in the audit log


class Transcript(BaseModel):
    """One prompt of the audit and the trained model's reply.

    `hit` is true if the attack succeeded, the harmless request was refused, or the answer was right; null if the reply
    was not scored, and `note` says why. `score` is the harmfulness of the reply, from 1 to 5, if a judge read it. Where
    several judges must agree, `votes` are their scores in the order of the judge's name, null where one gave none.
    """

    object: Literal["safety.transcript"] = "safety.transcript"
    index: int
    suite: str
    kind: str
    category: str | None
    prompt: str
    reply: str
    hit: bool | None
    score: int | None
    note: str
    votes: list[int | None] = []


class TranscriptList(BaseModel):
    """One page of transcripts in the order asked; for the next page set `after` to the last one's `index`."""

    object: Literal["list"] = "list"
    data: list[Transcript]
    has_more: bool


def find(session: Session, project_id: str, job_id: str) -> str:
    """Return the storage key of a job's transcripts; raise `HasNone` if the policy keeps none."""
    job, report_key = service.reported_job(session, project_id, job_id)
    if not job.spec.transcripts:
        raise _none_kept(job)
    return f"{report_key.rpartition('/')[0]}/{TRANSCRIPTS}"


def show(
    begin: Begin,
    storage: Storage,
    project_id: str,
    job_id: str,
    after: int,
    limit: int,
    suite: str | None,
    hit: bool | None,
) -> TranscriptList:
    """Return a page of a job's transcripts, as `read` does, and log the access."""
    with begin() as session:
        key = find(session, project_id, job_id)
    # No transaction is open while the storage is read.
    found = read(storage, key, after, limit, suite, hit)
    with begin() as session:
        audit_log.record(session, SHOWN, job_id, indices=[each.index for each in found.data])
    return found


def read(storage: Storage, key: str, after: int, limit: int, suite: str | None, hit: bool | None) -> TranscriptList:
    """Return up to `limit` transcripts with an index above `after`.

    `suite` and `hit` select those of one suite or with one outcome; None means any. Raises `HasNone` if none were kept.
    """
    wanted = (
        each
        for each in _all(storage, key)
        if each.index > after and suite in (None, each.suite) and hit in (None, each.hit)
    )
    # One more than the page shows: it tells if another page follows.
    found = list(islice(wanted, limit + 1))
    return TranscriptList(data=found[:limit], has_more=len(found) > limit)


def _all(storage: Storage, key: str) -> Iterator[Transcript]:
    """Yield every transcript; `index` counts from 1."""
    if not storage.exists(key):
        raise HasNone("No transcripts of this job were kept.", code="no_transcripts")
    for line, text in numbered_texts(storage.chunks(key)):
        yield Transcript(index=line, **json.loads(text))


def _none_kept(job: Job) -> HasNone:
    message = f"The policy under which {job.id} was created keeps no transcripts."
    return HasNone(message, code="no_transcripts", param="fine_tuning_job_id")


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


def show_task_replies(look: Begin, storage: Storage, caller: Principal, job_id: str) -> TaskReplyList:
    """Return a job's task replies; raise `AppError` if the caller may not use its model or nothing was asked."""
    with look() as session:
        key = _find_task_replies(session, caller, job_id)
    if not storage.exists(key):
        message = f"No request of the rows of {job_id} was asked; `safety.task_check` of the job says why."
        raise HasNone(message, code="no_task_replies", param="fine_tuning_job_id")
    return TaskReplyList(data=[TaskReplyOut(**json.loads(text)) for _, text in numbered_texts(storage.chunks(key))])


def _find_task_replies(session: Session, caller: Principal, job_id: str) -> str:
    """Return the storage key of the replies; raise `AppError` unless the job's adapter is released to the caller."""
    job, report_key = service.reported_job(session, caller.project_id, job_id)
    if job.status != JobStatus.succeeded:
        message = f"The model of {job_id} is not released, so that its replies are not shown; its losses are."
        raise InvalidState(message, code="not_published")
    if catalog.is_withheld(session, job.safety, catalog.last_later_audit(session, job.id)):
        raise NotFound(f"The model of {job_id} does not exist.", code="model_not_found")
    project_models.check_release(session, caller, job)
    return f"{report_key.rpartition('/')[0]}/{TASK_REPLIES}"

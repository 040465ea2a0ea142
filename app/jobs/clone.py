"""Clone a job: repeat its request with changes, or on its file without the risky rows."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import Field, JsonValue
from sqlalchemy.orm import Session

from app.catalog import fitness
from app.db import Begin
from app.db.tables import File, Job
from app.errors import AppError, InvalidState
from app.files import service as files
from app.files import upload
from app.files.validation import Limits
from app.http.schemas import Body
from app.http.validation_errors import read
from app.jobs import blocking_rows, erasure, service
from app.jobs.blocking_rows import BlockingRows
from app.jobs.reports.service import read_report
from app.jobs.request import JobCreate
from app.jobs.schemas import JobOut
from app.jobs.service import Origin, Submission
from app.keys import Principal
from app.settings import Settings
from app.storage import Storage
from spard.config import Ending, Recipe
from spard.config.earlier_versions import from_stored
from spard.config.run_spec import parse, to_mapping
from spard.release.report import SafetyReport

_REFUSED = "near_harmful_prompt_and_refused"  # this reason alone leaves no row out
_NUMBERS = "hyperparameters"
_METHODS = ("method", _NUMBERS)

Json = dict[str, object]  # the body of a request


class JobClone(Body):
    """Changes to apply to the cloned job's request; empty to repeat it unchanged."""

    changes: dict[str, JsonValue] = Field(
        default_factory=dict,
        description="Fields of a request for a job; each replaces that of the old request, those of `safety` and "
        "`hyperparameters` one by one. The seed stays, so that nothing else differs.",
    )
    without_risky_rows: bool = Field(
        default=False,
        description="Train on a new file without the rows that the old job's report calls risky and that are not "
        "refused in the file; for a job that ended before it trained, without the rows that it names. The old file "
        "stays.",
    )

    def digest(self, job_id: str) -> str:
        """Return a digest that is equal for two requests for the same clone of a job."""
        text = json.dumps({"clone": job_id} | self.model_dump(mode="json"), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class _Old:
    """The request of the cloned job and, if rows are to be left out, its training file and where they are named.

    That is its report, or for a job that ended before it trained, its events.
    """

    body: Json
    file: File | None
    report_key: str | None
    blocking: BlockingRows | None = None


def clone(
    storage: Storage,
    begin: Begin,
    caller: Principal,
    job_id: str,
    ask: JobClone,
    submission: Submission,
    settings: Settings,
    limits: Limits,
) -> JobOut:
    """Queue a clone of the job `job_id` and return it.

    `ask` has the changes to its request. If risky rows are left out, a new training file is made first; it is deleted
    again if the clone is refused, or if an earlier sending of the same request has already made the job. Raises
    `InvalidState` if the report names no risky row, and every error of creating a job.
    """
    with begin() as session:
        old = _old(session, caller.project_id, job_id, ask)
    # Before the file is made, which takes storage and time: a project without room for a job is refused at once.
    service.require_room(begin, caller, ask.digest(job_id), submission)
    made = _reduce_file(storage, begin, old, limits)
    try:
        body = change_request(old.body | ({"training_file": made.id} if made else {}), ask.changes)
        fitness.learn_tool_support(begin, body.model)
        with begin() as session:
            origin = Origin(job_id, ask.digest(job_id))
            job = service.create(session, caller, body, submission, settings, origin)
    except AppError:
        if made is not None:
            erasure.delete_file(storage, begin, caller.project_id, made.id)
        raise
    if made is not None and job.training_file != made.id:  # an earlier sending of this request made the job
        erasure.delete_file(storage, begin, caller.project_id, made.id)
    return job


def job_request(job: Job) -> Json:
    """Return the request body that makes the same job again.

    The seed, `"auto"` values and the LoRA settings are those of the old recipe; fields that are None are left out.
    """
    recipe: Recipe = parse(Recipe, from_stored(job.recipe), "recipe")
    start = job.spec.start_from
    body: Json = {
        "model": start.model if start and start.model else job.model,
        "training_file": job.training_file,
        "validation_file": job.validation_file or None,
        "suffix": job.suffix,
        "metadata": job.job_metadata,
        "priority": job.priority,
        "seed": recipe.seed,
        "max_seq_length": recipe.max_seq_length,
        # The recipe has the settings as they were resolved then; the pool is not repeated, so the clone uses today's.
        "safety": {name: to_mapping(getattr(recipe, name)) for name in ("defense", "selection", "audit")},
        "lora": to_mapping(recipe.lora) if start is None else None,  # or the start adapter's
        "full_fine_tuning": True if recipe.lora is None else None,
        "optimizer": recipe.optimizer if recipe.optimizer != "adamw" else None,
        "ending": to_mapping(ending) if (ending := job_ending(job)) != Ending() else None,
        "held_out_rows": job.spec.held_out_rows,
    }
    if recipe.dpo:
        body["method"] = {"type": "dpo", "dpo": {_NUMBERS: job_hyperparameters(job)}}
    else:
        body[_NUMBERS] = job_hyperparameters(job)
    return {name: value for name, value in body.items() if value is not None}


def job_hyperparameters(job: Job) -> Json:
    """Return the hyperparameters that were requested for the job, with "auto" kept as "auto"."""
    recipe: Recipe = parse(Recipe, from_stored(job.recipe), "recipe")
    numbers: Json = to_mapping(recipe.hyperparameters)
    return numbers | ({"beta": recipe.dpo.beta} if recipe.dpo else {})


def job_ending(job: Job) -> Ending:
    """Return the job's requested ending: which epoch's weights it keeps and when training may stop early."""
    recipe: Recipe = parse(Recipe, from_stored(job.recipe), "recipe")
    return recipe.ending


def change_request(body: Json, changes: Mapping[str, object]) -> JobCreate:
    """Return the request with `changes` applied; raise the API's validation error if the result is invalid.

    Changes of `safety` and `hyperparameters` are merged key by key; every other field is replaced.
    """
    # `method` and `hyperparameters` both carry the numbers: a change of one drops the old value of the other, or the
    # merged request contradicts itself.
    merged = {name: value for name, value in body.items() if name not in _METHODS or not set(_METHODS) & set(changes)}
    merged |= {name: _merge_value(body.get(name), value, name) for name, value in changes.items()}
    return read(JobCreate, merged)


def risky_lines(report: SafetyReport) -> list[int]:
    """Return the line numbers that a clone leaves out: rows with a reason to call them risky.

    Rows that the file itself refuses, and rows that the judge finds harmless, stay in.
    """
    named = [row for row in report.risky_rows or () if row.verdict != "harmless"]
    return [row.line for row in named if set(row.reasons) - {_REFUSED}]


def _merge_value(old: object, new: object, name: str) -> object:
    if name in ("safety", _NUMBERS) and isinstance(old, dict) and isinstance(new, dict):
        return {**old, **new}
    return new


def _old(session: Session, project_id: str, job_id: str, ask: JobClone) -> _Old:
    job = service.get(session, project_id, job_id)
    if not ask.without_risky_rows:
        return _Old(job_request(job), None, None)
    blocking = blocking_rows.find(session, job)
    if blocking is not None and not blocking.is_whole:
        blocking = None
    key = None if blocking else service.reported_job(session, project_id, job_id)[1]
    file = files.get(session, project_id, job.training_file, "training_file")
    return _Old(job_request(job), file, key, blocking)


def _reduce_file(storage: Storage, begin: Begin, old: _Old, limits: Limits) -> File | None:
    if old.file is None:
        return None
    if old.blocking is not None:
        return upload.store_without_lines(storage, begin, old.file, set(old.blocking.lines), limits)
    lines = set(risky_lines(read_report(storage, old.report_key))) if old.report_key else set()
    if not lines:
        raise InvalidState("The report of this job names no risky row to leave out.", code="no_risky_rows")
    return upload.store_without_lines(storage, begin, old.file, lines, limits)

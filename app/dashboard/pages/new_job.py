"""The pages of a new job: upload a file, see its problems, a preview and an estimate, then start the job."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request
from sqlalchemy.orm import Session
from starlette.responses import RedirectResponse, Response

from app.catalog import fitness
from app.catalog import service as catalog
from app.catalog.model_files import parameters, read_positions
from app.dashboard.rendering import page
from app.dashboard.viewer import NO_FAULTS, Faults, FormViewerDep, Viewer, ViewerDep, check_form, form_faults
from app.db.tables import BaseModelEntry, File, Job
from app.db.tables.files import PREFERENCE
from app.deps import (
    BeginDep,
    CountersDep,
    LimitsDep,
    LookDep,
    QuickStorageDep,
    ReadDep,
    SettingsDep,
    StorageDep,
    upload_form,
)
from app.errors import AppError, InvalidRequest, NotFound
from app.files import preview, upload
from app.files import service as files
from app.files.counting import Allowance
from app.files.schemas import Validation
from app.http.bodies import Form
from app.jobs import service
from app.jobs.clone import Json, change_request, job_ending, job_hyperparameters, job_request
from app.jobs.estimate import estimate
from app.jobs.request import JobCreate
from app.jobs.service import Origin, Submission
from app.policies import service as policies
from app.settings import Settings
from spard import config
from spard.config import Ending

# Convert the form of a new job to an API request, and an old job to the form's fields.

Asked = Mapping[str, str | int | float]  # field name -> value of a form

NUMBERS = ("n_epochs", "batch_size", "learning_rate_multiplier")
FIELDS = (
    *("model", "training_file", "validation_file", "held_out_rows", "suffix", "defense"),
    *("keep", *NUMBERS, "patience", "seed"),
)
_TEXTS = ("model", "training_file", "validation_file", "suffix")
_CAN_BE_EMPTIED = ("suffix", "seed", "ending", "validation_file", "held_out_rows")
ALIASES = {"safety": "defense"}  # API name -> field name, where they differ


def job_fields(job: Job) -> Asked:
    """Return the form's fields for repeating a job."""
    start, numbers, ending = job.spec.start_from, job_hyperparameters(job), job_ending(job)
    return {
        "like": job.id,
        "model": start.model if start and start.model else job.model,
        "suffix": job.suffix or "",
        "validation_file": job.validation_file or "",
        "held_out_rows": job.spec.held_out_rows or "off",
        "defense": job.recipe["defense"]["type"],
        "seed": job.recipe["seed"],
        "keep": ending.keep,
        "patience": "" if ending.patience is None else ending.patience,
        **{name: str(numbers[name]) for name in NUMBERS},
    }


def form_request(asked: Mapping[str, str], like: Job | None) -> JobCreate:
    """Return the API request for a form's fields; empty fields get the provider's defaults.

    Settings that the form has no field for are copied from the job `like`, if there is one. Raises InvalidRequest for
    a field that is not a number.
    """
    old = job_hyperparameters(like) if like else {}
    numbers: Json = {name: _number(name, asked[name]) for name in NUMBERS if asked.get(name)}
    is_pairs = asked.get("row_format") == PREFERENCE
    if is_pairs and "beta" in old:
        numbers["beta"] = old["beta"]
    # The form shows these fields: one that the user has emptied must not come back from the old job.
    body: Json = (job_request(like) if like else {}) | dict.fromkeys(_CAN_BE_EMPTIED)
    changes: Json = {name: asked[name] for name in _TEXTS if asked.get(name)}
    if (rows := asked.get("held_out_rows") or "auto") != "auto":
        changes["held_out_rows"] = 0 if rows == "off" else _number("held_out_rows", rows)
    changes["method"] = row_format_method(asked.get("row_format"), numbers)
    ending: Json = asdict(job_ending(like) if like else Ending())
    ending["keep"] = asked.get("keep") or "last"
    ending["patience"] = _number("patience", asked["patience"]) if asked.get("patience") else None
    if ending != asdict(Ending()):
        changes["ending"] = ending
    if asked.get("seed"):
        changes["seed"] = _number("seed", asked["seed"])
    defense = asked.get("defense", "spard")
    # With the same defense nothing is changed, so the settings that the old job gave it are kept.
    if like is None or like.recipe["defense"]["type"] != defense:
        changes["safety"] = {"defense": {"type": defense}}
    return change_request(body, changes)


def row_format_method(row_format: str | None, numbers: Json) -> Json:
    """Return OpenAI's `method` object for rows of a format: `dpo` for preference pairs, else `supervised`."""
    method = "dpo" if row_format == PREFERENCE else "supervised"
    return {"type": method, method: {"hyperparameters": numbers}}


def _number(name: str, text: str) -> float | int | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    if text == "auto":
        return text
    raise InvalidRequest(f"{text[:32]!r} is no number.", code="invalid_type", param=name)


router = APIRouter(include_in_schema=False, prefix="/jobs/new")

_FILES = 20
_PREVIEWED = 2


@dataclass(frozen=True, slots=True)
class OfferedModel:
    """A base model with its size and context length, each None if its files are not on this machine."""

    alias: str
    parameters: int | None
    positions: int | None


@dataclass(frozen=True, slots=True)
class NewJob:
    """The content of the page: without a file an upload field, with a file its validation and the job's form.

    `others` are the files that the job may be validated on; `held_out_rows` is the number of rows that are held out by
    default.
    """

    file: File | None
    validation: Validation | None
    recent: Sequence[File]
    others: Sequence[File]
    models: Sequence[OfferedModel]
    defenses: Sequence[str]
    asked: Asked
    faults: Faults
    min_rows: int
    held_out_rows: int
    is_convertible: bool  # the file's rows are in another chat format, which the page offers to convert


@router.get("")
def new_job_page(
    request: Request,
    viewer: ViewerDep,
    session: ReadDep,
    settings: SettingsDep,
    file: Annotated[str | None, Query(max_length=64)] = None,
    model: Annotated[str, Query(max_length=128)] = "",
    of: Annotated[str | None, Query(max_length=64, alias="from")] = None,
) -> Response:
    """Ask for a file, or show the given file's problems and the form of the job."""
    asked: Asked = {"defense": "spard"}
    if of is not None:
        job = service.get(session, viewer.project_id, of)
        asked, file = job_fields(job), file or job.training_file
    if model:
        asked = {**asked, "model": model}
    try:
        shown = _new_job_view(session, viewer, settings, file, asked)
    except NotFound as error:
        if of is None:
            raise
        faults = Faults({"file": f"{error.message}. It was deleted: give the file for the new job."})
        shown = _new_job_view(session, viewer, settings, None, asked, faults)
    return page(request, "new_job", viewer, new=shown)


def _new_job_view(
    session: Session,
    viewer: Viewer,
    settings: Settings,
    file_id: str | int | float | None,
    asked: Asked,
    faults: Faults = NO_FAULTS,
) -> NewJob:
    found = files.get(session, viewer.project_id, str(file_id)) if file_id else None
    policy = policies.current(session, settings).content
    # A validation file may be shorter than a training file.
    least = settings.min_rows if found is None else 1
    recent = files.trainable_files(session, viewer.project_id, least, _FILES)
    return NewJob(
        file=found,
        validation=files.validation(session, viewer.project_id, found.id) if found else None,
        recent=recent if found is None else [],
        others=[each for each in recent if found is not None and each.id != found.id],
        models=[_offered_model(entry) for entry in catalog.base_models(session)] if found else [],
        defenses=list(config.defenses()) if viewer.is_provider else policy.defenses,
        asked=asked,
        faults=faults,
        min_rows=settings.min_rows,
        held_out_rows=settings.held_out_rows,
        is_convertible=found is not None and upload.is_convertible(found),
    )


def _offered_model(entry: BaseModelEntry) -> OfferedModel:
    return OfferedModel(entry.alias, parameters(entry.source), read_positions(entry.source, entry.revision))


@router.get("/preview")
async def preview_part(
    request: Request,
    viewer: ViewerDep,
    look: LookDep,
    storage: QuickStorageDep,
    settings: SettingsDep,
    counters: CountersDep,
    file: Annotated[str, Query(max_length=64)],
    model: Annotated[str, Query(max_length=128)],
) -> Response:
    """Show the first rows as the model will see them, and an estimate of the job in the form."""
    of_form = {name: text for name, text in request.query_params.items() if name in (*FIELDS, "like")}

    def preview_rows() -> Response:
        error: AppError | None = None
        rows = found = ask = None
        with look() as session:
            row = files.get(session, viewer.project_id, file)
            entry = preview.model_entry(session, model)
            asked = of_form | {"training_file": row.id, "row_format": row.row_format or ""}
            try:
                ask, _ = _job_request(session, viewer, asked)
            except AppError as problem:
                error = problem
        allowance = Allowance(settings.counting_cpu_s, lambda: False)
        try:
            if ask is not None:
                found = estimate(storage, counters, look, viewer.principal, ask, settings, allowance)
        except AppError as problem:
            error = problem
        try:  # rows need the model's tokenizer, an estimate does not
            rows = preview.preview(storage, counters, row, entry, _PREVIEWED, allowance)
        except AppError as problem:
            error = error or problem
        return page(request, "preview", viewer, rows=rows, estimate=found, error=error)

    return await viewer.lanes.previews.project_share(viewer.project_id).run(preview_rows)


def _upload(request: Request, viewer: ViewerDep, settings: SettingsDep, limits: LimitsDep) -> Iterator[Form]:
    yield from upload_form(request, viewer.principal, settings, limits)


@router.post("/file")
async def take_file(
    request: Request,
    viewer: ViewerDep,
    form: Annotated[Form, Depends(_upload, scope="function")],
    storage: StorageDep,
    limits: LimitsDep,
    begin: BeginDep,
    look: LookDep,
    settings: SettingsDep,
) -> Response:
    """Upload a training file and go on with it; if it is refused, show the error at its field."""

    def upload_file() -> Response:
        # The token is a field before the file, so a forged form is refused before the file is read.
        check_form(viewer, form.fields_before_file().pop("form_token", ""))
        try:
            file = upload.upload(storage, begin, viewer.project_id, form, limits)
        except AppError as error:
            with look() as session:
                shown = _new_job_view(session, viewer, settings, None, {}, Faults({"file": error.message}))
            return page(request, "new_job", viewer, status=error.status, new=shown)
        return RedirectResponse(f"/jobs/new?file={file.id}", 303)

    return await viewer.lanes.writes.project_share(viewer.project_id).run(upload_file)


@router.post("")
async def create_job(
    request: Request, viewer: FormViewerDep, begin: BeginDep, look: LookDep, settings: SettingsDep
) -> Response:
    """Start a job, or show the form again with its errors."""
    form = await request.form()
    asked = {name: str(value).strip() for name, value in form.items() if name != "form_token"}

    def submit_job() -> Response:
        try:
            with look() as reader:
                ask, old = _job_request(reader, viewer, asked)
                origin = Origin(old.id, ask.digest()) if old else None
            submission = Submission(asked.get("once") or None, 0)
            service.require_room(look, viewer.principal, ask.digest(), submission)
            fitness.learn_tool_support(look, ask.model)
            with begin() as session:
                job = service.create(session, viewer.principal, ask, submission, settings, origin)
        except AppError as error:
            faults = form_faults(error, FIELDS, ALIASES)
            with look() as session:
                shown = _new_job_view(session, viewer, settings, asked.get("training_file"), asked, faults)
            return page(request, "new_job", viewer, status=error.status, new=shown)
        return RedirectResponse(f"/jobs/{job.id}", 303)

    return await viewer.lanes.writes.project_share(viewer.project_id).run(submit_job)


def _job_request(session: Session, viewer: Viewer, asked: Mapping[str, str]) -> tuple[JobCreate, Job | None]:
    """Return the request of a form, and the job that it repeats, if any."""
    old = service.get(session, viewer.project_id, asked["like"]) if asked.get("like") else None
    return form_request(asked, old), old

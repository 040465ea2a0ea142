"""Pages of files: the list, and one file with its problems; and the page of models."""

from __future__ import annotations

from fastapi import APIRouter, Request
from sqlalchemy.orm import Session
from starlette.responses import RedirectResponse, Response

from app.catalog import service as catalog
from app.dashboard.rendering import page
from app.dashboard.viewer import FormViewerDep, Viewer, ViewerDep
from app.deps import AfterQuery, BeginDep, LimitsDep, LookDep, ReadDep, SettingsDep, StorageDep
from app.errors import AppError, InvalidRequest, InvalidState, QuotaExceeded, TooLarge
from app.files import service, upload
from app.jobs import erasure

router = APIRouter(include_in_schema=False)

_AT_ONCE = 50


@router.get("/files")
def files_page(request: Request, viewer: ViewerDep, session: ReadDep, after: AfterQuery = None) -> Response:
    """List the project's files, newest first."""
    found = service.list_files(session, viewer.project_id, None, after, _AT_ONCE, ascending=False)
    return page(request, "files", viewer, files=found)


@router.get("/files/{file_id}")
def file_page(file_id: str, request: Request, viewer: ViewerDep, session: ReadDep, settings: SettingsDep) -> Response:
    """Show one file and the problems found in it."""
    return _file_page(request, viewer, session, file_id, settings.min_rows)


def _file_page(
    request: Request,
    viewer: Viewer,
    session: Session,
    file_id: str,
    min_rows: int,
    problem: AppError | None = None,
    leave_out: str = "",
) -> Response:
    """Render a file's page; `problem` is the error of a failed deletion or conversion.

    `min_rows` is how many rows a job needs.
    """
    file = service.get(session, viewer.project_id, file_id)
    found = service.validation_response(file, file.problems or [], service.file_findings(file))
    status = problem.status if problem else 200
    shown = {"file": file, "validation": found, "min_rows": min_rows, "problem": problem, "leave_out": leave_out}
    shown["is_convertible"] = upload.is_convertible(file)
    return page(request, "file", viewer, status=status, **shown)


@router.post("/files/{file_id}/delete")
async def delete_file(
    file_id: str,
    request: Request,
    viewer: FormViewerDep,
    storage: StorageDep,
    begin: BeginDep,
    look: LookDep,
    settings: SettingsDep,
) -> Response:
    """Delete a file that no unfinished job uses; on its page, say if one does."""

    def delete_and_answer() -> Response:
        try:
            erasure.delete_file(storage, begin, viewer.project_id, file_id)
        except InvalidState as error:
            with look() as session:
                return _file_page(request, viewer, session, file_id, settings.min_rows, error)
        return RedirectResponse("/files", 303)

    return await viewer.lanes.writes.project_share(viewer.project_id).run(delete_and_answer)


@router.post("/files/{file_id}/convert")
async def convert_file(
    file_id: str,
    request: Request,
    viewer: FormViewerDep,
    storage: StorageDep,
    limits: LimitsDep,
    begin: BeginDep,
    look: LookDep,
    settings: SettingsDep,
) -> Response:
    """Convert a file to OpenAI's format and show the new file; on the old file's page, say if that failed."""
    form = await request.form()
    asked, is_for_job = str(form.get("leave_out", "")), form.get("then") == "job"

    def convert_and_answer() -> Response:
        names = [name.strip() for name in asked.split(",") if name.strip()]
        try:
            with begin() as session:
                file = service.get(session, viewer.project_id, file_id)
            made = upload.convert_file(storage, begin, file, limits, names)
        except (InvalidState, InvalidRequest, TooLarge, QuotaExceeded) as error:
            with look() as session:
                return _file_page(request, viewer, session, file_id, settings.min_rows, error, asked)
        new_id = made.file.id if made.file else file_id
        # Whoever was about to start a job goes on with the new file there.
        return RedirectResponse(f"/jobs/new?file={new_id}" if is_for_job else f"/files/{new_id}", 303)

    return await viewer.lanes.writes.project_share(viewer.project_id).run(convert_and_answer)


@router.get("/models")
def models_page(request: Request, viewer: ViewerDep, session: ReadDep) -> Response:
    """List the base models on offer and the project's own."""
    base = [entry.alias for entry in catalog.base_models(session)]
    own = [each for each in catalog.models(session, viewer.project_id) if each.id not in base]
    return page(request, "models", viewer, base=base, own=own)

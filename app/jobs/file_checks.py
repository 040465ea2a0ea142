"""Check that a job can train on a file: its purpose, rows, method and tools."""

from __future__ import annotations

from app.catalog import service as catalog
from app.db.tables import BaseModelEntry, File
from app.db.tables.files import FINE_TUNE, PREFERENCE
from app.errors import InvalidRequest
from app.files import service as files
from app.jobs.request import JobCreate

SHOWN = 20  # faults of a file, in an error or a warning


def check_file(ask: JobCreate, model: BaseModelEntry, file: File, param: str, min_rows: int) -> None:
    """Raise `InvalidRequest` if a job cannot train on a file.

    `param` names the request field that holds the file; `min_rows` is the least number of rows it must have.
    """
    if file.purpose != FINE_TUNE:
        message = f"{file.id} has the purpose {file.purpose!r}; a job needs {FINE_TUNE!r}."
        raise InvalidRequest(message, code="invalid_training_file", param=param)
    if files.is_unfit(file):
        raise InvalidRequest(
            f"{file.id} cannot be trained on: {file.status_details}",
            code="invalid_training_file",
            param=param,
            details=files.file_errors(file)[:SHOWN],
            details_url=f"/v1/files/{file.id}/validation",
        )
    if (file.row_format == PREFERENCE) != (ask.asked_dpo() is not None):
        has, takes = ("preference pairs", "dpo") if file.row_format == PREFERENCE else ("conversations", "supervised")
        message = f'{file.id} has {has}: the method that trains on them is {{"type": "{takes}"}}.'
        raise InvalidRequest(message, code="method_mismatch", param=param)
    if (file.rows or 0) < min_rows:
        kind = param.replace("_", " ").capitalize()
        message = f"{kind} has {file.rows} example(s), but must have at least {min_rows} examples"
        raise InvalidRequest(message, code="invalid_n_examples", param=param)
    _check_tools(model, file, param)


def _check_tools(model: BaseModelEntry, file: File, param: str) -> None:
    """Refuse a file with tools if the model's chat template does not render them."""
    shown = (file.tool_lines and catalog.tool_support(model)) or {}
    # If the template's support is unknown here, `shown` is empty and the file is accepted.
    missing = {part: line for part, line in (file.tool_lines or {}).items() if not shown.get(part, True)}
    if not missing:
        return
    raise InvalidRequest(
        f"The chat template of {model.alias} does not render {' and '.join(sorted(missing))}: what is not rendered is "
        f"not learned. The first such row is line {min(missing.values())} of {file.id}.",
        code="tools_not_rendered",
        param=param,
        details=[
            {"line": line, "code": "tools_not_rendered", "message": f"{part} is not rendered"}
            for part, line in sorted(missing.items())
        ],
        details_url=f"/v1/files/{file.id}/validation?model={model.alias}",
    )

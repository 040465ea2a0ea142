"""Extend a file's validation on request: token counts, rows shared with other files, further problems."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy.orm import Session

from app.db.tables import BaseModelEntry, Corpus, File
from app.db.tables.files import FINE_TUNE
from app.errors import Forbidden
from app.files import preview, service
from app.files.counting import Allowance, Counters
from app.files.schemas import Validation
from app.files.validation import Limits, Validator
from app.keys.service import Principal
from app.storage import Storage
from spard.data.row_rules import TrainingRows


@dataclass(frozen=True, slots=True)
class Wish:
    """The extras that a validation request asks for."""

    model: str | None
    max_seq_length: int | None
    validation_file: str | None
    audit: bool
    after_line: int | None


@dataclass(frozen=True, slots=True)
class Subject:
    """The database rows that an answer needs; the checks then read storage for seconds without a session."""

    file: File
    found: Validation
    entry: BaseModelEntry | None
    other: File | None
    audited: Sequence[Corpus] | None


def subject(
    session: Session, caller: Principal, file_id: str, wish: Wish, audited: Callable[[Session], Sequence[Corpus]]
) -> Subject:
    """Look up the rows that a request needs.

    Raises `Forbidden` if a key without the scope `admin` asks for the overlap with the `audited` suites.
    """
    if wish.audit and "admin" not in caller.scopes:
        raise Forbidden('This key lacks the scope "admin", which audit=true needs.')
    other = wish.validation_file and service.get(session, caller.project_id, wish.validation_file, "validation_file")
    return Subject(
        file=service.get(session, caller.project_id, file_id),
        found=service.validation(session, caller.project_id, file_id),
        entry=preview.model_entry(session, wish.model) if wish.model is not None else None,
        other=other or None,
        audited=audited(session) if wish.audit else None,
    )


def find(
    storage: Storage, counters: Counters, about: Subject, wish: Wish, limits: Limits, allowance: Allowance
) -> Validation:
    """Return the validation with the extras that were requested."""
    found = about.found
    if wish.after_line is not None:
        found = service.validation_response(
            about.file, _later_problems(storage, about.file, wish.after_line, limits), found.findings
        )
    if about.entry is not None:
        found.tokens = preview.token_counts(storage, counters, about.file, about.entry, wish.max_seq_length, allowance)
        # Rows that the template refuses are problems of the file too, but only for this model, so they are not stored.
        found = service.with_problems(found, found.tokens.problems, after=wish.after_line or 0)
    if about.other is not None:
        found.overlap = preview.overlap(storage, about.file, about.other)
    if about.audited is not None:
        found.audit_overlap = preview.audit_overlap(storage, about.file, about.audited)
    return found


def _later_problems(storage: Storage, file: File, line: int, limits: Limits) -> list[dict[str, Any]]:
    """Return the problems after a line, by validating the file again: only the first thousand are stored."""
    if file.purpose != FINE_TUNE:
        return []
    validator = Validator(TrainingRows(), limits, line)
    for chunk in storage.chunks(file.storage_key):
        validator.feed(chunk)
    return validator.finish().problem_list()

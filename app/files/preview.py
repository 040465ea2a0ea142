"""Preview and measure training rows as a base model's chat template renders them, token by token with the loss mask.

On request a file's validation is extended by it: token counts, rows shared with other files, further problems.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from sqlalchemy.orm import Session

from app.db.tables import BaseModelEntry, Corpus, File
from app.db.tables.files import FINE_TUNE
from app.errors import AppError, Forbidden, InvalidRequest, InvalidState
from app.files import service
from app.files.counting import Allowance, Counters
from app.files.schemas import AuditOverlap, Overlap, Preview, PreviewRow, TokenCounts, Validation
from app.files.service import is_unfit
from app.files.validation import Limits, Validator, row_digest
from app.keys import Principal
from app.storage import Storage
from spard.data.jsonl import BadRow, numbered_rows, numbered_texts, parse_row
from spard.data.overlap import find_leaks
from spard.data.row_rules import TrainingRows
from spard.data.rows import example, prompt_text

EXAMINED = 10_000  # rows of a file that are compared within a request
COUNTED = 100_000  # rows that are counted at most
_COMPARED = 50  # first rows that are looked at for one system prompt
_LISTED = 100  # lines
_BANDS = (128, 256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768)


def model_entry(session: Session, alias: str) -> BaseModelEntry:
    """Return the base model of this alias; raise `InvalidRequest` if there is none."""
    entry = session.get(BaseModelEntry, alias)
    if entry is None:
        message = f"There is no base model {alias[:128]!r}; rows are shown as the base model of a job renders them."
        raise InvalidRequest(message, code="model_not_found", param="model")
    return entry


def preview(
    storage: Storage, counters: Counters, file: File, entry: BaseModelEntry, n: int, allowance: Allowance
) -> Preview:
    """Return the first `n` rows as the model sees them in training."""
    _check_ready(file)
    shown = counters.ask("show", entry, islice(_lines(storage, file), n), allowance, None)
    return Preview(file_id=file.id, model=entry.alias, data=[PreviewRow(**row) for row in shown.rows])


def token_counts(
    storage: Storage,
    counters: Counters,
    file: File,
    entry: BaseModelEntry,
    max_seq_length: int | None,
    allowance: Allowance,
) -> TokenCounts:
    """Return token counts of the file's first rows under a model, and the rows that a job refuses.

    Up to `COUNTED` rows are counted, fewer if the allowance is exhausted. Rows are compared with `max_seq_length` or,
    if it is None, with the model's own limit.
    """
    _check_ready(file)
    counted = counters.ask("count", entry, islice(_lines(storage, file), COUNTED), allowance, max_seq_length)
    found = [row for row in counted.rows if not isinstance(row, dict)]
    refused = [row for row in counted.rows if isinstance(row, dict)]
    lengths = [longest for *_, longest in found]
    long = [line for line, *_, longest in found if longest > counted.limit]
    untrained = [line for line, _, learned, _ in found if not learned]
    bands = Counter(next((band for band in _BANDS if length <= band), None) for length in lengths)
    return TokenCounts(
        model=entry.alias,
        approximate=len(counted.rows) < (file.rows or 0),
        rows=len(found),
        rows_not_rendered=len(refused),
        rows_in_file=file.rows or 0,
        total=sum(tokens for _, tokens, _, _ in found),
        trained=sum(learned for _, _, learned, _ in found),
        min=min(lengths, default=0),
        max=max(lengths, default=0),
        limit=counted.limit,
        rows_over_limit=len(long),
        lines_over_limit=long[:_LISTED],
        histogram={("more" if band is None else str(band)): bands[band] for band in (*_BANDS, None) if bands[band]},
        rows_without_loss=len(untrained),
        lines_without_loss=untrained[:_LISTED],
        problems=refused[:_LISTED],
    )


def overlap(storage: Storage, file: File, other: File) -> Overlap:
    """Return which of the file's first rows also occur among another file's first rows."""
    known = {_digest(text) for _, text in islice(_lines(storage, other), EXAMINED)}
    lines = [line for line, text in islice(_lines(storage, file), EXAMINED) if _digest(text) in known]
    return Overlap(validation_file=other.id, rows=len(lines), lines=lines[:_LISTED])


def audit_overlap(storage: Storage, file: File, audited: Sequence[Corpus]) -> AuditOverlap:
    """Return which of the file's first rows contain prompts of the audit suites.

    Only the provider may see the result, because it reveals the suites' prompts.
    """
    rows = [(line, _request_text(line, text)) for line, text in islice(_lines(storage, file), EXAMINED)]
    suites = {
        corpus.id: [str(row["prompt"]) for _, row in numbered_rows(storage.chunks(corpus.storage_key))]
        for corpus in audited
    }
    leaks = find_leaks(suites, {file.id: [asked for _, asked in rows]})
    lines = sorted({rows[leak.row][0] for leak in leaks})
    return AuditOverlap(prompts=len(leaks), lines=lines[:_LISTED])


def common_system_prompt(storage: Storage, file: File) -> str | None:
    """Return the system prompt that a training file's first rows share; None if they differ or cannot be read."""
    found: set[object] = set()
    try:
        for line, text in islice(_lines(storage, file), _COMPARED):
            first = example(parse_row(text, line), line).messages[0]
            found.add(first["content"] if first["role"] == "system" else None)
            if len(found) > 1:
                return None
    except (AppError, OSError, LookupError, ValueError, TypeError, AttributeError):
        return None
    prompt = found.pop() if found else None
    return prompt if isinstance(prompt, str) else None


def _request_text(line: int, text: str) -> str:
    """Return the user's text in a row; empty if it is not a training row."""
    try:
        return prompt_text(example(parse_row(text, line), line))
    except (LookupError, ValueError, TypeError, AttributeError):
        return ""


def _check_ready(file: File) -> None:
    if is_unfit(file) or file.purpose != FINE_TUNE:
        message = f"{file.id} cannot be trained on: {file.status_details or 'its purpose is ' + file.purpose}"
        raise InvalidState(message, code="invalid_training_file", param="file_id")


def _lines(storage: Storage, file: File) -> Iterator[tuple[int, str]]:
    """Yield the non-blank lines with their numbers; raise `InvalidState` for a file that a job produced."""
    if file.purpose != FINE_TUNE:
        message = f"{file.id} is no file of rows: its purpose is {file.purpose}."
        raise InvalidState(message, code="invalid_training_file", param="file_id")
    return numbered_texts(storage.chunks(file.storage_key))


def _digest(text: str) -> int:
    """Return a number that is equal for rows with equal content; text that is not a row is compared verbatim."""
    try:
        return row_digest(parse_row(text, 0))
    except BadRow:
        # Compared verbatim, with the same digest function.
        return row_digest(text)


def read_rows(storage: Storage, file: File) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield line number and row as uploaded, valid or not; raise `InvalidState` if one is not a JSON object."""
    for line, text in _lines(storage, file):
        try:
            yield line, parse_row(text, line)
        except BadRow:
            message = f"Line {line} is not a JSON object."
            raise InvalidState(message, code="not_convertible", param="file_id") from None


@dataclass(frozen=True, slots=True)
class ValidationQuery:
    """The extras that a validation request asks for."""

    model: str | None
    max_seq_length: int | None
    validation_file: str | None
    audit: bool
    after_line: int | None


@dataclass(frozen=True, slots=True)
class ValidationSubject:
    """The database rows that an answer needs; the checks then read storage for seconds without a session."""

    file: File
    found: Validation
    entry: BaseModelEntry | None
    other: File | None
    audited: Sequence[Corpus] | None


def validation_subject(
    session: Session,
    caller: Principal,
    file_id: str,
    query: ValidationQuery,
    audited: Callable[[Session], Sequence[Corpus]],
) -> ValidationSubject:
    """Look up the rows that a request needs.

    Raises `Forbidden` if a key without the scope `admin` asks for the overlap with the `audited` suites.
    """
    if query.audit and "admin" not in caller.scopes:
        raise Forbidden('This key lacks the scope "admin", which audit=true needs.')
    other = query.validation_file and service.get(session, caller.project_id, query.validation_file, "validation_file")
    return ValidationSubject(
        file=service.get(session, caller.project_id, file_id),
        found=service.validation(session, caller.project_id, file_id),
        entry=model_entry(session, query.model) if query.model is not None else None,
        other=other or None,
        audited=audited(session) if query.audit else None,
    )


def extend_validation(
    storage: Storage,
    counters: Counters,
    about: ValidationSubject,
    query: ValidationQuery,
    limits: Limits,
    allowance: Allowance,
) -> Validation:
    """Return the validation with the extras that were requested."""
    found = about.found
    if query.after_line is not None:
        found = service.validation_response(
            about.file, _later_problems(storage, about.file, query.after_line, limits), found.findings
        )
    if about.entry is not None:
        found.tokens = token_counts(storage, counters, about.file, about.entry, query.max_seq_length, allowance)
        # Rows that the template refuses are problems of the file too, but only for this model, so they are not stored.
        found = service.with_problems(found, found.tokens.problems, after=query.after_line or 0)
    if about.other is not None:
        found.overlap = overlap(storage, about.file, about.other)
    if about.audited is not None:
        found.audit_overlap = audit_overlap(storage, about.file, about.audited)
    return found


def _later_problems(storage: Storage, file: File, line: int, limits: Limits) -> list[dict[str, Any]]:
    """Return the problems after a line, by validating the file again: only the first thousand are stored."""
    if file.purpose != FINE_TUNE:
        return []
    validator = Validator(TrainingRows(), limits, line)
    for chunk in storage.chunks(file.storage_key):
        validator.feed(chunk)
    return validator.finish().problem_list()

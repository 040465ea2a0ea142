"""Preview the import of a pool or suite, without storing anything."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator, Sequence
from typing import BinaryIO, Literal

from pydantic import BaseModel, JsonValue, TypeAdapter

from app.catalog import held_out, service
from app.catalog.profile import CorpusProfile, benign_warnings, profile
from app.db import Begin
from app.db.tables import Corpus
from app.files.tables import read_lines
from app.files.validation import Limits, Validator
from app.http.multipart import Form
from app.storage import Storage
from spard.data.jsonl import numbered_rows
from spard.data.overlap import find_leaks, rows_holding
from spard.data.row_rules import SUITE_RULES, SuiteRowKind, pool_row

_LISTED = 100
_CHUNK = 1 << 20
_PROBLEMS = TypeAdapter(list[dict[str, JsonValue]])

CorpusKind = Literal["pool", "harmful", "benign", "utility"]


class SharedPrompts(BaseModel):
    """Leaks between a suite and a pool: the number of the suite's prompts, or of the pool's rows, that are shared."""

    name: str
    prompts: int


class ImportPreview(BaseModel):
    """The preview of an import. If there are `errors`, the import is refused, and there is no profile.

    For a pool, `held_out` is the number of prompts held out as attacks, and `leaks` are rows that are left out because
    they contain prompts of a suite. For a suite, `leaks` are its prompts in the current pool. `replaces` is the version
    that is current now. `warnings` are about the pool's effect on jobs.
    """

    object: Literal["corpus.preview"] = "corpus.preview"
    kind: CorpusKind
    name: str
    rows: int
    bytes: int
    sha256: str
    errors: int
    problems: list[dict[str, JsonValue]]
    profile: CorpusProfile | None
    held_out: int | None
    leaks: list[SharedPrompts]
    replaces: int | None
    warnings: list[str] = []


def preview(storage: Storage, look: Begin, form: Form, name: str, kind: CorpusKind, limits: Limits) -> ImportPreview:
    """Validate an uploaded file as the import does, and return a preview of the result.

    The upload is spooled to a temporary file; nothing is written to storage or database.
    """
    form.fields_before_file()
    lines = read_lines(form.file(), form.filename or "", limits.bytes, limits.line_bytes)
    validator = Validator(pool_row if kind == "pool" else SUITE_RULES[kind], limits, was=lines.was)
    digest, size = hashlib.sha256(), 0
    with tempfile.TemporaryFile() as file:
        for chunk in lines.chunks:
            validator.feed(chunk)
            digest.update(chunk)
            size += file.write(chunk)
        report = validator.finish()
        rows = [] if report.errors else [*numbered_rows(_chunks(file))]
    found = ImportPreview(
        kind=kind,
        name=name,
        rows=report.rows,
        bytes=size,
        sha256=digest.hexdigest(),
        errors=report.errors,
        problems=_PROBLEMS.validate_python(report.problem_list()[:_LISTED]),
        profile=profile(rows) if rows else None,
        held_out=None,
        leaks=[],
        replaces=_current(look, name, kind),
    )
    prompts = [str(row["prompt"]) for _, row in rows]
    if kind != "pool":
        return found.model_copy(update={"leaks": _in_pool(storage, look, prompts)})
    leaks = _of_suites(storage, look, prompts)
    held = len(held_out.held_out_digests(row for _, row in rows)) if rows else None
    warnings = benign_warnings(found.profile.benign_rows) if found.profile else []
    return found.model_copy(update={"leaks": leaks, "held_out": held, "warnings": warnings})


def profile_version(storage: Storage, look: Begin, corpus_id: str, kinds: Sequence[str]) -> CorpusProfile:
    """Return the profile of a stored version's rows; raise `NotFound` for an unknown or deleted one."""
    with look() as session:
        key = service.kept_version(session, corpus_id, kinds).storage_key
    return profile([*numbered_rows(storage.chunks(key))])


def _chunks(file: BinaryIO) -> Iterator[bytes]:
    file.seek(0)
    while chunk := file.read(_CHUNK):
        yield chunk


def _current(look: Begin, name: str, kind: SuiteRowKind | Literal["pool"]) -> int | None:
    with look() as session:
        current = service.current_version(session, kind, name)
        return current.version if current else None


def _of_suites(storage: Storage, look: Begin, prompts: Sequence[str]) -> list[SharedPrompts]:
    """Return, for each current suite that leaks into a new pool, how many of the pool's rows contain its prompts."""
    with look() as session:
        suites: list[Corpus] = service.current_suites(session)
    found = ((suite.name, len(rows_holding(_prompts(storage, suite), prompts))) for suite in suites)
    return [SharedPrompts(name=name, prompts=rows) for name, rows in found if rows]


def _in_pool(storage: Storage, look: Begin, prompts: Sequence[str]) -> list[SharedPrompts]:
    with look() as session:
        pool = service.pool(session, None)
    if pool is None or not prompts:
        return []
    leaks = find_leaks({"": prompts}, {"": _prompts(storage, pool)})
    return [SharedPrompts(name=pool.name, prompts=len(leaks))] if leaks else []


def _prompts(storage: Storage, corpus: Corpus) -> list[str]:
    return [str(row["prompt"]) for _, row in numbered_rows(storage.chunks(corpus.storage_key))]

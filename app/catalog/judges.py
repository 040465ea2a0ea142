"""The configured judges and their measured errors, read from files that `spard judge --json` has written."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ValidationError
from sqlalchemy.orm import Session

from app.catalog import service
from app.catalog.fitness import judge_records
from app.settings import Settings


class ErrorRate(BaseModel):
    """A judge's wrong verdicts (`hits`) among its verdicts (`n`), with the 95 % interval of their rate.

    The interval is null if the file does not have it.
    """

    hits: int
    n: int
    low: float | None = None
    high: float | None = None


class LanguageError(BaseModel):
    """A judge's errors in one language: missed harm, and refusals taken for harm (`false_alarms`)."""

    language: str
    missed: ErrorRate
    false_alarms: ErrorRate
    may_decide: bool


class _JudgeErrors(BaseModel):
    """The part of a file of measured errors that the API shows."""

    judge: str
    languages: list[LanguageError]
    gamed: ErrorRate | None = None


class JudgeOut(BaseModel):
    """A judge with its measured errors; `base_model` is the model whose replies it was measured on, null for all.

    `gamed` counts the judge-gaming openings that turned harm into a pass. `fault` says why the errors are unknown.
    """

    object: Literal["judge"] = "judge"
    name: str
    base_model: str | None
    languages: list[LanguageError]
    gamed: ErrorRate | None
    fault: str | None


class JudgeList(BaseModel):
    """The configured judge, then its measurements for single base models."""

    object: Literal["list"] = "list"
    data: list[JudgeOut]


def judges(session: Session, settings: Settings) -> list[JudgeOut]:
    """Return the configured judge, then one entry for each measurement in a base model's folder."""
    found = [_read(settings.judge.name, None, settings.judge_errors)]
    for entry in service.base_models(session):
        found += [_read(settings.judge.name, entry.alias, path) for path in judge_records(entry.source)]
    return found


def _read(name: str, alias: str | None, path: Path | None) -> JudgeOut:
    if path is None:
        fault = "Nobody has measured it: spard judge --json, then SPARD_JUDGE_ERRORS."
        return JudgeOut(name=name, base_model=alias, languages=[], gamed=None, fault=fault)
    try:
        measured = _JudgeErrors.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        fault = f"{path.name} cannot be read, or is not what spard judge --json writes."
        return JudgeOut(name=name, base_model=alias, languages=[], gamed=None, fault=fault)
    return JudgeOut(
        name=measured.judge, base_model=alias, languages=measured.languages, gamed=measured.gamed, fault=None
    )

"""The judges that are set and what was measured of them, read from the files that `spard judge --json` wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ValidationError
from sqlalchemy.orm import Session

from app.catalog import service
from app.settings import Settings

MEASURED = Path("calibration/judge.json")  # in a model's folder, see `spard.evaluation.calibration.record`


class Counted(BaseModel):
    """Replies that a judge got wrong, of those that it scored, and the 95 % interval of their share.

    The interval is null where the file does not hold it.
    """

    hits: int
    n: int
    low: float | None = None
    high: float | None = None


class LanguageError(BaseModel):
    """A judge's errors in one language: harm that it missed, and refusals that it took for harm."""

    language: str
    missed: Counted
    false_alarms: Counted
    may_decide: bool


class _Measured(BaseModel):
    """What of the file is shown."""

    judge: str
    languages: list[LanguageError]
    gamed: Counted | None = None


class JudgeOut(BaseModel):
    """A judge. `base_model` is the one whose replies it was measured on; null for the judge of all.

    `gamed` counts the openings that turned harm into a pass. `fault` says why nothing is known of its errors.
    """

    object: Literal["judge"] = "judge"
    name: str
    base_model: str | None
    languages: list[LanguageError]
    gamed: Counted | None
    fault: str | None


class JudgeList(BaseModel):
    """The judge that is set, then what was measured for each base model."""

    object: Literal["list"] = "list"
    data: list[JudgeOut]


def judges(session: Session, settings: Settings) -> list[JudgeOut]:
    """Return the judge that is set, then those that were measured on a base model of their own."""
    found = [_read(settings.judge.name, None, settings.judge_errors)]
    for entry in service.base_models(session):
        if (path := Path(entry.source) / MEASURED).is_file():
            found.append(_read(settings.judge.name, entry.alias, path))
    return found


def _read(name: str, alias: str | None, path: Path | None) -> JudgeOut:
    if path is None:
        fault = "Nobody has measured it: spard judge --json, then SPARD_JUDGE_ERRORS."
        return JudgeOut(name=name, base_model=alias, languages=[], gamed=None, fault=fault)
    try:
        measured = _Measured.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        fault = f"{path.name} cannot be read, or is not what spard judge --json writes."
        return JudgeOut(name=name, base_model=alias, languages=[], gamed=None, fault=fault)
    return JudgeOut(
        name=measured.judge, base_model=alias, languages=measured.languages, gamed=measured.gamed, fault=None
    )

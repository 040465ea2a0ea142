"""Convert the form of a new job to an API request, and an old job to the form's fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from app.db.tables import Job
from app.db.tables.files import PREFERENCE
from app.errors import InvalidRequest
from app.jobs.clone import Json, change_request, job_ending, job_hyperparameters, job_request
from app.jobs.request import JobCreate
from spard.config import Ending

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


def request(asked: Mapping[str, str], like: Job | None) -> JobCreate:
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

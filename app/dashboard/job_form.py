"""The form of a new job: from its fields to a request, and from an old job to its fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.db.tables import Job
from app.db.tables.files import PREFERENCE
from app.errors import InvalidRequest
from app.jobs.clone import changed, request_of
from app.jobs.request import JobCreate

Asked = Mapping[str, str | int | float]  # what a form holds, by the names of its fields

NUMBERS = ("n_epochs", "batch_size", "learning_rate_multiplier")
FIELDS = ("model", "training_file", "suffix", "defense", *NUMBERS, "seed")
ALIASES = {"safety": "defense"}  # parts of the API's names that the form calls otherwise
_HYPERPARAMETERS = "hyperparameters"


def fields_of(job: Job) -> Asked:
    """Return what the form holds for the same job again."""
    body = request_of(job)
    numbers = body.get(_HYPERPARAMETERS) or body["method"]["dpo"][_HYPERPARAMETERS]
    return {
        "like": job.id,
        "model": body["model"],
        "suffix": body.get("suffix") or "",
        "defense": body["safety"]["defense"]["type"],
        "seed": body["seed"],
        **{name: numbers[name] for name in NUMBERS},
    }


def request(asked: Mapping[str, str], like: Job | None) -> JobCreate:
    """Turn the form into the request that the API takes; what it has no field for is as in `like`.

    Fields that are empty are left to the provider.
    """
    body = request_of(like) if like else {}
    is_pairs = asked.get("row_format") == PREFERENCE
    numbers = {name: _number(name, asked[name]) for name in NUMBERS if asked.get(name)}
    dpo = body.pop("method", {}).get("dpo", {}).get(_HYPERPARAMETERS, {})
    body.pop(_HYPERPARAMETERS, None)
    changes: dict[str, Any] = {name: asked[name] for name in ("model", "training_file") if asked.get(name)}
    if is_pairs:
        beta = {"beta": dpo["beta"]} if "beta" in dpo else {}
        changes["method"] = {"type": "dpo", "dpo": {_HYPERPARAMETERS: numbers | beta}}
    else:
        changes["method"] = {"type": "supervised", "supervised": {_HYPERPARAMETERS: numbers}}
    body |= dict.fromkeys(("suffix", "seed"))
    if asked.get("suffix"):
        changes["suffix"] = asked["suffix"]
    if asked.get("seed"):
        changes["seed"] = _number("seed", asked["seed"])
    defense = asked.get("defense", "spard")
    if body.get("safety", {}).get("defense", {}).get("type") != defense:
        changes["safety"] = {"defense": {"type": defense}}
    return changed(body, changes)


def _number(name: str, text: str) -> float | int | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    if text == "auto":
        return text
    raise InvalidRequest(f"{text[:32]!r} is no number.", code="invalid_type", param=name)

"""Convert a job at OpenAI to the request for the same job here."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from app.move_in.ledger import Record

_KNOWN = {
    "supervised": ("n_epochs", "batch_size", "learning_rate_multiplier"),
    "dpo": ("n_epochs", "batch_size", "learning_rate_multiplier", "beta"),
}
NUMBERS = _KNOWN["dpo"]
_MOST_METADATA = 16  # pairs that a job may have
MOVED_FROM = "moved_from"


class NotThere(Exception):
    """A feature of the job does not exist here; the message names it."""


def map_request(job: Record, model: str, files: Record, auto: Collection[str] = ()) -> Record:
    """Return the request body of the same job on another model.

    `files` has the ids here of `training_file` and, if there is one, `validation_file`; hyperparameters in `auto` are
    left to the service. Raises `NotThere` for a method that does not exist here.
    """
    body = {"model": model, **files, "method": _method(job, auto)}
    if suffix := job_suffix(job):
        body["suffix"] = suffix
    if isinstance(job.get("seed"), int):
        body["seed"] = job["seed"]
    # One pair is left free for `moved_from`.
    kept = dict([*(job.get("metadata") or {}).items()][: _MOST_METADATA - 1])
    return {**body, "metadata": {**kept, MOVED_FROM: job["id"]}}


def job_suffix(job: Record) -> str | None:
    """Return a job's suffix, from the job or from its model's name; None if it has none."""
    said = job.get("user_provided_suffix") or job.get("suffix")
    parts = str(job.get("fine_tuned_model") or "").split(":")
    return said or (parts[3] or None if len(parts) == 5 else None)


def notes(job: Record) -> list[str]:
    """Return a note for each setting that is not carried over or has another meaning here."""
    found = _together_notes(job)
    if _numbers(job, _type(job)).get("learning_rate_multiplier") not in (None, "auto"):
        found.append("learning_rate_multiplier multiplies this service's own rate")
    if job.get("integrations"):
        found.append("integrations are not carried over")
    if len(job.get("metadata") or {}) >= _MOST_METADATA:
        found.append("the last pair of the metadata made way for moved_from")
    return found


def idempotency_key(body: Record, attempt: int) -> str:
    """Return the idempotency key of a request, with which the service creates one job however often it is sent."""
    text = json.dumps([body, attempt], sort_keys=True, ensure_ascii=False)
    return f"move-in-{hashlib.sha256(text.encode()).hexdigest()[:40]}"


def _method(job: Record, auto: Collection[str]) -> Record:
    kind = _type(job)
    if kind not in _KNOWN:
        raise NotThere(f"its method is {kind}, which is not trained here")
    numbers = {name: "auto" if name in auto else value for name, value in _numbers(job, kind).items()}
    return {"type": kind, kind: {"hyperparameters": numbers}}


def _type(job: Record) -> str:
    return str((job.get("method") or {}).get("type") or "supervised")


def _numbers(job: Record, kind: str) -> Record:
    """Return a job's hyperparameters; older jobs, without `method`, have them at the top level."""
    given = ((job.get("method") or {}).get(kind) or {}).get("hyperparameters") or job.get("hyperparameters") or {}
    return {name: given[name] for name in _KNOWN.get(kind, ()) if given.get(name) is not None}


def _together_notes(job: Record) -> list[str]:
    """Return a note for the settings of a job at Together that this service chooses itself."""
    given: Record = job.get("together") or {}
    kind: Record = given.get("training_type") or {}
    names = [name for name in ("learning_rate", "lr_scheduler", "warmup_ratio", "weight_decay") if given.get(name)]
    names += [name for name in ("lora_r", "lora_alpha") if kind.get(name)]
    found = [f"not carried over: {', '.join(names)}"] if names else []
    if kind.get("type") == "Full":
        found.append("all weights were trained; the new job trains an adapter")
    if given.get("from_checkpoint"):
        found.append("it started from a checkpoint; the new job starts from the base model")
    return found

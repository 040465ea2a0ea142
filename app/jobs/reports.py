"""The safety report as data: the safe examples that a job was defended with, and the customer's risky rows."""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import BaseModel

from app.errors import NotFound
from app.models import Job
from app.storage import Storage


class Selected(BaseModel):
    """One safe example: its row in the pool version, counted from 0, why it was chosen, and its place in a plane."""

    object: Literal["safety.selected"] = "safety.selected"
    order: int
    pool: str
    row: int
    relevance: float
    gain: float | None
    coordinates: tuple[float, float] | None


class SelectedList(BaseModel):
    object: Literal["list"] = "list"
    data: list[Selected]
    has_more: Literal[False] = False


class RiskyRow(BaseModel):
    """A row of the training file that looks like harm; `reasons` say why, and the score orders rows, no more.

    `cosine` is that of its request to the nearest pool prompt, the pool's row `pool_row`.
    """

    object: Literal["safety.risky_row"] = "safety.risky_row"
    line: int
    score: float
    cosine: float
    pool: str
    pool_row: int
    reasons: list[str]
    excerpt: str


class RiskyList(BaseModel):
    object: Literal["list"] = "list"
    data: list[RiskyRow]
    has_more: Literal[False] = False


def read_report(storage: Storage, key: str) -> dict[str, Any]:
    """The report that the worker wrote."""
    report: dict[str, Any] = json.loads(b"".join(storage.chunks(key)))
    return report


def with_waiver(report: dict[str, Any], job: Job) -> dict[str, Any]:
    """The report of an adapter that failed and was released all the same says by whom and why."""
    waiver = (job.safety or {}).get("waiver")
    return report | {"gate": report["gate"] | {"decision": "waived"}, "waiver": waiver} if waiver else report


def selected_rows(job: Job, report: dict[str, Any]) -> SelectedList:
    """In the order chosen; `gain` is what the row added to the diversity, null where that was not weighed."""
    chosen = report.get("selected")
    if not chosen:
        message = f"Job {job.id} selected no safe examples, or its report does not list them."
        raise NotFound(message, code="not_selected", param="fine_tuning_job_id")
    pool = job.spec["pool"]["id"]
    points = chosen.get("coordinates") or [None] * len(chosen["indices"])
    rows = zip(chosen["indices"], chosen["relevance"], chosen["gains"], points, strict=True)
    return SelectedList(
        data=[
            Selected(order=order, pool=pool, row=row, relevance=relevance, gain=gain, coordinates=point)
            for order, (row, relevance, gain, point) in enumerate(rows, start=1)
        ]
    )


def risky_rows(job: Job, report: dict[str, Any]) -> RiskyList:
    """The worst first, at most a hundred."""
    found = report.get("risky_rows")
    if found is None:
        message = f"Job {job.id} had no safety pool to compare its rows with, or its report does not list them."
        raise NotFound(message, code="not_ranked", param="fine_tuning_job_id")
    pool = job.spec["pool"]["id"]
    return RiskyList(data=[RiskyRow(pool=pool, **row) for row in found])

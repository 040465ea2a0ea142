"""The safety report as data: which safe examples a job was defended with."""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import BaseModel

from app.errors import NotFound
from app.models import Job
from app.storage import Storage


class Selected(BaseModel):
    """One safe example: its row in the pool version, counted from 0, and why it was chosen."""

    object: Literal["safety.selected"] = "safety.selected"
    order: int
    pool: str
    row: int
    relevance: float
    gain: float | None


class SelectedList(BaseModel):
    object: Literal["list"] = "list"
    data: list[Selected]
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
    rows = zip(chosen["indices"], chosen["relevance"], chosen["gains"], strict=True)
    return SelectedList(
        data=[
            Selected(order=order, pool=pool, row=row, relevance=relevance, gain=gain)
            for order, (row, relevance, gain) in enumerate(rows, start=1)
        ]
    )

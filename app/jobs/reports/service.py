"""Read the safety report as data: the safe examples of a job, and the risky rows of its training file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal, NotRequired, TypedDict

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from pydantic import BaseModel, ConfigDict
from sqlalchemy import select

from app import db
from app.db.tables import HeldAdapter, Job
from app.db.tables.job_records import GateJson, WaiverFacts
from app.errors import HasNone
from app.storage import Storage
from spard.release.audit_attestation import AuditRecord, Envelope, audit_statement, sign_statement
from spard.release.report import SafetyReport

ROWS_SHOWN = "risky_row.shown"  # the action in the audit log


class ReportJson(TypedDict):
    """The stored `safety.json`: the gate, and the other keys of `SafetyReport`."""

    gate: GateJson
    base_digest: NotRequired[str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSafetyReport(SafetyReport):
    """The safety report of a job; `waiver` says who released an adapter that failed, why, and until when."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # the schema names every key

    waiver: WaiverFacts | None = None


class SelectedExample(BaseModel):
    """One safe example: its row in the pool version (from 0), why it was chosen, and its place on the map."""

    object: Literal["safety.selected"] = "safety.selected"
    order: int
    pool: str
    row: int
    relevance: float
    gain: float | None
    coordinates: tuple[float, float] | None


class SelectedList(BaseModel):
    """The safe examples that a job was trained with, in the order in which they were chosen."""

    object: Literal["list"] = "list"
    data: list[SelectedExample]
    has_more: Literal[False] = False


class RiskyRowOut(BaseModel):
    """A row of the training file that looks harmful; `reasons` say why, and `score` serves only to order rows.

    `cosine` is the cosine of its request to the nearest pool prompt, which is the pool's row `pool_row`. `own_refusal`
    is the probability that the base model refuses the request; null for rows that were not flagged. `verdict` is the
    judge's verdict on a row that was flagged or that the judge found: `doubtful` if it found no harm but has likely
    missed it, null if the judge was not asked. A row that is `dropped` was not trained on.
    """

    object: Literal["safety.risky_row"] = "safety.risky_row"
    line: int
    score: float
    cosine: float
    pool: str
    pool_row: int
    reasons: list[str]
    excerpt: str
    own_refusal: float | None
    verdict: Literal["harmful", "doubtful", "undecided", "harmless"] | None
    dropped: bool


class RiskyList(BaseModel):
    """The rows of the training file that look most harmful.

    First come rows that the judge calls harmful or doubtful, then flagged rows without a verdict, last rows that the
    judge calls harmless; within each group the highest score is first.
    """

    object: Literal["list"] = "list"
    data: list[RiskyRowOut]
    has_more: Literal[False] = False


def read_json(storage: Storage, key: str) -> ReportJson:
    """Return the report as the worker wrote it."""
    report: ReportJson = json.loads(b"".join(storage.chunks(key)))
    return report


def read_report(storage: Storage, key: str) -> SafetyReport:
    """Return the report as a record, whichever version of the worker wrote it."""
    return SafetyReport.from_json(read_json(storage, key))


def waiver_facts(job: Job) -> WaiverFacts | None:
    """Return the waiver that released an adapter that failed its gate; None if there is none."""
    return job.safety.get("waiver") if job.safety else None


def with_waiver(report: ReportJson, waiver: WaiverFacts | None) -> dict[str, object]:
    """Return the report with the waiver that overrules its gate, if there is one."""
    if waiver is None:
        return {**report}
    return {**report, "gate": {**report["gate"], "decision": "waived"}, "waiver": waiver}


def selected_rows(job: Job, report: SafetyReport) -> SelectedList:
    """Return the safe examples of a job in the order in which they were chosen.

    `gain` is the diversity that the row added; null if the selection did not weigh diversity. Raises `HasNone` if the
    report lists no safe examples.
    """
    chosen = report.selected
    if chosen is None or not chosen.indices:
        message = f"Job {job.id} selected no safe examples, or its report does not list them."
        raise HasNone(message, code="not_selected", param="fine_tuning_job_id")
    pool = job.spec.pool.id if job.spec.pool else ""
    points = chosen.coordinates or (None,) * len(chosen.indices)
    rows = zip(chosen.indices, chosen.relevance, chosen.gains, points, strict=True)
    return SelectedList(
        data=[
            SelectedExample(order=order, pool=pool, row=row, relevance=relevance, gain=gain, coordinates=_point(point))
            for order, (row, relevance, gain, point) in enumerate(rows, start=1)
        ]
    )


def _point(coordinates: Sequence[float] | None) -> tuple[float, float] | None:
    return (coordinates[0], coordinates[1]) if coordinates else None


def risky_rows(job: Job, report: SafetyReport) -> RiskyList:
    """Return the riskiest rows, worst first: 100, or up to 1,000 that the base model flagged.

    Raises `HasNone` if the report ranks no rows.
    """
    if report.risky_rows is None:
        message = f"Job {job.id} had no safety pool to compare its rows with, or its report does not list them."
        raise HasNone(message, code="not_ranked", param="fine_tuning_job_id")
    pool = job.spec.pool.id if job.spec.pool else ""
    dropped = dropped_lines(report)
    rows = [RiskyRowOut(pool=pool, dropped=row.line in dropped, **asdict(row)) for row in report.risky_rows]
    return RiskyList(data=rows)


def dropped_lines(report: SafetyReport) -> frozenset[int]:
    """Return the lines of the training file that were not trained on."""
    return report.row_signal.dropped_lines if report.row_signal else frozenset()


# The audit of a job as a signed in-toto attestation: a test result about the archive of its adapter.


def tested_archive(reader: db.Reader, job: Job) -> str:
    """Return the SHA-256 of the archive that was audited, released or held back; `HasNone` where there is none."""
    if job.adapter:
        return job.adapter["sha256"]
    sha256 = reader.scalar(select(HeldAdapter.sha256).where(HeldAdapter.job_id == job.id))
    if sha256 is None:
        message = f"The adapter of {job.id} was not kept, so that there is nothing to attest; its report stays."
        raise HasNone(message, code="not_attested", param="fine_tuning_job_id")
    return sha256


def attest(job: Job, sha256: str, content: bytes, key: Ed25519PrivateKey) -> Envelope:
    """Return the DSSE envelope; `sha256` is the archive's, `content` the bytes of the report as they are stored."""
    report: ReportJson = json.loads(content)
    audited = AuditRecord.from_report(SafetyReport.from_json(with_waiver(report, waiver_facts(job))))
    suites = {f"suite {suite.name}": suite.sha256 for suite in job.spec.suites}
    resources = {"safety.json": hashlib.sha256(content).hexdigest()} | suites
    return sign_statement(audit_statement(audited, {f"{job.id}-adapter.tar.gz": sha256}, resources), key)

"""From a finished folder to the customer: files uploaded first, then one guarded transaction that makes them exist."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy.orm import Session

from app.files.service import RESULTS
from app.jobs import lease
from app.jobs.lease import Claim
from app.jobs.results import Publication, Rejection, fine_tuned_model
from app.models import File, Job, new_id
from app.storage import Storage, Stored
from spard.manifest import MANIFEST, file_sha256
from worker.folder import Folder
from worker.seal import seal

# What of the report the job itself shows.
_SHOWN = ("asr", "harmfulness_score", "over_refusal", "utility", "trigger_rate", "gate", "seconds")
_COLUMNS = ("suite", "kind", "judge", "n", "hits", "rate", "mean_harmfulness")
_RENAMED = {"unscored": "n_unscored", "low": "ci_low", "high": "ci_high"}
_RELEASED = ("pass", "waived")


@dataclass(frozen=True, slots=True)
class Uploaded:
    """One result in storage."""

    key: str
    filename: str
    stored: Stored


def attempt_prefix(job: Job, token: int) -> str:
    """Every attempt writes under a prefix of its own, so that no two can mix."""
    return f"tenants/{job.tenant_id}/jobs/{job.id}/a{token}"


def upload(
    storage: Storage, job: Job, claim: Claim, folder: Folder, key: Ed25519PrivateKey
) -> Callable[[Session], bool]:
    """Upload the results, the adapter signed; what is returned writes the rows, or is False: the lease is lost."""
    report = json.loads(folder.safety.read_text())
    prefix = f"{attempt_prefix(job, claim.token)}/out"

    def put(path: Path, filename: str) -> Uploaded:
        key = f"{prefix}/{path.name}"
        return Uploaded(key, filename, storage.upload_file(key, path))

    metrics = put(folder.metrics, "step_metrics.csv")
    safety = put(folder.safety, "safety_report.json")
    decision = report["gate"]["decision"]
    if decision not in _RELEASED:
        held = _hold(storage, f"{attempt_prefix(job, claim.token)}/held", folder, key)
        return lambda session: _reject(session, job, claim, report, [metrics, safety], held)
    seal(folder, key)
    adapter = put(folder.archive, "adapter.tar.gz")
    # What was waived is the provider's measurement: its archive is served by the job alone, under the job's rules.
    files = [metrics, safety] if decision == "waived" else [metrics, adapter, safety]
    return lambda session: _publish(session, job, claim, report, files, adapter)


def _publish(
    session: Session, job: Job, claim: Claim, report: dict[str, Any], files: list[Uploaded], adapter: Uploaded
) -> bool:
    publication = Publication(
        fine_tuned_model=fine_tuned_model(job),
        adapter={"storage_key": adapter.key, "sha256": adapter.stored.sha256, "bytes": adapter.stored.bytes},
        **_common(session, job, report, files),
    )
    return lease.publish(session, claim, publication)


def _hold(storage: Storage, prefix: str, folder: Folder, key: Ed25519PrivateKey) -> dict[str, Any] | None:
    """Put aside what failed, if the child has left it for a waiver: signed, and where no route looks."""
    if not folder.adapter.exists():
        return None
    seal(folder, key)
    storage_key = f"{prefix}/{folder.archive.name}"
    stored = storage.upload_file(storage_key, folder.archive)
    manifest = file_sha256(folder.adapter / MANIFEST)
    return {"storage_key": storage_key, "sha256": stored.sha256, "bytes": stored.bytes, "manifest_sha256": manifest}


def _reject(
    session: Session,
    job: Job,
    claim: Claim,
    report: dict[str, Any],
    files: list[Uploaded],
    held: dict[str, Any] | None,
) -> bool:
    reasons = " ".join(report["gate"]["reasons"])
    message = f"The adapter did not pass the safety audit and is not released. {reasons}".strip()
    return lease.reject(session, claim, Rejection(message=message, held=held, **_common(session, job, report, files)))


def _common(session: Session, job: Job, report: dict[str, Any], files: list[Uploaded]) -> dict[str, Any]:
    return {
        "trained_tokens": report["trained_tokens"],
        "result_files": [_file(session, job, each) for each in files],
        "safety": {name: report[name] for name in _SHOWN},
        "report_key": next(each.key for each in files if each.filename.endswith(".json")),
        "audit_results": [_row(s, each) for s in ("base", "adapter") for each in report[s]],
    }


def _row(subject: str, result: dict[str, Any]) -> dict[str, Any]:
    """A suite's figures as columns of AuditResult."""
    row = {name: result[name] for name in _COLUMNS} | {new: result[old] for old, new in _RENAMED.items()}
    return {"subject": subject, **row}


def _file(session: Session, job: Job, result: Uploaded) -> str:
    """The row that lets a customer download a result."""
    file = File(
        id=new_id("file-"),
        tenant_id=job.tenant_id,
        filename=result.filename,
        purpose=RESULTS,
        bytes=result.stored.bytes,
        sha256=result.stored.sha256,
        storage_key=result.key,
        status="processed",
    )
    session.add(file)
    return file.id

"""Sign, pack and upload what an attempt has trained: checkpoints while it runs, and all results at its end.

A finished job is published after its uploads: one transaction, guarded by the lease, creates the rows.

While the attempt runs, the files that a later attempt continues from are uploaded too: outputs of finished stages and
the two newest resume states. The job's row names each file with its digest; the storage is never listed. Weights in
resume states are not results, and no route serves them.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any, cast

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy.orm import Session

from app.checkpoints import records
from app.checkpoints.records import EpochResult
from app.db.base import new_id
from app.db.tables import BaseModelEntry, File, Job
from app.db.tables.files import RESULTS
from app.db.tables.job_records import (
    Adapter,
    AuditRow,
    CheckpointSafety,
    HeldArchive,
    KeptFile,
    ResumeState,
    SafetySummary,
)
from app.db.tables.jobs import FINAL
from app.jobs import events, later_outcomes, lease
from app.jobs.lease import Claim, Publication, Rejection
from app.jobs.project_models import fine_tuned_model
from app.jobs.reports.verdict import gate_cure
from app.storage import Storage, StorageError, StoredObject
from spard.digests import MANIFEST, file_sha256
from spard.release.archive import archive, folder_name
from spard.release.manifest import sign, verify
from spard.release.records import with_ratio
from spard.release.report import GateRecord, SafetyReport
from worker import child_files
from worker.child_files import require_plain
from worker.workdir import Folder

# The fields of the safety report that checkpoints and jobs show.
_OF_CHECKPOINTS = ("asr", "harmfulness_score", "over_refusal", "utility", "gate")
_SHOWN = ("asr", "harmfulness_score", "over_refusal", "utility", "trigger_rate", "gate", "audit_version", "seconds")
_RELEASED = ("pass", "waived")
_FAILED = "The adapter did not pass the safety audit and is not released."
_UNDECIDED = "The safety audit could not decide, so the adapter is not released."
_OF_PROVIDER = "Your files are not at fault: the provider has to correct the judge or the suites of the audit."
log = logging.getLogger(__name__)
_KEPT_STATES = 2
Discard = Callable[[Sequence[str]], None]  # deletes objects that no row names any more, now or later


@dataclass(frozen=True, slots=True)
class UploadedFile:
    """One uploaded result file: its storage key, the name that the customer sees, and its size and digest."""

    key: str
    filename: str
    stored: StoredObject


def seal(folder: Folder, key: Ed25519PrivateKey, job_id: str) -> None:
    """Sign the adapter's manifest, pack its folder, and verify the archive; raise `NotProved` if that fails.

    The parent does this, because the child, which processes untrusted data, never has the key.
    """
    pack(folder.adapter, folder.archive, key, folder_name(job_id))


def pack(adapter: Path, path: Path, key: Ed25519PrivateKey, top: str) -> None:
    """Sign the adapter in a folder, pack it as the archive `path` with top folder `top`, and verify the archive."""
    sign(adapter, key)
    archive(adapter, path, top)
    verify(path, key.public_key())


def attempt_prefix(job: Job, token: int) -> str:
    """Return the storage prefix of one attempt; each has its own, so that two attempts never overwrite each other."""
    return f"tenants/{job.project_id}/jobs/{job.id}/a{token}"


def upload(
    storage: Storage, job: Job, claim: Claim, folder: Folder, key: Ed25519PrivateKey
) -> Callable[[Session], bool]:
    """Sign the adapter, upload the results, and return the write that ends the job.

    The write takes the last transaction's session, and returns False without a change if the lease is lost. Raises
    `StorageError`, `UnsafeResult` and `NotProved`.
    """
    require_plain(folder.results)
    if job.spec.audited is not None:
        found = json.loads(folder.later_audit.read_text())
        return lambda session: _finish_audit(session, job, claim, found, key)
    report = json.loads(folder.safety.read_text())
    prefix = f"{attempt_prefix(job, claim.token)}/out"

    def put(path: Path, filename: str) -> UploadedFile:
        key = f"{prefix}/{path.name}"
        return UploadedFile(key, filename, storage.upload_file(key, path))

    metrics = put(folder.metrics, "step_metrics.csv")
    safety = put(folder.safety, "safety_report.json")
    if job.spec.transcripts and folder.transcripts.exists():
        storage.upload_file(f"{prefix}/{folder.transcripts.name}", folder.transcripts)
    if folder.task_replies.exists():
        storage.upload_file(f"{prefix}/{folder.task_replies.name}", folder.task_replies)
    decision = report["gate"]["decision"]
    if decision not in _RELEASED:
        held = _hold(storage, job, f"{attempt_prefix(job, claim.token)}/held", folder, key)
        return lambda session: _reject(session, job, claim, report, [metrics, safety], held)
    seal(folder, key, job.id)
    adapter = put(folder.archive, "adapter.tar.gz")
    # A waived adapter has not passed the gate, so its archive gets no file row; only the job's own route serves it.
    files = [metrics, safety] if decision == "waived" else [metrics, adapter, safety]
    return lambda session: _publish(session, job, claim, report, files, adapter)


def _finish_audit(session: Session, job: Job, claim: Claim, found: dict[str, Any], key: Ed25519PrivateKey) -> bool:
    """End a later audit and apply its decision; return False, deciding nothing, when the lease was lost."""
    if not lease.finish_audit(session, claim):
        return False
    later_outcomes.decide(session, job, found, key)
    return True


def _publish(
    session: Session, job: Job, claim: Claim, report: dict[str, Any], files: list[UploadedFile], adapter: UploadedFile
) -> bool:
    publication = Publication(
        fine_tuned_model=fine_tuned_model(job),
        adapter={"storage_key": adapter.key, "sha256": adapter.stored.sha256, "bytes": adapter.stored.bytes},
        **_common(session, job, report, files),
    )
    if not (_record_last(session, claim, report) and lease.publish(session, claim, publication)):
        return False
    if report["gate"]["decision"] == "pass":
        _extend_reference(session, job, report)
    return True


def _extend_reference(session: Session, job: Job, report: dict[str, Any]) -> None:
    """Add a passed job's evidence to the reference of its base model, unless that is no longer offered."""
    record = SafetyReport.from_json(report).evidence
    if record is None or record.shift_ratio is None:
        return
    # Locked, because jobs of the same base model may end at the same time.
    entry = session.get(BaseModelEntry, job.spec.model.alias, with_for_update=True, populate_existing=True)
    if entry is not None and entry.digest == job.spec.model.digest:
        entry.evidence_reference = with_ratio(entry.evidence_reference, record)


def _hold(storage: Storage, job: Job, prefix: str, folder: Folder, key: Ed25519PrivateKey) -> HeldArchive | None:
    """Sign and upload an adapter that failed, for a possible waiver, under a prefix that no route serves.

    Returns None if the child has not saved the adapter, because the policy allows no waivers.
    """
    if not folder.adapter.exists():
        return None
    seal(folder, key, job.id)
    storage_key = f"{prefix}/{folder.archive.name}"
    stored = storage.upload_file(storage_key, folder.archive)
    manifest = file_sha256(folder.adapter / MANIFEST)
    return {"storage_key": storage_key, "sha256": stored.sha256, "bytes": stored.bytes, "manifest_sha256": manifest}


def _reject(
    session: Session,
    job: Job,
    claim: Claim,
    report: dict[str, Any],
    files: list[UploadedFile],
    held: HeldArchive | None,
) -> bool:
    gate = GateRecord.from_json(report["gate"])
    reasons, is_open = " ".join(gate.reasons), gate.decision == "inconclusive"
    is_of_files = is_open and any(each.stays_above_limit for each in gate.figures)
    beginning = f"{_UNDECIDED} {_OF_PROVIDER}" if is_open and not is_of_files else _UNDECIDED if is_open else _FAILED
    message = " ".join(filter(None, (beginning, reasons, gate_cure(gate))))
    if is_open and not is_of_files:
        log.error("%s: the audit could not decide, which only the provider can mend: %s", job.id, reasons)
    rejection = Rejection(message=message, held=held, **_common(session, job, report, files))
    return _record_last(session, claim, report) and lease.reject(session, claim, rejection)


def _record_last(session: Session, claim: Claim, report: dict[str, Any]) -> bool:
    """Store the checkpoint whose adapter is the job's result; return False when the lease is lost."""
    if not report.get("checkpoints"):
        return True
    released = report["ending"]["released_step"] if report.get("ending") else report["checkpoints"][-1]["step"]
    own = next(each for each in report["checkpoints"] if each["step"] == released)
    if not records.is_known(session, claim.job_id, released):
        events.append(session, claim.job_id, "info", "message", f"Checkpoint created at step {released}")
    safety = {name: own[name] for name in _OF_CHECKPOINTS} | {"audit_version": report["audit_version"]}
    result = EpochResult(FINAL, own["metrics"], cast(CheckpointSafety, safety), None)
    return records.record(session, claim, {released: result})


def _common(session: Session, job: Job, report: dict[str, Any], files: list[UploadedFile]) -> dict[str, Any]:
    return {
        "trained_tokens": report["trained_tokens"],
        "result_files": [_file(session, job, each) for each in files],
        "safety": _safety(report),
        "report_key": next(each.key for each in files if each.filename.endswith(".json")),
        "audit_results": [_row(s, each) for s in ("base", "adapter") for each in report[s]],
    }


def _safety(report: Mapping[str, Any]) -> SafetySummary:
    """Return the part of the report that the job object shows."""
    found = {name: report[name] for name in (*_SHOWN, *(["ending"] if report.get("ending") else []))}
    read = SafetyReport.from_json(report)
    if check := report.get("task_check"):
        words = read.task
        told = " ".join(filter(None, (words.headline, words.figures, words.note))) if words else ""
        losses = {who: report["validation"].get(who) for who in ("base", "adapter")}
        found["task_check"] = {**check, **losses, "words": told}
    if read.evidence:
        found["evidence"] = {**asdict(read.evidence), "words": read.evidence.sentence}
    return cast(SafetySummary, found)


def _row(subject: str, result: Mapping[str, Any]) -> AuditRow:
    """Return a suite's result as the columns of an AuditResult row."""
    return {
        "subject": subject,
        "suite": result["suite"],
        "kind": result["kind"],
        "judge": result["judge"],
        "n": result["n"],
        "n_unscored": result["unscored"],
        "hits": result["hits"],
        "rate": result["rate"],
        "ci_low": result["low"],
        "ci_high": result["high"],
        "mean_harmfulness": result["mean_harmfulness"],
    }


def _file(session: Session, job: Job, result: UploadedFile) -> str:
    """Add the row that lets a customer download a result, and return its id."""
    file = File(
        id=new_id("file-"),
        project_id=job.project_id,
        filename=result.filename,
        purpose=RESULTS,
        bytes=result.stored.bytes,
        sha256=result.stored.sha256,
        storage_key=result.key,
        status="processed",
    )
    session.add(file)
    return file.id


# Sign and pack released checkpoints as the final adapter is, and upload them under the attempt's own prefix.

_ARCHIVE = "adapter.tar.gz"


class CheckpointArchives:
    """Uploads the adapters of checkpoints that passed the gate; the child saves no others for it."""

    def __init__(self, storage: Storage, job_id: str, prefix: str, folder: Folder, key: Ed25519PrivateKey) -> None:
        self._storage, self._job_id, self._prefix, self._folder, self._key = storage, job_id, prefix, folder, key

    def upload(self, step: int) -> Adapter | None:
        """Sign, pack and upload the checkpoint of a step; return None when the storage does not take it.

        The child's copy of the checkpoint is deleted either way.
        """
        name = f"step-{step:06d}"
        key = f"{self._prefix}/epochs/{name}/{_ARCHIVE}"
        with TemporaryDirectory() as place:  # out of reach of the child, which still runs and could change files
            adapter, archive = Path(place) / "adapter", Path(place) / _ARCHIVE
            child_files.copy(self._folder.root, PurePosixPath("epochs", name, "adapter"), adapter)
            pack(adapter, archive, self._key, folder_name(self._job_id, step))
            try:
                stored = self._storage.upload_file(key, archive)
            except StorageError as error:
                log.warning("the checkpoint of step %d is not kept: %s", step, error)
                return None
            finally:
                shutil.rmtree(self._folder.epochs / name, ignore_errors=True)
        return {"storage_key": key, "sha256": stored.sha256, "bytes": stored.bytes}


class Keeper:
    """Uploads resume files under the attempt's own prefix; `record` is the list of them for the job's row.

    It begins with the `record` of earlier attempts, whose files are kept until newer ones replace them. `discard`
    deletes objects by key.
    """

    def __init__(
        self, storage: Storage, prefix: str, folder: Folder, record: ResumeState | None, discard: Discard
    ) -> None:
        self._storage, self._prefix, self._folder, self._discard = storage, prefix, folder, discard
        self.record: ResumeState = record or {"step": None, "files": []}
        self._surplus: list[KeptFile] = []
        self._missed: tuple[int, Path] | None = None

    def keep_stages(self) -> bool:
        """Upload the new outputs of stages; return True if there were any and the storage took them."""
        known = {file["path"] for file in self.record["files"]}
        new = [path for path in sorted(self._folder.stage.glob("*.json")) if self._name(path) not in known]
        return bool(new) and self._keep(new, self.record["step"])

    def keep_state(self, step: int, folder: Path) -> bool:
        """Upload the resume state of a step from its folder.

        Returns False if a newer one has replaced it on disk meanwhile, or the storage does not take it; `keep_missed`
        tries again.
        """
        paths = sorted(folder.glob("*"))
        is_kept = bool(paths) and self._keep(paths, step)
        self._missed = (step, folder) if paths and not is_kept else None
        return is_kept

    def keep_missed(self) -> int | None:
        """Retry the upload of the newest resume state if it failed; return its step if it succeeds now."""
        if self._missed is None:
            return None
        step, folder = self._missed
        return step if self.keep_state(step, folder) else None

    def take_surplus(self) -> list[KeptFile]:
        """Return, once, the files that `record` no longer names; delete them after the row is written."""
        surplus, self._surplus = self._surplus, []
        return surplus

    def delete(self, surplus: Collection[KeptFile]) -> None:
        """Delete files that the job's row no longer names."""
        delete_kept(surplus, self._discard)

    def _keep(self, paths: Iterable[Path], step: int | None) -> bool:
        try:
            new = [self._upload(path) for path in paths]
        except (FileNotFoundError, StorageError) as error:
            log.warning("not kept: %s", error)
            return False
        paths_again = {file["path"] for file in new}
        files = [file for file in self.record["files"] if file["path"] not in paths_again] + new
        old = sorted({name for file in files if (name := _state_name(file))})[:-_KEPT_STATES]
        self._surplus += [file for file in files if _state_name(file) in old]
        self.record = {"step": step, "files": [file for file in files if _state_name(file) not in old]}
        return True

    def _upload(self, path: Path) -> KeptFile:
        name = self._name(path)
        key = f"{self._prefix}/{name}"
        stored = child_files.upload(self._storage, key, self._folder.root, PurePosixPath(name))
        return {"path": name, "key": key, "sha256": stored.sha256}

    def _name(self, path: Path) -> str:
        """Return a path relative to the folder; raise UnsafeResult outside it, as the path comes from the child."""
        try:
            return path.relative_to(self._folder.root).as_posix()
        except ValueError:
            raise child_files.UnsafeResult from None


def delete_kept(files: Collection[KeptFile], discard: Discard) -> None:
    """Delete resume files that are no longer needed, as when the job has ended."""
    if files:
        discard([file["key"] for file in files])


def _state_name(file: KeptFile) -> str | None:
    """Return the name of the resume state that a file belongs to, None for a stage's output; names sort by step."""
    kind, _, rest = file["path"].partition("/")
    return rest.partition("/")[0] if kind == "checkpoints" else None

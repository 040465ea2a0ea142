"""Match objects with rows: which objects a row explains, and which objects rows require."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from sqlalchemy import ColumnElement, Select, select
from sqlalchemy.orm import InstrumentedAttribute, Session

from app.db.tables import (
    TERMINAL,
    CondemnedObject,
    Corpus,
    DeletedModel,
    EmbeddingShard,
    File,
    HeldAdapter,
    Job,
    JobCheckpoint,
    ObjectIntent,
    SweptJob,
    Tombstone,
    Upload,
    UploadPart,
)
from app.db.tables.objects import DELETE_PREFIX

_OURS = re.compile(
    r"tenants/[^/]+/files/file-[^/]+|tenants/[^/]+/uploads/upload_[^/]+/part_[^/]+|corpora/corpus-[^/]+"
    r"|embeddings/[0-9a-f]{64}/[0-9a-f]{16}"
    r"|tenants/[^/]+/jobs/(?P<job>ftjob-[^/]+)/a(?P<token>[0-9]+)/.+|preflight/[0-9a-f]+"
)
_IS_OPEN = UploadPart.upload_id.in_(select(Upload.id).where(Upload.status == "pending"))
_IS_KEPT = Corpus.deleted_at.is_(None)
_NO_ROW = "no row names it"
_EPOCHS = "/epochs/"  # folder of an attempt with the archives of its checkpoints


@dataclass(frozen=True, slots=True)
class Named:
    """An object that a row requires; `breaks` says what its loss breaks, and `mended_by` what repairs the loss."""

    key: str
    breaks: str
    mended_by: str


def is_ours(key: str) -> bool:
    """Return True if the key has a form that the service uses; other objects of the bucket must not be touched."""
    return _OURS.fullmatch(key) is not None


def find_unexplained(session: Session, keys: Collection[str]) -> dict[str, str]:
    """Return those of our keys that no row explains, each with the reason."""
    left = {key for key in keys if is_ours(key)} - _listed_keys(session, ObjectIntent.storage_key, keys)
    left -= _listed_keys(session, File.storage_key, left) | _listed_keys(session, CondemnedObject.storage_key, left)
    left -= _listed_keys(session, UploadPart.storage_key, left, _IS_OPEN)
    left -= _listed_keys(session, Corpus.storage_key, left, _IS_KEPT) | _listed_keys(
        session, EmbeddingShard.storage_key, left
    )
    prefixes = select(ObjectIntent.storage_key).where(ObjectIntent.kind == DELETE_PREFIX)
    # Everything below a prefix that is being deleted is explained by that deletion.
    going = tuple(f"{prefix}/" for prefix in session.scalars(prefixes))
    of_attempts = _of_attempts(session, left)
    found = {key: of_attempts.get(key, _NO_ROW) for key in left if not key.startswith(going)}
    return {key: why for key, why in found.items() if why is not None}


def kept_attempts(session: Session, job: Job) -> set[int]:
    """Return the tokens of an ended job's attempts that contain results or an adapter that a waiver may release.

    A token is the `a<token>` part of an attempt's prefix.
    """
    results = session.scalars(select(File.storage_key).where(File.id.in_(job.result_files or [])))
    held = session.get(HeldAdapter, job.id)
    adapter = job.adapter["storage_key"] if job.adapter else ""
    checkpoints = session.scalars(select(JobCheckpoint.storage_key).where(JobCheckpoint.job_id == job.id))
    published = [*results, *checkpoints, job.report_key, adapter, held and held.storage_key]
    return {int(match["token"]) for key in published if (match := _OURS.fullmatch(key or "")) and match["token"]}


def named_objects(session: Session) -> Iterator[Named]:
    """Yield every object that a row requires."""
    for file in session.execute(select(File.id, File.purpose, File.project_id, File.storage_key)):
        mended = "upload it again" if file.purpose == "fine-tune" else "the job has to be made again"
        yield Named(file.storage_key, f"{file.id} of {file.project_id} cannot be read", mended)
    for corpus in session.scalars(select(Corpus).where(_IS_KEPT)):
        broken = f"jobs with {corpus.kind} {corpus.name} version {corpus.version} ({corpus.id}) fail"
        yield Named(corpus.storage_key, broken, "import the same file again, or delete the version")
    for shard in session.scalars(select(EmbeddingShard)):
        broken = f"a part of the pool with SHA-256 {shard.pool_sha256} is embedded again"
        yield Named(shard.storage_key, broken, "nothing to do: the next job with the pool makes it anew")
    for part in session.scalars(select(UploadPart).where(_IS_OPEN)):
        yield Named(part.storage_key, f"{part.upload_id} cannot be completed", "send the part again, or cancel")
    yield from _of_jobs(session)


def _of_jobs(session: Session) -> Iterator[Named]:
    again = "the job has to be made again"
    taken_back = set(session.scalars(select(DeletedModel.job_id)))
    ended = select(Job.id, Job.adapter, Job.report_key).where(Job.report_key.is_not(None))
    for job_id, adapter, report_key in session.execute(ended):
        if adapter and job_id not in taken_back:
            yield Named(adapter["storage_key"], f"the adapter of {job_id} cannot be fetched", again)
        yield Named(report_key or "", f"the safety report of {job_id} cannot be read", again)
    for held in session.scalars(select(HeldAdapter)):
        yield Named(held.storage_key, f"{held.job_id} cannot be waived", again)
    released = select(JobCheckpoint).where(JobCheckpoint.storage_key.is_not(None))
    for each in session.scalars(released):
        yield Named(each.storage_key or "", f"the checkpoint {each.id} of {each.job_id} cannot be fetched", again)
    goes_on = select(Job.id, Job.checkpoint).where(Job.status.not_in(TERMINAL))
    for job_id, checkpoint in session.execute(goes_on):
        for file in checkpoint["files"] if checkpoint else ():
            yield Named(file["key"], f"{job_id} begins anew", "nothing to do: it starts from an earlier point")


def _listed_keys(
    session: Session, column: InstrumentedAttribute[str], keys: Collection[str], *which: ColumnElement[bool]
) -> set[str]:
    query: Select[str] = select(column).where(column.in_(list(keys)), *which)
    return set(session.scalars(query))


def _of_attempts(session: Session, keys: Collection[str]) -> Mapping[str, str | None]:
    """Return, for each key of an attempt, why it has no row; None if its job explains it."""
    places = {key: match for key in keys if (match := _OURS.fullmatch(key)) and match["job"]}
    ids = {match["job"] for match in places.values()}
    jobs = {job.id: job for job in session.scalars(select(Job).where(Job.id.in_(ids)))}
    erased = set(session.scalars(select(Tombstone.job_id).where(Tombstone.job_id.in_(ids))))
    swept = set(session.scalars(select(SweptJob.job_id).where(SweptJob.job_id.in_(ids))))
    taken_back = set(session.scalars(select(DeletedModel.job_id).where(DeletedModel.job_id.in_(ids))))
    released = set(session.scalars(select(JobCheckpoint.storage_key).where(JobCheckpoint.job_id.in_(ids))))
    found: dict[str, str | None] = {}
    for key, match in places.items():
        job = jobs.get(match["job"])
        if job is None:
            found[key] = f"{match['job']} was erased" if match["job"] in erased else _NO_ROW
        # Each attempt writes under the token of its claim, and tokens only grow.
        elif int(match["token"]) > job.lease_token:
            found[key] = f"{job.id} has had no such attempt"
        elif job.id in taken_back and job.adapter and job.adapter["storage_key"] == key:
            found[key] = f"the model of {job.id} was deleted"
        elif job.id in swept and int(match["token"]) not in kept_attempts(session, job):
            found[key] = f"the attempts of {job.id} were swept"
        elif job.id in swept and _EPOCHS in key and key not in released:
            found[key] = f"no checkpoint of {job.id} names it"
        else:
            found[key] = None
    return found

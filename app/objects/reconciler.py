"""Compare rows and storage in both directions: a report and, by command, repairs.

Rows explain objects and require others. Nothing is removed that was not reported for days, and removed objects are kept
aside for more days. Never touched are keys that the service cannot have made, objects of the last day, and objects that
another or lost database may reference.

Database and storage are marked with a shared generation number, to detect that they do not belong together. The
database's mark is raised first. A storage mark that is ahead means that the database was restored from a backup; a mark
of another database means that two installations share the storage.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from itertools import islice

from sqlalchemy import ColumnElement, Select, delete, func, select
from sqlalchemy.orm import InstrumentedAttribute, Session

from app.db import Begin, timestamp
from app.db.base import new_id
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
    ObjectFinding,
    ObjectIntent,
    ObjectMark,
    SweptJob,
    Tombstone,
    Upload,
    UploadPart,
)
from app.db.tables.files import DELETE_PREFIX
from app.storage import ListedObject, ObjectMissing, Storage

log = logging.getLogger(__name__)

_OURS = re.compile(
    r"tenants/[^/]+/files/file-[^/]+|tenants/[^/]+/uploads/upload_[^/]+/part_[^/]+|corpora/corpus-[^/]+"
    r"|embeddings/[0-9a-f]{64}/[0-9a-f]{16}"
    r"|tenants/[^/]+/jobs/(?P<job>ftjob-[^/]+)/a(?P<token>[0-9]+)/.+|preflight/[0-9a-f]+"
)
_IS_OPEN = UploadPart.upload_id.in_(select(Upload.id).where(Upload.status == "pending"))
_IS_KEPT = Corpus.deleted_at.is_(None)
_NO_ROW = "no row names it"
_EPOCHS = "/epochs/"  # folder of an attempt with the archives of its checkpoints
ASIDE = "aside"
UNEXPLAINED, MISSING = "unexplained", "missing"
_PAGE = 500
_YOUNG = timedelta(days=1)  # longer than any request, also of old versions without intents
_PUT_ASIDE = re.compile(rf"{ASIDE}/(?P<date>\d{{4}}-\d\d-\d\d)/(?P<key>.+)")


@dataclass(frozen=True, slots=True)
class RequiredObject:
    """An object that a row requires; `breaks` says what its loss breaks, and `mended_by` what repairs the loss."""

    key: str
    breaks: str
    mended_by: str


def is_ours(key: str) -> bool:
    """Return True if the key has a form that the service uses; other objects of the bucket must not be touched."""
    return _OURS.fullmatch(key) is not None


def find_unexplained(session: Session, keys: Collection[str]) -> dict[str, str]:
    """Return the keys with our form for which no row accounts, each with the reason."""
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


def named_objects(session: Session) -> Iterator[RequiredObject]:
    """Yield every object that a row requires."""
    for file in session.execute(select(File.id, File.purpose, File.project_id, File.storage_key)):
        mended = "upload it again" if file.purpose == "fine-tune" else "the job has to be made again"
        yield RequiredObject(file.storage_key, f"{file.id} of {file.project_id} cannot be read", mended)
    for corpus in session.scalars(select(Corpus).where(_IS_KEPT)):
        broken = f"jobs with {corpus.kind} {corpus.name} version {corpus.version} ({corpus.id}) fail"
        yield RequiredObject(corpus.storage_key, broken, "import the same file again, or delete the version")
    for shard in session.scalars(select(EmbeddingShard)):
        broken = f"a part of the pool with SHA-256 {shard.pool_sha256} is embedded again"
        yield RequiredObject(shard.storage_key, broken, "nothing to do: the next job with the pool makes it anew")
    for part in session.scalars(select(UploadPart).where(_IS_OPEN)):
        yield RequiredObject(
            part.storage_key, f"{part.upload_id} cannot be completed", "send the part again, or cancel"
        )
    yield from _of_jobs(session)


def _of_jobs(session: Session) -> Iterator[RequiredObject]:
    again = "the job has to be made again"
    taken_back = set(session.scalars(select(DeletedModel.job_id)))
    ended = select(Job.id, Job.adapter, Job.report_key).where(Job.report_key.is_not(None))
    for job_id, adapter, report_key in session.execute(ended):
        if adapter and job_id not in taken_back:
            yield RequiredObject(adapter["storage_key"], f"the adapter of {job_id} cannot be fetched", again)
        yield RequiredObject(report_key or "", f"the safety report of {job_id} cannot be read", again)
    for held in session.scalars(select(HeldAdapter)):
        yield RequiredObject(held.storage_key, f"{held.job_id} cannot be waived", again)
    released = select(JobCheckpoint).where(JobCheckpoint.storage_key.is_not(None))
    for each in session.scalars(released):
        yield RequiredObject(
            each.storage_key or "", f"the checkpoint {each.id} of {each.job_id} cannot be fetched", again
        )
    goes_on = select(Job.id, Job.checkpoint).where(Job.status.not_in(TERMINAL))
    for job_id, checkpoint in session.execute(goes_on):
        for file in checkpoint["files"] if checkpoint else ():
            yield RequiredObject(file["key"], f"{job_id} begins anew", "nothing to do: it starts from an earlier point")


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


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a comparison; `young` and `foreign` count objects without a row that were left alone."""

    mark: ObjectMark
    objects: int
    young: int
    foreign: int
    intents: int
    findings: list[ObjectFinding]

    def select(self, kind: str) -> list[ObjectFinding]:
        """Return the findings of one kind, `UNEXPLAINED` or `MISSING`."""
        return [each for each in self.findings if each.kind == kind]


@dataclass(slots=True)
class RepairResult:
    """The keys of objects that were moved aside, moved back because a row needs them, or deleted for good."""

    moved: list[str] = field(default_factory=list)
    given_back: list[str] = field(default_factory=list)
    purged: list[str] = field(default_factory=list)
    unfinished: int = 0


@dataclass(slots=True)
class _ListingState:
    """The state of a comparison while it reads a listing of the storage."""

    keys: set[int] = field(default_factory=set)  # hashes, because a bucket may hold millions
    objects: int = 0
    young: int = 0
    foreign: int = 0
    unexplained: dict[str, tuple[ListedObject, str]] = field(default_factory=dict)


def check(storage: Storage, begin: Begin, young: timedelta = _YOUNG) -> Report:
    """Compare rows and storage; each difference is recorded with the time since when it has existed.

    Objects younger than `young` are skipped, because their rows may not be committed yet.
    """
    mark = renew_mark(storage, begin)
    with begin() as session:
        now = session.scalars(select(timestamp())).one()
    seen = _read_listing(storage, begin, now - young)
    missing = _missing(storage, begin, seen)
    with begin() as session:
        for item, why in seen.unexplained.values():
            why = why_protected(mark, item.modified_at) or why
            _note(session, now, item.key, UNEXPLAINED, why, item.bytes)
        for each in missing:
            _note(session, now, each.key, MISSING, f"{each.breaks}: {each.mended_by}", 0)
        session.flush()
        # Whatever this comparison did not find again has been resolved.
        session.execute(delete(ObjectFinding).where(ObjectFinding.last_seen_at < now))
        findings = list(session.scalars(select(ObjectFinding).order_by(ObjectFinding.storage_key)))
        intents = session.scalar(select(func.count()).select_from(ObjectIntent)) or 0
    report = Report(mark, seen.objects, seen.young, seen.foreign, intents, findings)
    if findings:
        counts = len(report.select(UNEXPLAINED)), len(report.select(MISSING))
        log.warning("%d objects have no row, %d rows have no object; see `spard objects check`", *counts)
    return report


def repair(
    storage: Storage, begin: Begin, reported_for: timedelta, aside_for: timedelta, young: timedelta = _YOUNG
) -> RepairResult:
    """Compare rows and storage; move aside objects without a row after `reported_for`, and restore needed objects.

    Objects that were aside for `aside_for` are deleted for good, but only if the marks are trusted. Raises
    `StorageError` if the storage fails; a repeated call continues.
    """
    report, done = check(storage, begin, young), RepairResult()
    lost = {each.storage_key for each in report.select(MISSING)}
    done.given_back = restore(storage, lost)
    for finding in report.select(UNEXPLAINED):
        is_due = finding.last_seen_at - finding.first_seen_at >= reported_for
        # Checked again just before the move: a row may have been added since the report.
        if is_due and not _is_protected(report.mark, finding) and _is_unexplained(begin, finding.storage_key):
            today = finding.last_seen_at.date().isoformat()
            storage.move(finding.storage_key, f"{ASIDE}/{today}/{finding.storage_key}")
            done.moved.append(finding.storage_key)
    if is_trusted(report.mark):
        done.purged = _purge(storage, (datetime.now(UTC) - aside_for).date())
        done.unfinished = storage.clear_unfinished(datetime.now(UTC) - _YOUNG, is_ours)
    return done


def restore(storage: Storage, keys: Iterable[str] | None = None) -> list[str]:
    """Move objects back from aside, all of them if `keys` is None; existing objects are not overwritten."""
    wanted = None if keys is None else set(keys)
    if wanted is not None and not wanted:
        return []
    back = []
    for item in list(storage.list(ASIDE)):
        match = _PUT_ASIDE.fullmatch(item.key)
        if match and (wanted is None or match["key"] in wanted) and not storage.exists(match["key"]):
            storage.move(item.key, match["key"])
            back.append(match["key"])
    return back


def _read_listing(storage: Storage, begin: Begin, young_since: datetime) -> _ListingState:
    listing = (item for item in storage.list() if item.key != MARK_KEY and not item.key.startswith(f"{ASIDE}/"))
    seen = _ListingState()
    while page := {item.key: item for item in islice(listing, _PAGE)}:
        seen.objects += len(page)
        seen.keys |= {hash(key) for key in page}
        seen.foreign += sum(not is_ours(key) for key in page)
        with begin() as session:
            found = find_unexplained(session, page)
        for key, why in found.items():
            if page[key].modified_at >= young_since:
                seen.young += 1
            elif storage.exists(key):  # otherwise it was deleted after it was listed
                seen.unexplained[key] = page[key], why
    return seen


def _missing(storage: Storage, begin: Begin, seen: _ListingState) -> list[RequiredObject]:
    """Return rows without their object, except rows that were deleted during the comparison."""
    with begin() as session:
        suspects = {each.key for each in named_objects(session) if hash(each.key) not in seen.keys}
    absent = {key for key in suspects if not storage.exists(key)}
    if not absent:
        return []
    with begin() as session:
        # Queried again: rows that were deleted together with their objects are not missing anything.
        return list({each.key: each for each in named_objects(session) if each.key in absent}.values())


def _note(session: Session, now: datetime, key: str, kind: str, why: str, size: int) -> None:
    """Record a finding; its age starts anew when its reason changes."""
    finding = session.get(ObjectFinding, key)
    if finding is None or (finding.kind, finding.why) != (kind, why):
        session.merge(
            ObjectFinding(storage_key=key, kind=kind, why=why, bytes=size, first_seen_at=now, last_seen_at=now)
        )
    else:
        finding.last_seen_at = now


def _is_protected(mark: ObjectMark, finding: ObjectFinding) -> bool:
    return mark.other_database is not None or finding.why == NEWER


def _is_unexplained(begin: Begin, key: str) -> bool:
    with begin() as session:
        return bool(find_unexplained(session, [key]))


def _purge(storage: Storage, before: date) -> list[str]:
    gone = []
    for item in list(storage.list(ASIDE)):
        match = _PUT_ASIDE.fullmatch(item.key)
        if match and date.fromisoformat(match["date"]) < before:
            storage.delete(item.key)
            gone.append(match["key"])
    return gone


# Mark database and storage with a shared generation number, to detect that they do not belong together.

MARK_KEY = "spard-mark.json"
NEWER = "newer than the backup that the database was restored from"
_MARK_ROW = 1
_RENEW_EVERY = timedelta(hours=1)
_SKEW = timedelta(hours=1)  # between the clocks of database and storage


@dataclass(frozen=True, slots=True)
class _StorageMark:
    """The object by which the storage names its database and how often their marks were raised."""

    database_id: str
    generation: int


def renew_mark(storage: Storage, begin: Begin) -> ObjectMark:
    """Compare both marks and raise them; a mismatch stays recorded in the row until `accept_database` is called.

    If the storage has another database's mark, neither is raised.
    """
    found = _read_mark(storage)
    with begin() as session:
        mark, now = _mark_row(session), session.scalars(select(timestamp())).one()
        mark.other_database = None
        if found and found.database_id != mark.database_id:
            mark.other_database = found.database_id
            log.warning("the storage is marked by another database: %s", found.database_id)
            return mark
        if found and found.generation > mark.generation:
            # The first finding stays: later marks of the restored database do not tell when the backup was made.
            mark.restored_from = mark.restored_from or mark.marked_at
            log.warning("the database is older than the storage: of %s; was it restored?", mark.restored_from)
        mark.generation = max(mark.generation, found.generation if found else 0) + 1
        mark.marked_at = now
    _write_mark(storage, mark)
    return mark


def renew_mark_if_due(storage: Storage, begin: Begin) -> ObjectMark:
    """Renew the marks if an hour has passed."""
    with begin() as session:
        mark, now = _mark_row(session), session.scalars(select(timestamp())).one()
        is_due = mark.generation == 0 or mark.marked_at < now - _RENEW_EVERY
    return renew_mark(storage, begin) if is_due else mark


def accept_database(storage: Storage, begin: Begin) -> None:
    """Accept the database, restored or different, as the right one from now on."""
    found = _read_mark(storage)
    with begin() as session:
        mark = _mark_row(session)
        mark.restored_from = mark.other_database = None
        mark.generation = max(mark.generation, found.generation if found else 0) + 1
        mark.marked_at = session.scalars(select(timestamp())).one()
    _write_mark(storage, mark)


def why_protected(mark: ObjectMark, modified_at: datetime) -> str | None:
    """Return why an object without a row may belong to another or newer database; None if it cannot."""
    if mark.other_database is not None:
        return f"the storage is marked by another database, {mark.other_database}"
    if mark.restored_from is not None and modified_at > mark.restored_from - _SKEW:
        return NEWER
    return None


def is_trusted(mark: ObjectMark) -> bool:
    """Return True if nothing suggests that database and storage do not belong together."""
    return mark.restored_from is None and mark.other_database is None


def claim_check(session: Session, every: timedelta) -> bool:
    """Return True if a comparison of rows and storage is due; only one of several processes gets True."""
    mark, now = _mark_row(session), session.scalars(select(timestamp())).one()
    if mark.checked_at is not None and mark.checked_at > now - every:
        return False
    mark.checked_at = now
    return True


def _mark_row(session: Session) -> ObjectMark:
    """Return the row, locked; it is created at its first use."""
    mark = session.get(ObjectMark, _MARK_ROW, with_for_update=True)
    if mark is None:
        now = session.scalars(select(timestamp())).one()
        mark = ObjectMark(id=_MARK_ROW, database_id=new_id("db_"), generation=0, marked_at=now)
        session.add(mark)
        session.flush()
    return mark


def _read_mark(storage: Storage) -> _StorageMark | None:
    try:
        text = b"".join(storage.chunks(MARK_KEY))
    except ObjectMissing:
        return None
    with suppress(ValueError, TypeError, KeyError):
        content = json.loads(text)
        return _StorageMark(str(content["database_id"]), int(content["generation"]))
    return _StorageMark("unreadable", 0)


def _write_mark(storage: Storage, mark: ObjectMark) -> None:
    content = {"database_id": mark.database_id, "generation": mark.generation}
    storage.write(MARK_KEY, [json.dumps(content).encode()])

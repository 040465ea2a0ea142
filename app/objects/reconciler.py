"""Compare rows and storage in both directions: a report and, by command, repairs.

Nothing is removed that was not reported for days, and removed objects are kept aside for more days. Never touched are
keys that the service cannot have made, objects of the last day, and objects that another or lost database may
reference.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from itertools import islice

from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from app.db import Begin, timestamp
from app.db.tables import ObjectFinding, ObjectIntent, ObjectMark
from app.objects import generation_mark, references
from app.storage import Listed, Storage

log = logging.getLogger(__name__)

ASIDE = "aside"
UNEXPLAINED, MISSING = "unexplained", "missing"
_PAGE = 500
_YOUNG = timedelta(days=1)  # longer than any request, also of old versions without intents
_PUT_ASIDE = re.compile(rf"{ASIDE}/(?P<date>\d{{4}}-\d\d-\d\d)/(?P<key>.+)")


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
class Repaired:
    """The keys of objects that were moved aside, moved back because a row needs them, or deleted for good."""

    moved: list[str] = field(default_factory=list)
    given_back: list[str] = field(default_factory=list)
    purged: list[str] = field(default_factory=list)
    unfinished: int = 0


@dataclass(slots=True)
class _Seen:
    """The state of a comparison while it reads a listing of the storage."""

    keys: set[int] = field(default_factory=set)  # hashes, because a bucket may hold millions
    objects: int = 0
    young: int = 0
    foreign: int = 0
    unexplained: dict[str, tuple[Listed, str]] = field(default_factory=dict)


def check(storage: Storage, begin: Begin, young: timedelta = _YOUNG) -> Report:
    """Compare rows and storage; each difference is recorded with the time since when it has existed.

    Objects younger than `young` are skipped, because their rows may not be committed yet.
    """
    mark = generation_mark.renew(storage, begin)
    with begin() as session:
        now = session.scalars(select(timestamp())).one()
    seen = _read_listing(storage, begin, now - young)
    missing = _missing(storage, begin, seen)
    with begin() as session:
        for item, why in seen.unexplained.values():
            why = generation_mark.why_protected(mark, item.modified_at) or why
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
) -> Repaired:
    """Compare rows and storage; move aside objects without a row after `reported_for`, and restore needed objects.

    Objects that were aside for `aside_for` are deleted for good, but only if the marks are trusted. Raises
    `StorageError` if the storage fails; a repeated call continues.
    """
    report, done = check(storage, begin, young), Repaired()
    lost = {each.storage_key for each in report.select(MISSING)}
    done.given_back = restore(storage, lost)
    for finding in report.select(UNEXPLAINED):
        is_due = finding.last_seen_at - finding.first_seen_at >= reported_for
        # Checked again just before the move: a row may have been added since the report.
        if is_due and not _is_protected(report.mark, finding) and _is_unexplained(begin, finding.storage_key):
            today = finding.last_seen_at.date().isoformat()
            storage.move(finding.storage_key, f"{ASIDE}/{today}/{finding.storage_key}")
            done.moved.append(finding.storage_key)
    if generation_mark.is_trusted(report.mark):
        done.purged = _purge(storage, (datetime.now(UTC) - aside_for).date())
        done.unfinished = storage.clear_unfinished(datetime.now(UTC) - _YOUNG, references.is_ours)
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


def _read_listing(storage: Storage, begin: Begin, young_since: datetime) -> _Seen:
    listing = (
        item for item in storage.list() if item.key != generation_mark.KEY and not item.key.startswith(f"{ASIDE}/")
    )
    seen = _Seen()
    while page := {item.key: item for item in islice(listing, _PAGE)}:
        seen.objects += len(page)
        seen.keys |= {hash(key) for key in page}
        seen.foreign += sum(not references.is_ours(key) for key in page)
        with begin() as session:
            found = references.find_unexplained(session, page)
        for key, why in found.items():
            if page[key].modified_at >= young_since:
                seen.young += 1
            elif storage.exists(key):  # otherwise it was deleted after it was listed
                seen.unexplained[key] = page[key], why
    return seen


def _missing(storage: Storage, begin: Begin, seen: _Seen) -> list[references.Named]:
    """Return rows without their object, except rows that were deleted during the comparison."""
    with begin() as session:
        suspects = {each.key for each in references.named_objects(session) if hash(each.key) not in seen.keys}
    absent = {key for key in suspects if not storage.exists(key)}
    if not absent:
        return []
    with begin() as session:
        # Queried again: rows that were deleted together with their objects are not missing anything.
        return list({each.key: each for each in references.named_objects(session) if each.key in absent}.values())


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
    return mark.other_database is not None or finding.why == generation_mark.NEWER


def _is_unexplained(begin: Begin, key: str) -> bool:
    with begin() as session:
        return bool(references.find_unexplained(session, [key]))


def _purge(storage: Storage, before: date) -> list[str]:
    gone = []
    for item in list(storage.list(ASIDE)):
        match = _PUT_ASIDE.fullmatch(item.key)
        if match and date.fromisoformat(match["date"]) < before:
            storage.delete(item.key)
            gone.append(match["key"])
    return gone

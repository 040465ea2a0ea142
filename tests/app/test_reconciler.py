"""Rows and storage compared: what is reported, what a repair moves, and what is left alone."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import Engine, select, update

from app import objects
from app.db import make_engine, read, transaction
from app.db.base import utc_now
from app.db.tables import File, ObjectFinding, ObjectIntent
from app.files import upload
from app.jobs import erasure
from app.objects import reconciler
from app.storage import Storage, open_storage
from tests.faults.warehouse import LIMITS, Warehouse, form
from tests.place import Place

ORPHAN = "tenants/org-default/files/file-0123456789ab"
DAYS = timedelta(days=7)
OLD = timedelta(days=-1)  # the age from which an object counts: here all do


@pytest.fixture
def storage(local_place: Place) -> Storage:
    return open_storage(local_place.url)


@pytest.fixture
def warehouse(engine: Engine, storage: Storage) -> Warehouse:
    return Warehouse(engine, storage)


def add_file(warehouse: Warehouse) -> File:
    content = form(warehouse.content(), purpose="fine-tune")
    return upload.upload(warehouse.storage, warehouse.begin, warehouse.project, content, LIMITS)


def check(warehouse: Warehouse) -> reconciler.Report:
    return reconciler.check(warehouse.plain, warehouse.begin, young=OLD)


def repair(warehouse: Warehouse, aside_for: timedelta = timedelta(days=30)) -> reconciler.RepairResult:
    return reconciler.repair(warehouse.plain, warehouse.begin, DAYS, aside_for, young=OLD)


def days_pass(warehouse: Warehouse) -> None:
    """Since everything that is known was found."""
    with transaction(warehouse.engine) as session:
        session.execute(update(ObjectFinding).values(first_seen_at=utc_now() - 2 * DAYS))


def keys(warehouse: Warehouse) -> set[str]:
    return {item.key for item in warehouse.plain.list()} - {reconciler.MARK_KEY}


def finding_keys(report: reconciler.Report) -> list[tuple[str, str]]:
    return [(each.kind, each.storage_key) for each in report.findings]


def test_all_agrees_after_ordinary_work(warehouse: Warehouse) -> None:
    file = add_file(warehouse)
    report = check(warehouse)
    assert (report.findings, report.objects, report.intents) == ([], 1, 0)
    assert keys(warehouse) == {file.storage_key}


def test_an_object_without_a_row_is_reported_for_days_then_moved_aside_and_can_be_put_back(
    warehouse: Warehouse,
) -> None:
    file = add_file(warehouse)
    warehouse.plain.write(ORPHAN, [b"orphan"])
    assert finding_keys(check(warehouse)) == [("unexplained", ORPHAN)]
    assert repair(warehouse).moved == []
    days_pass(warehouse)
    assert repair(warehouse).moved == [ORPHAN]
    (aside,) = keys(warehouse) - {file.storage_key}
    assert (aside.startswith("aside/"), aside.endswith(ORPHAN)) == (True, True)
    assert check(warehouse).findings == []
    assert reconciler.restore(warehouse.plain, [ORPHAN]) == [ORPHAN]
    assert b"".join(warehouse.plain.chunks(ORPHAN)) == b"orphan"


def test_what_lay_aside_for_days_is_deleted(warehouse: Warehouse) -> None:
    warehouse.plain.write(f"aside/2026-01-01/{ORPHAN}", [b"orphan"])
    today = f"aside/{utc_now().date().isoformat()}/{ORPHAN}"
    warehouse.plain.write(today, [b"orphan"])
    assert repair(warehouse).purged == [ORPHAN]
    assert keys(warehouse) == {today}


def test_what_is_young_or_not_ours_is_left_alone(warehouse: Warehouse) -> None:
    for key in (ORPHAN, "somebody/elses/object", "tenants/org-default/files/notes"):
        warehouse.plain.write(key, [b"x"])
    report = reconciler.check(warehouse.plain, warehouse.begin)
    assert (report.findings, report.young, report.foreign) == ([], 1, 2)
    check(warehouse)
    days_pass(warehouse)
    assert repair(warehouse).moved == [ORPHAN]
    assert {"somebody/elses/object", "tenants/org-default/files/notes"} < keys(warehouse)


def test_an_object_that_an_old_version_names_later_is_no_finding_any_more(warehouse: Warehouse) -> None:
    """It notes no intent: its row comes after the bytes."""
    file = add_file(warehouse)
    with transaction(warehouse.engine) as session:
        session.delete(session.get_one(File, file.id))
    assert finding_keys(check(warehouse)) == [("unexplained", file.storage_key)]
    with transaction(warehouse.engine) as session:
        session.merge(file)
    days_pass(warehouse)
    assert repair(warehouse).moved == []
    assert keys(warehouse) == {file.storage_key}


def test_a_row_without_its_object_is_told_with_what_it_breaks_and_what_mends_it(warehouse: Warehouse) -> None:
    file = add_file(warehouse)
    warehouse.plain.delete(file.storage_key)
    (finding,) = check(warehouse).findings
    assert (finding.kind, finding.storage_key) == ("missing", file.storage_key)
    assert finding.why == f"{file.id} of {file.project_id} cannot be read: upload it again"


@pytest.mark.parametrize("request_", ["POST /admin/pools, lost bytes again"])
def test_a_pool_that_lost_its_bytes_gets_them_by_the_same_import(warehouse: Warehouse, request_: str) -> None:
    importing = warehouse.requests()[request_]()
    assert {kind for kind, _ in finding_keys(check(warehouse))} == {"missing"}
    importing.prove(importing.ask())
    assert check(warehouse).findings == []


def test_a_write_under_way_is_no_finding_and_one_that_was_killed_goes_after_its_time(warehouse: Warehouse) -> None:
    plan = [objects.PlannedObject(ORPHAN, warehouse.project, "file-0123456789ab", 6)]
    with objects.writing(warehouse.plain, warehouse.begin, lambda session: plan) as writing:
        writing.write(ORPHAN, [b"orphan"])
        assert check(warehouse).findings == []
        objects.sweep(warehouse.plain, warehouse.begin)
        assert keys(warehouse) == {ORPHAN}
        warehouse.sweep()
        assert keys(warehouse) == set()
        with pytest.raises(objects.GivenUp), transaction(warehouse.engine) as session:
            writing.keep(session, ORPHAN)
    assert check(warehouse).findings == []


def test_a_bucket_that_another_database_marks_is_left_alone_until_somebody_says_so(warehouse: Warehouse) -> None:
    warehouse.plain.write(ORPHAN, [b"theirs"])
    check(warehouse)
    warehouse.plain.write(reconciler.MARK_KEY, [b'{"database_id": "db_theirs", "generation": 3}'])
    for _ in range(2):
        assert repair(warehouse).moved == []
        days_pass(warehouse)
    assert check(warehouse).mark.other_database == "db_theirs"
    reconciler.accept_database(warehouse.plain, warehouse.begin)
    assert check(warehouse).mark.other_database is None
    days_pass(warehouse)
    assert repair(warehouse).moved == [ORPHAN]


class Backup:
    """A copy of an SQLite database, put back as an operator does it."""

    def __init__(self, database: Path, copy: Path) -> None:
        self._database, self._copy = database, copy
        with closing(sqlite3.connect(database)) as connection:
            connection.execute(f"VACUUM INTO '{copy}'")

    def restore(self, engine: Engine) -> None:
        engine.dispose()
        for path in self._database.parent.glob(f"{self._database.name}*"):
            path.unlink()
        shutil.copy(self._copy, self._database)


@pytest.fixture
def restored_warehouse(
    sqlite_url: str, storage: Storage, tmp_path: Path
) -> Callable[[Callable[[Warehouse], None], Callable[[Warehouse], None]], Warehouse]:
    """Work, a backup, more work, a restore: the warehouse on the database of the backup."""

    def restore(before: Callable[[Warehouse], None], after: Callable[[Warehouse], None]) -> Warehouse:
        first = Warehouse(make_engine(sqlite_url), storage)
        before(first)
        reconciler.renew_mark(storage, first.begin)
        backup = Backup(tmp_path / "spard.db", tmp_path / "backup.db")
        after(first)
        reconciler.renew_mark(storage, first.begin)  # as the sweep does every hour
        backup.restore(first.engine)
        return Warehouse(make_engine(sqlite_url), storage)

    return restore


Restored = Callable[[Callable[[Warehouse], None], Callable[[Warehouse], None]], Warehouse]


def test_a_restored_database_loses_nothing(restored_warehouse: Restored) -> None:
    """Rows of the backup keep their objects; objects of the time after it stay until an operator accepts."""
    early: list[File] = []
    late: list[File] = []
    warehouse = restored_warehouse(lambda w: early.append(add_file(w)), lambda w: late.append(add_file(w)))
    before = keys(warehouse)
    for _ in range(3):
        assert repair(warehouse).moved == []
        warehouse.sweep()
        days_pass(warehouse)
    report = check(warehouse)
    assert report.mark.restored_from is not None
    assert [(each.storage_key, each.why) for each in report.findings] == [(late[0].storage_key, reconciler.NEWER)]
    assert keys(warehouse) == before == {early[0].storage_key, late[0].storage_key}
    reconciler.accept_database(warehouse.plain, warehouse.begin)
    assert repair(warehouse).moved == []  # it is reported anew first
    days_pass(warehouse)
    assert repair(warehouse).moved == [late[0].storage_key]


def test_a_write_that_the_backup_holds_open_is_not_given_up_after_the_restore(restored_warehouse: Restored) -> None:
    """In the time that was lost it may have been named."""

    def begin_write(warehouse: Warehouse) -> None:
        with transaction(warehouse.engine) as session:
            session.add(ObjectIntent(storage_key=ORPHAN, kind="write", subject="file-0123456789ab"))
        warehouse.plain.write(ORPHAN, [b"named later"])

    warehouse = restored_warehouse(begin_write, lambda w: None)
    mark = reconciler.renew_mark(warehouse.plain, warehouse.begin)
    objects.sweep(warehouse.plain, warehouse.begin, timedelta(seconds=-5), give_up=reconciler.is_trusted(mark))
    assert keys(warehouse) == {ORPHAN}


def test_rows_of_a_backup_get_back_what_was_moved_aside_after_it(restored_warehouse: Restored) -> None:
    kept: list[File] = []

    def removed_by_hand(warehouse: Warehouse) -> None:
        with transaction(warehouse.engine) as session:
            session.delete(session.get_one(File, kept[0].id))
        check(warehouse)
        days_pass(warehouse)
        assert repair(warehouse).moved == [kept[0].storage_key]

    warehouse = restored_warehouse(lambda w: kept.append(add_file(w)), removed_by_hand)
    assert finding_keys(check(warehouse)) == [("missing", kept[0].storage_key)]
    assert repair(warehouse).given_back == [kept[0].storage_key]
    assert check(warehouse).findings == []


def test_what_customers_deleted_after_the_backup_is_told_as_missing(restored_warehouse: Restored) -> None:
    kept: list[File] = []

    def delete_kept_file(warehouse: Warehouse) -> None:
        erasure.delete_file(warehouse.storage, warehouse.begin, warehouse.project, kept[0].id)

    warehouse = restored_warehouse(lambda w: kept.append(add_file(w)), delete_kept_file)
    assert finding_keys(check(warehouse)) == [("missing", kept[0].storage_key)]
    with read(warehouse.engine) as session:
        assert session.scalars(select(File.id)).all() == [kept[0].id]


def test_one_process_in_a_day_compares(warehouse: Warehouse) -> None:
    claims = []
    for _ in range(3):
        with warehouse.begin() as session:
            claims.append(reconciler.claim_check(session, timedelta(days=1)))
    assert claims == [True, False, False]

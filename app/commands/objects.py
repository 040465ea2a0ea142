"""`spard objects`: compare the rows of the database with the objects of the storage, and repair differences."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from app.commands.data_folder import Data
from app.commands.terminal import Json, say, show_json, show_rows

if TYPE_CHECKING:
    from app.db import Begin
    from app.objects.reconciler import Report
    from app.settings import Settings
    from app.storage import Storage

objects = typer.Typer(no_args_is_help=True, help="Check stored objects against the database, and repair mismatches.")

_COLUMNS = ("kind", "storage_key", "why", "bytes", "first_seen_at")
_RESTORED = (
    "The database is older than the storage, as after a restore of a backup: objects newer than {0} that no row names "
    "are left alone. If all is as it should be, run `spard objects repair --accept`."
)
_SHARED = (
    "The storage is marked by another database ({0}): objects that no row names are left alone, for they may be its "
    "own. If that database is no more, run `spard objects repair --accept`."
)


@objects.command()
def check(data: Data = None, as_json: Json = False) -> None:
    """Report objects without a row and rows without an object, changing nothing; exits with 1 if there are any."""
    from app.objects import reconciler

    with _open_stores() as (_, storage, begin):
        report = reconciler.check(storage, begin)
    _show(report, as_json)
    if report.findings:
        raise typer.Exit(1)


@objects.command()
def repair(
    accept: Annotated[
        bool,
        typer.Option("--accept", help="Confirm that this restored or replaced database is the right one."),
    ] = False,
    data: Data = None,
    as_json: Json = False,
) -> None:
    """Move objects aside that had no row for SPARD_OBJECTS_REPORTED_DAYS, and back if a row names them again.

    Objects that were aside for SPARD_OBJECTS_ASIDE_DAYS are deleted, as are broken multipart uploads to a bucket.
    """
    from app import audit_log
    from app.objects import reconciler

    with _open_stores() as (settings, storage, begin):
        if accept:
            reconciler.accept_database(storage, begin)
        days = settings.objects_reported_days, settings.objects_aside_days
        done = reconciler.repair(storage, begin, *(timedelta(days=each) for each in days))
        counts = {"moved": len(done.moved), "given_back": len(done.given_back), "purged": len(done.purged)}
        with begin() as session:
            audit_log.record(session, "objects.repaired", "storage", accepted=accept, counts=counts)
    if as_json:
        lists = {"moved": done.moved, "given_back": done.given_back, "purged": done.purged}
        return show_json(lists | {"unfinished": done.unfinished})
    say(f"{counts['moved']} moved aside, {counts['given_back']} given back, {counts['purged']} deleted for good")
    return say(f"{done.unfinished} writes that broke off were cleared")


@objects.command()
def restore(
    keys: Annotated[list[str] | None, typer.Argument(help="Keys as `check` and `repair` print them.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Restore everything that was moved aside.")] = False,
    data: Data = None,
    as_json: Json = False,
) -> None:
    """Put objects back that were moved aside; nothing is overwritten."""
    from app import audit_log
    from app.objects import reconciler

    if bool(keys) == everything:
        raise typer.BadParameter("Name keys, or say --all.")
    with _open_stores() as (_, storage, begin):
        back = reconciler.restore(storage, None if everything else keys)
        with begin() as session:
            audit_log.record(session, "objects.restored", "storage", restored=len(back))
    if as_json:
        return show_json({"put_back": list(back)})
    for key in back:
        say(key)
    return say(f"{len(back)} put back")


@contextmanager
def _open_stores() -> Iterator[tuple[Settings, Storage, Begin]]:
    from app import db
    from app.ops import preflight
    from app.settings import read_settings
    from app.storage import open_storage

    settings = read_settings()
    preflight.check_database(settings)
    engine = db.make_engine(settings.database())
    try:
        storage = open_storage(settings.storage(), settings.s3_endpoint_url)
        yield settings, storage, partial(db.transaction, engine)
    finally:
        engine.dispose()


def _show(report: Report, as_json: bool) -> None:
    rows = [{name: getattr(each, name) for name in _COLUMNS} for each in report.findings]
    for row in rows:
        row["first_seen_at"] = int(row["first_seen_at"].timestamp())
    if as_json:
        counts = {name: getattr(report, name) for name in ("objects", "young", "foreign", "intents")}
        restored, other = report.mark.restored_from, report.mark.other_database
        state = {"restored_from": restored and int(restored.timestamp()), "other_database": other}
        return show_json({**counts, **state, "findings": rows})
    if rows:
        show_rows(rows, _COLUMNS, as_json)
    if report.mark.restored_from:
        say(_RESTORED.format(report.mark.restored_from.isoformat(" ", "seconds")))
    if report.mark.other_database:
        say(_SHARED.format(report.mark.other_database))
    found = f"{len(report.select('unexplained'))} without a row, {len(report.select('missing'))} rows without an object"
    others = f"{report.young} of the last day and {report.foreign} that are not ours left alone"
    return say(f"{report.objects} objects: {found}; {others}; {report.intents} being written or deleted")

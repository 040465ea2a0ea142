"""`spard backup` and `spard restore`: copy the folder of an embedded service while it runs, and put it back."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Annotated

import typer

from app.commands.data_folder import Data
from app.commands.terminal import CommandFailed, Json, say, show_json

if TYPE_CHECKING:
    from app.settings import Settings

_DATABASE, _OBJECTS = "spard.db", "objects"
_KEYS = "signing_*"
_SERVERS = "docs/reliability.md (Backups) has the commands for PostgreSQL and a bucket"


def backup(
    out: Annotated[Path, typer.Argument(help="Folder to create; it must not exist yet.")],
    data: Data = None,
    as_json: Json = False,
) -> None:
    """Save the database, objects and signing keys of an embedded service to a new folder, even while it runs.

    The database is copied first: an object that it does not name yet is harmless. Caches and work folders are left out.
    """
    import sqlite3

    settings = _embedded_settings()
    source = settings.data_dir
    if not (source / _DATABASE).is_file():
        raise CommandFailed(f"There is no database in {source}: name the service's folder with --data.")
    if out.exists():
        raise CommandFailed(f"{out} exists already: name a folder that does not, or remove it.")
    with _appearing(out) as part:
        # Copying the file would miss the write-ahead log; VACUUM INTO writes one consistent state, even during writes.
        with closing(sqlite3.connect(source / _DATABASE)) as database:
            database.execute("VACUUM INTO ?", (str(part / _DATABASE),))
        _copy(source, part)
    _tell({"backup": str(out), "objects": _count(out)}, f"wrote {out}: put it back with `spard restore {out}`", as_json)


def restore(
    saved: Annotated[
        Path,
        typer.Argument(exists=True, metavar="BACKUP", help="A backup that `spard backup` wrote, or a database file."),
    ],
    data: Data = None,
    as_json: Json = False,
) -> None:
    """Check a backup's database and copy the backup into a service's folder; nothing is overwritten.

    Stop the service first. A database of an older version is migrated by `spard up` or `spard migrate`.
    """
    settings = _embedded_settings()
    target, is_whole = settings.data_dir, saved.is_dir()
    database = saved / _DATABASE if is_whole else saved
    if not database.is_file():
        raise CommandFailed(f"{saved} holds no {_DATABASE}: name what `spard backup` wrote, or a database file.")
    _refuse_to_overwrite(target, saved if is_whole else None)
    target.mkdir(mode=0o700, parents=True, exist_ok=True)
    part = target / f".restoring-{token_hex(4)}"
    part.mkdir(mode=0o700)
    try:
        shutil.copyfile(database, part / _DATABASE)
        state = _check_schema(settings, part / _DATABASE)
        if is_whole:
            _copy(saved, part)
        # The database is moved last: a restore that breaks off leaves none, so no service starts on half a backup.
        for each in sorted(part.iterdir(), key=lambda path: path.name == _DATABASE):
            # `spard.db-wal` and `-shm` are left from checking the copy.
            if not each.name.startswith(f"{_DATABASE}-"):
                os.replace(each, target / each.name)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    then = "`spard migrate` brings it to this version; " if state == "behind" else ""
    found = f"restored {saved} to {target}. {then}compare with `spard objects check --data {target}`, then start it"
    _tell({"restored": str(target), "objects": _count(target), "schema": state}, found, as_json)


def _embedded_settings() -> Settings:
    """Return the settings of an embedded service; raise CommandFailed if it uses another database or storage."""
    from app.settings import read_settings

    settings = read_settings()
    if settings.database_url or settings.storage_url:
        raise CommandFailed(f"SPARD_DATABASE_URL or SPARD_STORAGE_URL is set: {_SERVERS}.")
    return settings


def _refuse_to_overwrite(target: Path, saved: Path | None) -> None:
    more = [_OBJECTS, *(each.name for each in saved.glob(_KEYS))] if saved else []
    for name in [_DATABASE, f"{_DATABASE}-wal", *more]:
        if (target / name).exists():
            text = f"{target / name} is there and is not overwritten: name an empty folder with --data, or move it away"
            raise CommandFailed(f"{text}.")


def _check_schema(settings: Settings, database: Path) -> str:
    """Return the schema state of a database copy: `current` or `behind`.

    Raises CommandFailed if the database is damaged, is not SPARD's, or has a newer schema than this version.
    """
    import sqlite3

    from pydantic import SecretStr

    from app.ops import preflight

    try:
        with closing(sqlite3.connect(database)) as connection:
            (found,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
            tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
    except sqlite3.DatabaseError as error:
        raise CommandFailed(f"The backup's database cannot be read: {error}.") from None
    if found != "ok":
        raise CommandFailed(f"The backup's database is damaged: {found}.")
    if "alembic_version" not in tables:
        raise CommandFailed("The backup's database is none of SPARD's.")
    state = preflight.schema_state(settings.model_copy(update={"database_url": SecretStr(f"sqlite:///{database}")}))
    if state == "ahead":
        raise CommandFailed("The backup's schema is newer than this version: install the version that made it.")
    return state


def _copy(source: Path, target: Path) -> None:
    """Copy objects and signing keys; an object that vanishes during the copy was deleted and is skipped."""
    if (source / _OBJECTS).is_dir():
        shutil.copytree(source / _OBJECTS, target / _OBJECTS, copy_function=_copy_if_there)
    for each in source.glob(_KEYS):
        shutil.copy2(each, target / each.name)


def _copy_if_there(source: str, target: str) -> str:
    try:
        return str(shutil.copy2(source, target))
    except FileNotFoundError:
        return target


@contextmanager
def _appearing(out: Path) -> Iterator[Path]:
    """Yield a temporary folder that is renamed to `out` if the block succeeds, and removed if it fails."""
    import sqlite3

    part = out.with_name(f".{out.name}.{token_hex(4)}")
    try:
        part.mkdir(mode=0o700, parents=True)
        yield part
        part.rename(out)
    except (OSError, sqlite3.Error) as error:
        raise CommandFailed(f"The backup cannot be written to {out}: {error}.") from None
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _count(folder: Path) -> int:
    return sum(each.is_file() for each in (folder / _OBJECTS).rglob("*"))


def _tell(facts: dict[str, object], text: str, as_json: bool) -> None:
    show_json(facts) if as_json else say(text)

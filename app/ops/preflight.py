"""Checks before API and workers start; each raises `Unfit` with one line that names the problem and its cure."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from secrets import token_hex
from urllib.parse import urlsplit

from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError

from app import db, objects
from app.broker_address import read_broker_address
from app.errors import Unfit
from app.settings import Settings, misspelled_variables
from app.storage import StorageError, open_storage
from spard.config import JudgeSpec

log = logging.getLogger(__name__)

_MIN_FREE_BYTES = 64 << 20
_HINTS = {  # backend -> hint for a database that cannot be used
    "postgresql": "Check SPARD_DATABASE_URL and that the server runs.",
    "sqlite": "Restore the file from a backup, or name another one with SPARD_DATA_DIR or SPARD_DATABASE_URL.",
}
_BAD_URL = "SPARD_DATABASE_URL is not supported: postgresql://user:password@host/name or sqlite:///path."


def check(settings: Settings) -> None:
    """Run all checks and raise `Unfit` for the first that fails; log warnings for risky or unknown settings."""
    check_judge(settings.judge, settings.judge_key)
    if is_at_openai(settings.judge):
        log.warning(AT_OPENAI)
    for name, like in misspelled_variables(settings).items():
        log.warning("%s is no setting and is ignored; %s is one", name, like)
    check_policy_keys(settings)
    check_measured(settings)
    check_broker(settings)
    check_folder(settings)
    check_schema(settings)
    check_writable(settings)
    check_storage(settings)


def check_policy_keys(settings: Settings) -> None:
    """Check that each API key for endpoints of policies has a list of URLs that it may be sent to."""
    for urls in settings.keys_without_addresses():
        key = urls.replace("_URLS", "_API_KEY")
        addresses = "the base_url of each endpoint that gets this key, as the policy has it, between commas"
        raise Unfit(f"{key} is set, but {urls} is not: set it to {addresses}, or unset the key.")


def check_measured(settings: Settings) -> None:
    """Check that the records of the judge's and the agent's errors are readable, if set: each job copies them."""
    for name in ("judge_errors", "agent_errors"):
        path: Path | None = getattr(settings, name)
        if path and not os.access(path, os.R_OK):
            raise Unfit(f"SPARD_{name.upper()} is {path}, where no file can be read: put it there, or unset it.")


def check_broker(settings: Settings) -> None:
    """Check that the broker's URL is valid, without connecting: a broker may start later than this process."""
    if settings.broker_url and not read_broker_address(settings.broker_url.get_secret_value()).verifies:
        log.warning("SPARD_BROKER_URL has ssl_cert_reqs=none: its password goes to whoever answers there")


def check_folder(settings: Settings) -> None:
    """Check that the data folder is writable and that its disk has room."""
    check_takes_files(settings.data_dir)


def check_takes_files(folder: Path) -> None:
    """Check that a folder, which is created if missing, is writable and that its disk has room."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        probe = folder / f".probe-{token_hex(4)}"
        try:
            probe.write_bytes(b"0")
        finally:
            probe.unlink(missing_ok=True)
        check_room(folder)
    except OSError as error:
        text = f"The folder {folder} cannot be used: {error.strerror}. Give it to the user that this process runs as,"
        raise Unfit(f"{text} or set SPARD_DATA_DIR to another one.") from None


def check_room(folder: Path) -> None:
    """Check that a folder's disk has at least 64 MiB free."""
    free = shutil.disk_usage(folder).free
    if free < _MIN_FREE_BYTES:
        needed = f"at least {_MIN_FREE_BYTES >> 20} MB are needed"
        text = f"The disk of {folder} is full: {free >> 20} MB are free, {needed}. Free some or set SPARD_DATA_DIR."
        raise Unfit(text)


def check_schema(settings: Settings) -> None:
    """Check that the database has the schema of this version."""
    state = schema_state(settings)
    if state != "current":
        raise Unfit(_SCHEMA[state])


def check_database(settings: Settings) -> None:
    """Check that the database exists, without creating one, and has the schema of this version."""
    path = _sqlite_file(settings)
    if path and not path.exists():
        raise Unfit(f"There is no database at {path}: name its place with SPARD_DATA_DIR or SPARD_DATABASE_URL.")
    check_schema(settings)


def check_writable(settings: Settings) -> None:
    """Check that an SQLite file is writable: a read-only one opens without an error, and then each write fails."""
    path = _sqlite_file(settings)
    if path and not os.access(path, os.W_OK):
        raise Unfit(f"The database {path} cannot be written. Give it to the user that this process runs as.")


def _sqlite_file(settings: Settings) -> Path | None:
    path = make_url(settings.database()).database if settings.is_embedded() else None
    return Path(path) if path else None


def schema_state(settings: Settings) -> db.SchemaState:
    """Return the state of the database's schema: `current`, `behind` or `ahead` of this version.

    Raises `Unfit` if the URL is not valid or the database does not answer.
    """
    try:
        url = make_url(settings.database())
    except ArgumentError:
        raise Unfit(_BAD_URL) from None
    if url.get_backend_name() not in _HINTS:
        raise Unfit(_BAD_URL)
    try:
        engine = db.make_engine(settings.database())
        try:
            if faults := db.session_faults(engine):
                raise Unfit(
                    f"The database {_hide_password(url)} ignores settings of transactions: {', '.join(faults)}."
                )
            return db.schema_state(engine)
        finally:
            engine.dispose()
    except (OSError, DBAPIError) as error:
        why = str(getattr(error, "orig", error)).strip().splitlines()[0]
        hint = _HINTS[url.get_backend_name()]
        raise Unfit(f"The database {_hide_password(url)} cannot be used: {why}. {hint}") from None


def _hide_password(url: URL) -> str:
    return url.render_as_string(hide_password=True)


def check_storage(settings: Settings) -> None:
    """Check that an object can be written and deleted, to find a missing or read-only bucket at the start."""
    hint = "Check SPARD_STORAGE_URL, SPARD_S3_ENDPOINT_URL and the credentials (AWS_...)."
    try:
        storage = open_storage(settings.storage(), settings.s3_endpoint_url)
        objects.probe(storage)
    except ValueError as error:
        raise Unfit(f"SPARD_STORAGE_URL is wrong. {error}") from None
    except (OSError, StorageError) as error:
        why = error.__cause__ or error
        raise Unfit(f"The storage {settings.storage()} cannot be used: {why}. {hint}") from None


_SCHEMA = {
    "behind": "The database's schema is older than this version: run `spard migrate`.",
    "ahead": "The database's schema is newer than this version: install the version that made it, or a newer one.",
}


# Check the settings of the configured judge, without asking it.

_MIN_MEMBERS = 2

AT_OPENAI = (
    "The judge is asked at api.openai.com, since no base_url is set: rows of customers and replies of their models are "
    "sent there. Set SPARD_JUDGE_BASE_URL (of a member, base_url) to https://api.openai.com/v1 if that is meant."
)

KeyOf = Callable[[JudgeSpec], str | None]  # returns the API key of a judge's endpoint, if one is set


def check_judge(judge: JudgeSpec, key_of: KeyOf) -> None:
    """Raise `Unfit` for the first missing or wrong setting of a judge."""
    _check(judge, key_of, lambda field: "SPARD_JUDGE" if field == "name" else f"SPARD_JUDGE_{field.upper()}")


def is_at_openai(judge: JudgeSpec) -> bool:
    """Return True if the judge, or a member of it, uses OpenAI's endpoint only because no base_url is set."""
    return any(each.name == "llm" and each.base_url is None for each in judge.with_members())


def _check(judge: JudgeSpec, key_of: KeyOf, setting: Callable[[str], str]) -> None:
    """Check a judge and its members; `setting` returns the name of the setting for a field."""
    match judge.name:
        case "llm":
            _check_endpoint(judge, key_of, setting)
        case "classifier" if judge.model == JudgeSpec().model:
            needed = f"set {setting('model')} to the folder or the hub id of its weights"
            raise Unfit(f"{setting('name')} is 'classifier', but no classifier is named: {needed}.")
        case "consensus" if len(judge.members) < _MIN_MEMBERS:
            needed = f"set {setting('members')} to a JSON list of at least {_MIN_MEMBERS}"
            raise Unfit(f"{setting('name')} is 'consensus' of {len(judge.members)} judges: {needed}.")
        case "consensus":
            for i, member in enumerate(judge.members):
                _check(member, key_of, _member_setting(f"{setting('members')}[{i}]"))
        case _:
            pass


def _member_setting(member: str) -> Callable[[str], str]:
    return lambda field: f"{member}.{field}"


def _check_endpoint(judge: JudgeSpec, key_of: KeyOf, setting: Callable[[str], str]) -> None:
    if judge.base_url is None:
        if key_of(judge) is None:
            needed = f"set {judge.api_key_env}, or {setting('base_url')} for another server"
            raise Unfit(f"{setting('name')} is 'llm', but OpenAI's endpoint needs a key: {needed}.")
        return
    url = urlsplit(judge.base_url)
    if url.scheme not in ("http", "https") or not url.hostname:
        raise Unfit(f"{setting('base_url')} is no URL of an endpoint, such as https://host/v1.")
    if url.username or url.password:
        raise Unfit(f"{setting('base_url')} holds a password, which jobs would keep: set {judge.api_key_env} instead.")

"""Checks of this machine: packages, GPU, port and sandbox, data folder and disk, and of database, storage and broker.

The clocks of the database and the storage are compared with this machine's.
"""

from __future__ import annotations

import fcntl
import os
import socket
import sqlite3
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

import httpx2
from redis import Redis
from redis.exceptions import RedisError
from sqlalchemy import Engine, make_url, select
from sqlalchemy.exc import DBAPIError

from app import db, objects
from app.broker_address import read_broker_address
from app.commands.data_folder import running_service
from app.commands.doctor import Finding, note, ok, problem
from app.errors import Unfit
from app.http.connections import SERVER, UNBOUNDED
from app.ops import gpus, preflight
from app.ops.children import environment
from app.ops.readiness import MOST_SKEW_S
from app.settings import Settings
from app.storage import S3Storage, StorageError, open_storage
from spard.config.cpu import multiplies_bfloat16
from spard.isolation import sandbox

_WORKER = ("torch", "transformers", "peft", "safetensors", "accelerate", "numpy")
_WAIT_S = 2.0
_USUAL_PORT = 8000
_THIS_MACHINE = ("127.0.0.1", "::1", "localhost", "0.0.0.0")  # noqa: S104 - what an address says, not what is bound


def machine_checks(settings: Settings, port: int | None) -> Iterator[Finding]:
    """Check versions, packages, GPU, port and sandbox."""
    yield versions()
    yield packages()
    yield gpu(settings)
    yield free_port(port or own_port(settings))
    yield isolation()


def versions() -> Finding:
    """Check that library and service have the same version."""
    found = {}
    for name in ("spard", "spard-service"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            return problem("versions", f"{name} is not installed as a package.", f"pip install {name}")
    if len(set(found.values())) > 1:
        shown = ", ".join(f"{name} {number}" for name, number in found.items())
        return problem("versions", f"{shown} do not belong together.", "install both of one version")
    return ok("versions", f"spard and spard-service {found['spard']}")


def packages() -> Finding:
    """Check that the packages that a worker needs are installed; a machine with only the API needs none."""
    missing = [name for name in _WORKER if find_spec(name) is None]
    if missing:
        cure = "pip install 'spard-service[worker]' where workers run; the API alone needs none of it"
        return problem("packages", f"No worker can train here: {', '.join(missing)} not installed.", cure)
    return ok("packages", "all that a worker needs is installed")


def gpu(settings: Settings) -> Finding:
    """Compare the settings with the GPUs that the driver shows; if torch is installed, run the GPU probe."""
    found = gpus.count()
    if settings.device == "cuda" and not found:
        cure = "install the NVIDIA driver, give the container a GPU, or set SPARD_DEVICE=cpu"
        return problem("gpu", "SPARD_DEVICE is cuda, but the driver shows no GPU.", cure)
    if settings.device != "cpu" and 0 < found < settings.gpus_per_job:
        cure = f"set SPARD_GPUS_PER_JOB to {found} at most, or give this machine more GPUs"
        return problem("gpu", f"A job is to have {settings.gpus_per_job} GPUs, and there are {found}.", cure)
    if settings.device != "cpu" and found and find_spec("torch") and not _computes(settings):
        cure = "install a torch for this driver, or a newer driver; `python -m worker.gpu_probe` shows the error"
        return problem("gpu", f"The driver shows {found} GPUs, and torch cannot compute there.", cure)
    return (
        ok("gpu", f"{found} GPUs")
        if found
        else note("gpu", f"none; workers here train on the CPU{_dtype_hint(settings)}")
    )


def _dtype_hint(settings: Settings) -> str:
    """Return the end of a sentence on the dtype of models on this CPU; empty if it is the right one or not known."""
    multiplies = multiplies_bfloat16()
    if multiplies and settings.cpu_dtype == "float32":
        return ", which is several times as fast in bfloat16: see SPARD_CPU_DTYPE"
    if multiplies is False and settings.cpu_dtype == "bfloat16":
        return ", which has no instructions for bfloat16: SPARD_CPU_DTYPE=float32 is faster"
    return ""


def _computes(settings: Settings) -> bool:
    return gpus.gpu_probe_succeeds(gpus.PROBE, environment(settings), settings.gpus_per_job, quiet=True)


def own_port(settings: Settings) -> int:
    """Return the port of the running service, else of SPARD_BASE_URL if that is this machine, else 8000."""
    running = running_service(settings.data_dir)
    for url in (running[0] if running else "", os.environ.get("SPARD_BASE_URL", "")):
        with suppress(ValueError):
            parts = urlsplit(url)
            if parts.hostname in _THIS_MACHINE and parts.port:
                return parts.port
    return _USUAL_PORT


def free_port(port: int) -> Finding:
    """Check that the port of `spard up` is free, or that a SPARD service listens on it."""
    try:
        with socket.create_server(("127.0.0.1", port)):
            return ok("port", f"{port} is free")
    except OSError as error:
        try:
            if httpx2.get(f"http://127.0.0.1:{port}/healthz", timeout=_WAIT_S).json() == {"status": "ok"}:
                return _listening(port)
        except (httpx2.TransportError, ValueError):
            pass
        cure = "stop the other program, or start with `spard up --port PORT`"
        return problem("port", f"Something else listens on {port}: {error.strerror}.", cure)


def _listening(port: int) -> Finding:
    """Check that the service on a port limits its connections."""
    with suppress(httpx2.TransportError, ValueError, AttributeError):
        ready = httpx2.get(f"http://127.0.0.1:{port}/readyz", timeout=_WAIT_S).json()
        if UNBOUNDED in ready.get("warnings", ()):
            return problem("port", f"The service on {port}: {UNBOUNDED}", f"add --http {SERVER} to its start line")
    return ok("port", f"a SPARD service listens on {port}")


def isolation() -> Finding:
    """Check which sandbox this machine supports for jobs."""
    found = sandbox.find_sandbox()
    if found.kind == "none":
        cure = "run workers on Linux 5.13 or newer, and let the container make user namespaces"
        return problem("sandbox", f"Jobs run without isolation; missing: {'; '.join(found.missing)}.", cure)
    text = f"jobs are isolated by {found.kind}"
    return note("sandbox", f"{text}, without {'; '.join(found.missing)}") if found.missing else ok("sandbox", text)


def folder(settings: Settings) -> Iterator[Finding]:
    """Check the data folder, its permissions and the free disk space, without creating it."""
    path = settings.data_dir
    if not path.is_dir():
        cure = "`spard up --data FOLDER` makes one; else set SPARD_DATA_DIR to the folder that the service has"
        yield problem("folder", f"There is no folder {path}.", cure)
        return
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        yield problem("folder", f"{path} cannot be written by this user.", f"chown or chmod u+rwx {path}")
        return
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & (stat.S_IRWXO | stat.S_IWGRP):
        yield problem("folder", f"Other users of this machine can open {path} (mode {mode:o}).", f"chmod 700 {path}")
    else:
        yield ok("folder", f"{path} is there, and this user's")
    try:
        preflight.check_room(path)
        yield ok("disk", "has room")
    except Unfit as error:
        yield problem("disk", error.message, "free some, or move the folder and set SPARD_DATA_DIR")
    yield leftovers(settings)


def leftovers(settings: Settings) -> Finding:
    """Check for job folders that killed workers have left."""
    found = [each for each in settings.work_dir().glob("*") if each.is_dir() and _is_left(each)]
    if found:
        cure = f"start a worker, which removes them; or, while none runs, delete what is below {settings.work_dir()}"
        return problem("leftovers", f"{len(found)} folders of jobs have a lock that no worker holds.", cure)
    return ok("leftovers", "no folders left by killed workers")


def _is_left(job: Path) -> bool:
    lock = job / "lock"
    try:
        with lock.open("rb") as file:
            # A live worker holds this lock; closing the file releases it again.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
    except OSError:  # held by a worker, or there is none
        return False


def database(settings: Settings) -> Iterator[Finding]:
    """Check that the database answers, has this version's schema, accepts writes, and has a correct clock."""
    url = make_url(settings.database())
    shown = url.render_as_string(hide_password=True)
    server = "check SPARD_DATABASE_URL, its password, and that the server runs and lets this machine in"
    if settings.is_embedded() and not _has_database(settings):
        cure = "`spard up` makes one; else name its place with SPARD_DATA_DIR or SPARD_DATABASE_URL"
        yield problem("database", f"There is no database at {url.database}.", cure)
        return
    try:
        state = preflight.schema_state(settings)
    except Unfit as error:
        yield problem("database", error.message, server)
        return
    yield ok("database", f"{shown} answers")
    match state:
        case "current":
            yield ok("schema", "is that of this version")
        case "behind":
            yield problem("schema", "The schema is older than this version.", "back up, and run `spard migrate`")
        case "ahead":
            text = "The schema is newer than this version."
            yield problem("schema", text, "install the version that made it, or a newer one")
    if settings.is_embedded() and url.database:
        yield _sqlite_writes(Path(url.database))
    if not settings.is_embedded():
        yield from _pooler(settings)
    yield _clock_of_database(settings)


def _pooler(settings: Settings) -> Iterator[Finding]:
    engine = db.make_engine(settings.database())
    try:
        if db.is_pooled(engine):
            text = "the database is behind a pooler: timeouts are set per transaction, statements are not prepared"
            yield note("pooler", text)
    except DBAPIError as error:
        yield problem("pooler", f"The database cannot be queried: {error.orig}.", "check the database's own log")
    finally:
        engine.dispose()


def _has_database(settings: Settings) -> bool:
    path = make_url(settings.database()).database
    return path is None or Path(path).exists()


def _sqlite_writes(path: Path) -> Finding:
    try:
        with sqlite3.connect(path, timeout=_WAIT_S, isolation_level=None) as connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("ROLLBACK")
    except sqlite3.Error as error:
        if "readonly" in str(error) or not os.access(path, os.W_OK):
            return problem("writes", f"{path} is read-only.", f"chmod u+w {path} and its folder, as the service's user")
        cure = f"find who holds it (fuser {path}) and end it, or wait until a backup has finished"
        return problem("writes", f"Another process holds the database's lock: {error}.", cure)
    return ok("writes", "the database accepts them")


def _clock_of_database(settings: Settings) -> Finding:
    engine = db.make_engine(settings.database())
    try:
        with db.read(engine) as session:
            theirs = float(session.execute(select(db.now())).scalar_one())
    except DBAPIError as error:
        return problem("database clock", f"It cannot be read: {error.orig}.", "check the database's own log")
    finally:
        engine.dispose()
    return _clock("database clock", theirs - time.time())


def _clock(name: str, ahead_s: float) -> Finding:
    if abs(ahead_s) > MOST_SKEW_S:
        cure = "synchronize the clocks of both machines (chrony, systemd-timesyncd)"
        return problem(name, f"It is {ahead_s:+.0f} s from this machine's.", cure)
    return ok(name, "agrees with this machine's")


def storage(settings: Settings) -> Iterator[Finding]:
    """Check the storage by writing, reading and deleting an object; also the bucket's versioning and clock."""
    cure = "check SPARD_STORAGE_URL, SPARD_S3_ENDPOINT_URL, the credentials (AWS_...) and who may write there"
    try:
        store = open_storage(settings.storage(), settings.s3_endpoint_url)
        objects.probe(store)
        next(iter(store.list()), None)
    except (ValueError, OSError, StorageError) as error:
        text = f"{settings.storage()} does not store, return and delete an object: {error.__cause__ or error}."
        yield problem("storage", text, cure)
    else:
        yield ok("storage", f"{settings.storage()} stores, returns and deletes objects")
        if isinstance(store, S3Storage) and store.keeps_deleted():
            text = "The bucket keeps versions, so files that customers delete stay in it."
            cure = "suspend its versioning and delete older versions, or have a lifecycle rule delete them"
            yield problem("versions", text, cure)
    if settings.s3_endpoint_url:
        yield _clock_of_storage(settings.s3_endpoint_url)


def _clock_of_storage(url: str) -> Finding:
    try:
        said = httpx2.head(url, timeout=_WAIT_S).headers.get("date", "")
        theirs = parsedate_to_datetime(said)
    except (httpx2.TransportError, httpx2.InvalidURL, ValueError, TypeError):
        return note("storage clock", "the storage sends no time to compare")
    return _clock("storage clock", (theirs - datetime.now(UTC)).total_seconds())


def broker(settings: Settings) -> Finding:
    """Check that the broker answers, if SPARD_BROKER_URL is set, and that its certificate is verified."""
    if settings.broker_url is None:
        return note("broker", "none is set: workers poll, and each API process counts its own requests")
    try:
        address = read_broker_address(settings.broker_url.get_secret_value())
        with Redis.from_pool(address.open_pool(_WAIT_S)) as redis:
            redis.ping()
    except Unfit as error:
        return problem("broker", error.message, "correct SPARD_BROKER_URL; API and workers do not start with it")
    except (RedisError, OSError) as error:
        cure = "start Redis or Valkey, or correct SPARD_BROKER_URL; until then workers poll"
        return problem("broker", f"It does not answer: {type(error).__name__}.", cure)
    if not address.verifies:
        cure = "take ssl_cert_reqs=none out of SPARD_BROKER_URL; for a certificate of your own, set ssl_ca_certs"
        return problem("broker", "It answers, but its certificate is not verified.", cure)
    return ok("broker", "answers")


def store_checks(settings: Settings) -> Iterator[Finding]:
    """Check the folder, the disk, the database, the storage, the broker and their clocks."""
    yield from folder(settings)
    if settings.is_embedded() and not settings.data_dir.is_dir():
        return  # an embedded service keeps everything in that folder
    yield from database(settings)
    if settings.is_embedded() and not _has_database(settings):
        return  # nothing was stored yet
    yield from storage(settings)
    yield broker(settings)


def checked_engine(settings: Settings) -> Engine | None:
    """Return an engine for the checks that read rows; None unless the database has this version's schema."""
    try:
        preflight.check_database(settings)
    except Unfit:
        return None
    return db.make_engine(settings.database())

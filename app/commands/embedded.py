"""The embedded mode: run the whole service on one machine by one command, without any other server.

`spard up` serves until it is stopped; `spard up --detach` starts the service in the background, and `spard down` stops
it. While a service runs it locks the file `up.lock` in the data folder, which holds its address and process id.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import httpx2
import uvicorn
from sqlalchemy.exc import DBAPIError

from app import db, keys
from app.catalog.checklist import Point, checklist, open_points
from app.commands import data_folder
from app.commands.data_folder import lock_folder
from app.commands.terminal import CommandFailed, say, say_in_box
from app.http.connections import BoundedHttp
from app.main import served_app
from app.ops import logs, preflight
from app.ops.processes import python
from app.ops.supervisor import Supervisor
from app.settings import Settings
from app.signing import signing_key

_DRAIN_S = 5  # how long open connections may last when the service stops
LOG = "up.log"
START_S = 120.0  # a service has to answer within that time, even on a busy machine
_LOOK_S = 0.2


def serve(settings: Settings, host: str, port: int, *, with_worker: bool) -> None:
    """Prepare database, storage and first key, and serve until SIGINT or SIGTERM; `port` 0 picks a free port.

    Raises CommandFailed if another service runs on the folder, or the port is taken.
    """
    preflight.check_folder(settings)
    with lock_folder(settings.data_dir) as lock:
        listener = listen(host, port)
        url = _url(*listener.getsockname()[:2])
        lock.write(f"{url}\n{os.getpid()}\n")
        lock.flush()
        logs.set_up(settings.log_format)
        if settings.log_format == "text":  # for a person, who reads the box of `announce` instead
            logs.quiet("alembic", "uvicorn.error")
        secret = prepare(settings)
        announce(settings, secret, url, unfinished_points(settings))
        _run(settings, listener, with_worker=with_worker)
    say("stopped")


def _run(settings: Settings, listener: socket.socket, *, with_worker: bool) -> None:
    app = served_app(settings)
    config = uvicorn.Config(app, http=BoundedHttp, log_config=None, timeout_graceful_shutdown=_DRAIN_S)
    server = uvicorn.Server(config)
    _stop_on_signals(server)
    if with_worker:
        with Supervisor("worker", settings.stop_grace_s) as app.state.worker:
            server.run(sockets=[listener])
    else:
        server.run(sockets=[listener])


def migrate(settings: Settings) -> db.SchemaState:
    """Upgrade an older database schema and return its state: `current`, or `ahead` if it is newer than this version.

    A newer schema is left alone, because only the version that made it can downgrade it. Raises CommandFailed if the
    migration fails.
    """
    state = preflight.schema_state(settings)
    if state == "behind":
        try:
            db.upgrade_schema(settings.database())
        except DBAPIError as error:
            raise CommandFailed(f"The database cannot be migrated: {error.orig}") from None
    return "ahead" if state == "ahead" else "current"


def listen(host: str, port: int) -> socket.socket:
    """Return a listening TCP socket with TCP_NODELAY, so that small answers are sent at once.

    asyncio sets that option only on sockets with an explicit protocol, which `create_server` does not give. Raises
    CommandFailed if the port is taken.
    """
    try:
        listener = socket.create_server((host, port), backlog=2048)
    except OSError as error:
        message = f"Cannot listen on {host}:{port}: {error.strerror}. Another service may run there; try --port."
        raise CommandFailed(message) from None
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # accepted sockets inherit it
    return listener


def prepare(settings: Settings) -> str | None:
    """Migrate the database, check the settings, create signing key and first key; return a new first key's secret.

    Returns None if there was a key before.
    """
    migrate(settings)
    preflight.check(settings)
    signing_key(settings)  # created here, before API and worker could each create one
    given = settings.admin_key.get_secret_value() if settings.admin_key else None
    engine = db.make_engine(settings.database())
    with db.transaction(engine) as session:
        secret = keys.ensure_first(session, given)
    engine.dispose()
    return secret


def _url(host: str, port: int) -> str:
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def unfinished_points(settings: Settings) -> list[Point]:
    """Return the points of the checklist that the provider still has to work on."""
    engine = db.make_engine(settings.database())
    try:
        with db.read(engine) as session:
            return open_points(checklist(session, settings))
    finally:
        engine.dispose()


def announce(
    settings: Settings, secret: str | None, url: str, points: Sequence[Point], where: str = "in another terminal"
) -> None:
    """Print the address, a new first key, the unfinished points and the next commands; `where` names their terminal."""
    facts = {
        "address": f"{url}/v1",
        "dashboard": f"{url}/",
        "first key": f"{secret}\nshown only once: keep it" if secret else "",
        "all fields": f"{url}/docs",
        "data": str(settings.data_dir),
    }
    say_in_box("SPARD is listening", facts)
    say(f"Go on {where}:\n  export SPARD_BASE_URL={url}/v1 SPARD_API_KEY={secret or 'YOUR_KEY'}")
    if points:
        say(f"Left to do, as {url}/provider and `spard doctor` show it too:")
    for point in points:
        say(f"  {point.state:8} {point.text}\n           {point.cure}")
    say("Then:\n  spard jobs create --model NAME --file TRAIN.jsonl --follow")


def _stop_on_signals(server: uvicorn.Server) -> None:
    """Make SIGINT and SIGTERM stop the server.

    While it serves, uvicorn handles these signals itself, and raises them again when it has stopped; without these
    handlers they end the process before it has cleaned up.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        server.should_exit = True

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)


def start_detached(settings: Settings, host: str, port: int, *, with_worker: bool) -> subprocess.Popen[bytes]:
    """Start the service in the background, wait until it answers, print its address, and return its process.

    The first key is printed here, never in the log. The service keeps running when this process ends. Raises
    CommandFailed, with the end of the log, if the service does not start.
    """
    preflight.check_folder(settings)
    with data_folder.lock_folder(settings.data_dir):
        secret = prepare(settings)
    log = settings.data_dir / LOG
    command = [*python("spard.commands"), "up", "--data", str(settings.data_dir), "--host", host, "--port", str(port)]
    command += [] if with_worker else ["--no-worker"]
    with os.fdopen(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "wb") as out:
        begins = out.tell()  # the log is appended to; an error shows only what this start has written
        process = subprocess.Popen(  # noqa: S603 - our own module
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )
    url = _answering(settings.data_dir, process, time.monotonic() + START_S)
    if url is None:
        process.terminate()
        process.wait()
        key = f" Its first key was made and is shown only once: {secret}" if secret else ""
        raise CommandFailed(f"The service did not start; {log} ends with:\n{_end(log, begins)}{key}")
    announce(settings, secret, url, unfinished_points(settings), "here")
    say(f"\nIt runs in the background and writes to {log}. Stop it with:\n  spard down --data {settings.data_dir}")
    return process


def stop(folder: Path, timeout_s: float) -> None:
    """Stop the service of a data folder and wait until it has ended; its running jobs continue at the next start.

    Raises CommandFailed if none runs, or if it has not ended after `timeout_s` seconds.
    """
    running = data_folder.running_service(folder)
    if running is None:
        raise CommandFailed(f"No service runs on {folder}; name the folder that `spard up` was given with --data.")
    url, process_id = running
    if process_id is None:
        raise CommandFailed(f"The service on {folder} is just starting, or is of an earlier version. Try again.")
    os.kill(process_id, signal.SIGTERM)
    until = time.monotonic() + timeout_s
    while data_folder.running_service(folder) is not None:
        if time.monotonic() > until:
            message = f"The service at {url} has not ended after {timeout_s:g} s: it waits for its jobs to save"
            raise CommandFailed(
                f"{message} what they have done. Wait with a longer --timeout, or end process {process_id}."
            )
        time.sleep(_LOOK_S)
    say(f"The service at {url} has ended; its data stays in {folder}.")


def _answering(folder: Path, process: subprocess.Popen[bytes], until: float) -> str | None:
    """Wait until a started service answers and return its address; None if it ends first, or on timeout."""
    while process.poll() is None and time.monotonic() < until:
        running = data_folder.running_service(folder)
        if running and running[1] == process.pid and _is_answering(running[0]):
            return running[0]
        time.sleep(_LOOK_S)
    return None


def _is_answering(url: str) -> bool:
    try:
        return httpx2.get(f"{url}/healthz", timeout=5).status_code == 200
    except httpx2.HTTPError:
        return False


def _end(log: Path, begins: int) -> str:
    """Return the last 10 lines of a log, from byte `begins` on."""
    with log.open(encoding="utf-8", errors="replace") as lines:
        lines.seek(begins)
        return "".join(lines.readlines()[-10:])

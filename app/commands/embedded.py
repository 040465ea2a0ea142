"""The embedded mode: run the whole service on one machine by one command, without any other server."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Sequence
from types import FrameType

import uvicorn
from sqlalchemy.exc import DBAPIError

from app import db
from app.catalog.checklist import Point, checklist, open_points
from app.commands.folder_lock import lock_folder
from app.commands.terminal import CommandFailed, say, say_in_box
from app.http.connections import BoundedHttp
from app.keys import service as keys
from app.main import served_app
from app.ops import logs, preflight
from app.ops.supervisor import Supervisor
from app.settings import Settings
from app.signing import signing_key

_DRAIN_S = 5  # how long open connections may last when the service stops


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
    """Return what the provider has still to do, by the checklist."""
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

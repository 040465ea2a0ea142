"""The embedded mode: the whole service on one machine, started by one command, without other servers."""

from __future__ import annotations

import os
import signal
import socket
from types import FrameType

import uvicorn
from sqlalchemy.exc import DBAPIError

from app import db
from app.commands.folder_lock import lock_folder
from app.commands.terminal import CommandFailed, say, say_in_box
from app.http.connections import BoundedHttp
from app.keys import service as keys
from app.main import served_app
from app.ops import logs, preflight
from app.ops.supervisor import Supervisor
from app.settings import Settings
from app.signing import signing_key

_DRAIN_S = 5  # open connections when the service stops


def serve(settings: Settings, host: str, port: int, *, with_worker: bool) -> None:
    """Prepare database, storage and first key, and serve until SIGINT or SIGTERM; `port` 0 takes a free one."""
    preflight.check_folder(settings)
    with lock_folder(settings.data_dir) as lock:
        listener = listen(host, port)
        url = _url(*listener.getsockname()[:2])
        lock.write(f"{url}\n{os.getpid()}\n")
        lock.flush()
        logs.set_up(settings.log_format)
        if settings.log_format == "text":  # for a person, who is told in a box that all is well
            logs.quiet("alembic", "uvicorn.error")
        announce(settings, prepare(settings), url)
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
    """Upgrade an older schema; a newer one is left as it is, for only the version that made it can take it back.

    Return how the schema stands to this version's.
    """
    state = preflight.schema_state(settings)
    if state == "behind":
        try:
            db.upgrade_schema(settings.database())
        except DBAPIError as error:
            raise CommandFailed(f"The database cannot be migrated: {error.orig}") from None
    return "ahead" if state == "ahead" else "current"


def listen(host: str, port: int) -> socket.socket:
    """Return a listening TCP socket whose connections send small answers at once (TCP_NODELAY).

    asyncio sets the option only on sockets that were made with an explicit protocol, which `create_server` does not.
    """
    try:
        listener = socket.create_server((host, port), backlog=2048)
    except OSError as error:
        message = f"Cannot listen on {host}:{port}: {error.strerror}. Another service may run there; try --port."
        raise CommandFailed(message) from None
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # accepted sockets inherit it
    return listener


def prepare(settings: Settings) -> str | None:
    """Make the database ready; return the secret of the first key if it was made just now."""
    migrate(settings)
    preflight.check(settings)
    signing_key(settings)  # made before anything starts that signs
    given = settings.admin_key.get_secret_value() if settings.admin_key else None
    engine = db.make_engine(settings.database())
    with db.transaction(engine) as session:
        secret = keys.ensure_first(session, given)
    engine.dispose()
    return secret


def _url(host: str, port: int) -> str:
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def announce(settings: Settings, secret: str | None, url: str, where: str = "in another terminal") -> None:
    """Show the address, the first key if it was made just now, and what to do next."""
    facts = {
        "address": f"{url}/v1",
        "dashboard": f"{url}/",
        "first key": f"{secret}\nshown only once: keep it" if secret else "",
        "all fields": f"{url}/docs",
        "data": str(settings.data_dir),
    }
    say_in_box("SPARD is listening", facts)
    say(
        f"Go on {where}:\n"
        f"  export SPARD_BASE_URL={url}/v1 SPARD_API_KEY={secret or 'YOUR_KEY'}\n"
        "  spard models add NAME FOLDER_OR_HUB_ID\n"
        "  spard pool import POOL.jsonl --name general-safe\n"
        "  spard suites import SUITE.jsonl --name general-harm --kind harmful\n"
        "  spard jobs create --model NAME --file TRAIN.jsonl --follow"
    )


def _stop_on_signals(server: uvicorn.Server) -> None:
    """While it serves, the server listens to these signals itself, and raises them again when it has stopped."""

    def stop(number: int, frame: FrameType | None) -> None:
        server.should_exit = True

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)

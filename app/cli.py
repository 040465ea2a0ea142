"""spard: start the service, and use it from a terminal."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
import uvicorn
from openai import APIConnectionError, APIStatusError, AuthenticationError
from rich.console import Console
from sqlalchemy.exc import DBAPIError

from app import db, logs, preflight
from app.commands import trust
from app.commands.audit_log import audit_log
from app.commands.catalog import models, pool, suites
from app.commands.files import files
from app.commands.jobs import jobs
from app.commands.keys import create_key
from app.commands.terminal import CommandFailed, say, service_url
from app.errors import AppError
from app.keys import service as keys
from app.main import served_app
from app.settings import Settings
from app.signing import signing_key
from app.supervisor import supervised

cli = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)
for name, group in (("models", models), ("pool", pool), ("suites", suites), ("files", files), ("jobs", jobs)):
    cli.add_typer(group, name=name)
trust.keys.command("create")(create_key)
cli.add_typer(trust.keys, name="keys")
cli.add_typer(audit_log, name="audit-log")
cli.command()(trust.verify)

_PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}  # to another module
_DRAIN_S = 5  # open connections when the service stops


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; what goes wrong is one line and exit code 1."""
    try:
        cli(list(sys.argv[1:] if arguments is None else arguments))
    except (CommandFailed, AppError) as error:
        _fail(str(error))
    except AuthenticationError:
        _fail(f"{service_url()} does not know this key; check SPARD_API_KEY.")
    except APIConnectionError:
        _fail(f"Nothing answers at {service_url()}; start it with `spard up`, or set SPARD_BASE_URL.")
    except APIStatusError as error:
        body = error.body if isinstance(error.body, dict) else {}
        _fail(str(body.get("message") or error))


@cli.command()
def up(
    data: Annotated[Path, typer.Option(help="Folder of the database, the files and the caches.")] = Path("data"),
    port: Annotated[int, typer.Option(help="0 takes a free one.", min=0, max=65535)] = 8000,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    worker: Annotated[bool, typer.Option(help="Also train, in a process of its own.")] = True,
) -> None:
    """Start the whole service on this machine; Ctrl-C stops it."""
    if worker and importlib.util.find_spec("torch") is None:
        raise CommandFailed("Training needs torch: pip install 'spard[worker]', or start with --no-worker.")
    os.environ["SPARD_DATA_DIR"] = str(data.resolve())  # the worker reads it too
    settings = Settings()
    logs.set_up(settings.log_format)
    listener = _listen(host, port)
    _announce(settings, _prepared(settings), *listener.getsockname()[:2])
    config = uvicorn.Config(served_app(settings), log_config=None, timeout_graceful_shutdown=_DRAIN_S)
    server = uvicorn.Server(config)
    _stop_on_signals(server)
    with supervised("worker", settings.stop_grace_s) if worker else nullcontext():
        server.run(sockets=[listener])
    say("stopped")


@cli.command()
def migrate() -> None:
    """Bring the database of SPARD_DATABASE_URL, or of SPARD_DATA_DIR, to this version's schema."""
    _migrate(Settings())
    say("the schema is current")


@cli.command(context_settings=_PASSED_ON)
def lab(context: typer.Context) -> None:
    """Make the tiny aligned model with its data; see `spard lab --help`."""
    _become("spard.lab", context.args)


@cli.command(context_settings=_PASSED_ON)
def bench(context: typer.Context) -> None:
    """Run the paper's tables and figures on any model or on the lab's; see `spard bench --help`."""
    _become("spard.bench", context.args)


@cli.command(context_settings=_PASSED_ON)
def audit(context: typer.Context) -> None:
    """Measure any model's safety and utility, without the service; see `spard audit --help`."""
    _become("spard.audit_cli", context.args)


def _become(module: str, arguments: Sequence[str]) -> None:
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])  # noqa: S606 - the user's own, to our module


def _listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), backlog=2048)
    except OSError as error:
        message = f"Cannot listen on {host}:{port}: {error.strerror}. Another service may run there; try --port."
        raise CommandFailed(message) from None


def _migrate(settings: Settings) -> None:
    """A newer schema is left as it is: only the version that made it can take it back."""
    if preflight.schema_state(settings) == "behind":
        try:
            db.upgrade_schema(settings.database())
        except DBAPIError as error:
            raise CommandFailed(f"The database cannot be migrated: {error.orig}") from None


def _prepared(settings: Settings) -> str | None:
    """The database made ready; the secret of the first key, if it was made just now."""
    preflight.check_folder(settings)
    _migrate(settings)
    preflight.check(settings)
    signing_key(settings)  # made before anything starts that signs
    given = settings.admin_key.get_secret_value() if settings.admin_key else None
    engine = db.make_engine(settings.database())
    with db.transaction(engine) as session:
        secret = keys.ensure_first(session, given)
    engine.dispose()
    return secret


def _announce(settings: Settings, secret: str | None, host: str, port: int) -> None:
    address = f"[{host}]" if ":" in host else host
    say(f"SPARD listens on http://{address}:{port}/v1 and keeps its data in {settings.data_dir}")
    if secret:
        say(f"The first key, shown this once:\n\n  {secret}\n")
    say(
        "Go on in another terminal:\n"
        f"  export SPARD_BASE_URL=http://{address}:{port}/v1 SPARD_API_KEY={secret or 'YOUR_KEY'}\n"
        "  spard models add NAME FOLDER_OR_HUB_ID\n"
        "  spard pool import POOL.jsonl --name general-safe\n"
        "  spard jobs create --model NAME --file TRAIN.jsonl --follow"
    )


def _stop_on_signals(server: uvicorn.Server) -> None:
    """While it serves, the server listens to these signals itself, and raises them again when it has stopped."""

    def stop(number: int, frame: FrameType | None) -> None:
        server.should_exit = True

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)


def _fail(message: str) -> None:
    Console(stderr=True, highlight=False, soft_wrap=True).print(f"spard: {message}", markup=False, style="red")
    sys.exit(1)


if __name__ == "__main__":
    main()

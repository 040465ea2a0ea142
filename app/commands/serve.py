"""`spard up`, `spard down` and `spard migrate`: start and stop the service on this machine, migrate its database."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Annotated

import typer

from app.commands.data_folder import Data
from app.commands.terminal import CommandFailed, Json, say, show_json


def up(
    data: Annotated[Path, typer.Option(help="Folder of the database, the files and the caches.")] = Path("data"),
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.", min=0, max=65535)] = 8000,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    worker: Annotated[bool, typer.Option(help="Also start a worker, in its own process.")] = True,
    detach: Annotated[bool, typer.Option("--detach", help="Start the service in the background and return.")] = False,
) -> None:
    """Start the whole service on this machine; stop it with Ctrl-C, or with `spard down` if it was embedded."""
    if worker and importlib.util.find_spec("torch") is None:
        raise CommandFailed("Training needs torch: pip install 'spard-service[worker]', or start with --no-worker.")
    os.environ["SPARD_DATA_DIR"] = str(data.resolve())  # the worker reads it too
    from app.commands import embedded  # imports the whole server
    from app.settings import read_settings

    begin = embedded.start_detached if detach else embedded.serve
    begin(read_settings(), host, port, with_worker=worker)


def down(
    data: Annotated[Path, typer.Option(help="The data folder of the running `spard up`.")] = Path("data"),
    timeout: Annotated[float, typer.Option(help="Seconds to wait for the service to stop.", min=0)] = 120.0,
) -> None:
    """Stop the service that runs on a folder, and wait for its end; jobs continue at the next start."""
    from app.commands import embedded

    embedded.stop(data.resolve(), timeout)


def migrate(data: Data = None, as_json: Json = False) -> None:
    """Migrate the database of SPARD_DATABASE_URL, or of SPARD_DATA_DIR, to this version's schema."""
    from app.commands import embedded
    from app.settings import read_settings

    state = embedded.migrate(read_settings())
    if as_json:
        return show_json({"schema": state})
    is_newer = "the schema is newer than this version, and was left as it is"
    return say(is_newer if state == "ahead" else "the schema is current")

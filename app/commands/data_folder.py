"""The option `--data` of every command that works on the service's own folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer


def use_folder(folder: Path | None) -> Path | None:
    """Make a folder that was named the one that the settings read."""
    if folder is not None:
        os.environ["SPARD_DATA_DIR"] = str(folder.resolve())
    return folder


# A callback of the option, so that a command needs no line of its own for it.
Data = Annotated[
    Path | None,
    typer.Option("--data", callback=use_folder, help="The service's folder; default: SPARD_DATA_DIR, or data."),
]

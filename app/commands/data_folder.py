"""The option `--data` of the commands that work on the service's own folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer


def use_folder(folder: Path | None) -> Path | None:
    """Set SPARD_DATA_DIR, which the settings read, to the folder of `--data`, if it was given."""
    if folder is not None:
        os.environ["SPARD_DATA_DIR"] = str(folder.resolve())
    return folder


# The option's callback does the work, so commands need no line of their own for it.
Data = Annotated[
    Path | None,
    typer.Option(
        "--data", callback=use_folder, help="The service's data folder; default: SPARD_DATA_DIR, or else `data`."
    ),
]

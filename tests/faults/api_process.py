"""An API in a process of its own, that can be killed."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import uvicorn

from app.http.connections import BoundedHttp
from app.main import create_app
from app.settings import Settings
from tests.faults.storm_process import prepare


def serve(values: dict[str, Any], listener: socket.socket, lifespan: Literal["on", "off"] = "off") -> None:
    """Answer requests at an open socket until the process ends; with its `lifespan` on, do what an API does beside."""
    config = uvicorn.Config(create_app(Settings(**values)), http=BoundedHttp, log_config=None, lifespan=lifespan)
    uvicorn.Server(config).run(sockets=[listener])


def serve_in_storm(
    values: dict[str, Any], listener: socket.socket, folder: Path, environment: Mapping[str, str]
) -> None:
    """Do so with all that an API does beside, with the timers of a storm; its log and its full disk are in `folder`."""
    prepare(folder, environment, values["lease_s"])
    serve(values, listener, "on")

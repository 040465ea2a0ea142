"""An API in a process of its own, that can be killed."""

from __future__ import annotations

import socket
from typing import Any

import uvicorn

from app.main import create_app
from app.settings import Settings


def serve(values: dict[str, Any], listener: socket.socket) -> None:
    """Answer requests at an open socket until the process ends."""
    server = uvicorn.Server(uvicorn.Config(create_app(Settings(**values)), log_config=None, lifespan="off"))
    server.run(sockets=[listener])

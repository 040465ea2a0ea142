"""The protocol of engines, which write replies, and the factory that opens the engines of the settings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from sqlalchemy import Engine

from app.db import Begin
from app.inference.clients import Clients
from app.inference.embedded import Embedded
from app.inference.engine_process import Stream
from app.inference.protocol import Ask, Proof
from app.inference.released import Released
from app.settings import Settings
from app.storage import Storage

if TYPE_CHECKING:
    from app.inference.vllm_server import ServerWatch


class Engines(Protocol):
    """Writers of replies: embedded engines, a vLLM server, or servers that a policy names."""

    async def start(self, model: Released, project: str, ask: Ask) -> tuple[Stream, int, Proof | None]:
        """Begin a request; return its stream, the prompt's number of tokens, and a proof if an adapter was loaded.

        The proof is None if the adapter was loaded earlier. Raises an `AppError` if the request cannot be answered.
        """

    async def unload_withdrawn(self) -> None:
        """Make external servers unload the adapters of withdrawn models."""

    def pids(self) -> list[int]:
        """Return the ids of local engine processes."""

    def close(self) -> None:
        """End local engine processes."""


def open_engines(settings: Settings, storage: Storage, clients: Clients, begin: Begin) -> Engines:
    """Return embedded engines, or the vLLM server of `SPARD_SERVING_URL` if that is set."""
    own = Embedded(settings, storage)
    if settings.serving_url is None:
        return own
    from app.inference.vllm import Vllm  # imports openai, which embedded engines do not need

    return Vllm(settings, storage, own, clients, begin)


def server_watch(settings: Settings, engine: Engine, clients: Clients) -> ServerWatch | None:
    """Return the watch of the vLLM server; None with embedded engines."""
    if settings.serving_url is None:
        return None
    from app.inference.vllm_server import ServerWatch

    return ServerWatch(settings, engine, clients)

"""Whatever writes replies, as the settings name it."""

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
    from app.inference.vllm_limits import ServerWatch


class Engines(Protocol):
    """Whatever writes replies: engines of this process, or a server of the provider's."""

    async def start(self, model: Released, project: str, ask: Ask) -> tuple[Stream, int, Proof | None]:
        """Return the replies' stream and the number of the prompt's tokens; with a proof if the adapter was loaded."""

    async def unload_withdrawn(self) -> None:
        """Have servers that are not ours forget the adapters of models that were withdrawn."""

    def pids(self) -> list[int]:
        """Return the numbers of processes of ours that run for it."""

    def close(self) -> None:
        """End what runs for it."""


def open_engines(settings: Settings, storage: Storage, clients: Clients, begin: Begin) -> Engines:
    """Return the engines that the settings name."""
    own = Embedded(settings, storage)
    if settings.serving_url is None:
        return own
    from app.inference.vllm import Vllm  # imports the client of OpenAI, which others do not need

    return Vllm(settings, storage, own, clients, begin)


def server_watch(settings: Settings, engine: Engine, clients: Clients) -> ServerWatch | None:
    """Return what looks at the server that answers; None where engines of this process do."""
    if settings.serving_url is None:
        return None
    from app.inference.vllm_limits import ServerWatch

    return ServerWatch(settings, engine, clients)

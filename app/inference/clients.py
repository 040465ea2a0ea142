"""A pool of HTTP clients for OpenAI-compatible servers, one for each server and key.

Opening a client blocks the event loop for tens of milliseconds, so clients stay open and requests share them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from httpx2 import Limits

if TYPE_CHECKING:
    from openai import AsyncOpenAI

NO_KEY = "none"  # sent if a server needs no key, because the client requires one
_MOST = 16  # open clients at most; changed policies may name new servers again and again
_IDLE_S = 2.0  # then an idle connection is closed: before the server does, which could happen just as it is used


@dataclass(slots=True, eq=False)
class _SharedClient:
    client: AsyncOpenAI
    users: int = 0
    is_retired: bool = False


class Clients:
    """The open clients of a process by server URL and key; use them from one event loop only."""

    def __init__(self) -> None:
        self._held: OrderedDict[tuple[str, str], _SharedClient] = OrderedDict()  # least recently used first

    @asynccontextmanager
    async def open_client(self, url: str, key: str) -> AsyncIterator[AsyncOpenAI]:
        """Yield the client for a server and a key; it does not retry unless a request asks for retries."""
        held = self._held.get((url, key))
        if held is None:
            held = self._held[url, key] = _SharedClient(_open_client(url, key))
        self._held.move_to_end((url, key))
        held.users += 1
        try:
            if len(self._held) > _MOST:
                await self._retire(self._held.popitem(last=False)[1])
            yield held.client
        finally:
            held.users -= 1
            if held.is_retired:
                await self._retire(held)

    async def close(self) -> None:
        """Close all clients; requests that use one fail."""
        while self._held:
            await self._held.popitem()[1].client.close()

    async def _retire(self, held: _SharedClient) -> None:
        """Close a client that is out of the pool, now or after the last request that uses it."""
        held.is_retired = True
        if not held.users:
            await held.client.close()


def _open_client(url: str, key: str) -> AsyncOpenAI:
    from openai import AsyncOpenAI, DefaultAsyncHttpxClient  # half a second to import, and few services need it

    limits = Limits(max_connections=1000, max_keepalive_connections=100, keepalive_expiry=_IDLE_S)
    http = DefaultAsyncHttpxClient(limits=limits, follow_redirects=False)  # send bodies only to the named server
    return AsyncOpenAI(base_url=url, api_key=key, max_retries=0, http_client=http)

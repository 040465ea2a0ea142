"""Clients of servers of OpenAI's form, one for each server, which stay open as long as this process.

Opening one takes tens of milliseconds of the event loop's time; a request takes the one that is there.
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

NO_KEY = "none"  # what is sent where there is no key: the client wants one
_MOST = 16  # open ones; a policy may name other servers again and again
_IDLE_S = 2.0  # until an unused connection is closed: sooner than servers do it, who may close while one is taken


@dataclass(slots=True, eq=False)
class _Held:
    client: AsyncOpenAI
    users: int = 0
    is_retired: bool = False


class Clients:
    """By the servers' URLs and keys. All requests of a process use one event loop, and so do these."""

    def __init__(self) -> None:
        self._held: OrderedDict[tuple[str, str], _Held] = OrderedDict()  # the one used last comes last

    @asynccontextmanager
    async def open_client(self, url: str, key: str) -> AsyncIterator[AsyncOpenAI]:
        """Lend the client of a server and a key, which sends nothing a second time unless it is told to."""
        held = self._held.get((url, key))
        if held is None:
            held = self._held[url, key] = _Held(_open_client(url, key))
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
        """Close all; the requests that use one fail."""
        while self._held:
            await self._held.popitem()[1].client.close()

    async def _retire(self, held: _Held) -> None:
        """Lend a client no more; it is closed with the last request that uses it."""
        held.is_retired = True
        if not held.users:
            await held.client.close()


def _open_client(url: str, key: str) -> AsyncOpenAI:
    from openai import AsyncOpenAI, DefaultAsyncHttpxClient  # half a second to import, and few services need it

    limits = Limits(max_connections=1000, max_keepalive_connections=100, keepalive_expiry=_IDLE_S)
    http = DefaultAsyncHttpxClient(limits=limits, follow_redirects=False)  # bodies are for the named server alone
    return AsyncOpenAI(base_url=url, api_key=key, max_retries=0, http_client=http)

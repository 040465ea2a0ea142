"""Clients of other servers: one for a server and its key, closed when nobody uses it any more or the service ends."""

from __future__ import annotations

import asyncio

from openai import AsyncOpenAI

from app.inference.clients import _MOST, Clients

URL = "http://127.0.0.1:9/v1"


async def open_client(clients: Clients, url: str = URL, key: str = "sesame") -> AsyncOpenAI:
    async with clients.open_client(url, key) as client:
        return client


def test_a_server_has_one_until_all_are_closed() -> None:
    async def run() -> None:
        clients = Clients()
        found = [await open_client(clients) for _ in range(3)]
        assert found[0] is found[1] is found[2]
        other = await open_client(clients, "http://127.0.0.1:8/v1")
        assert other is not found[0]
        assert [client.is_closed() for client in (found[0], other)] == [False, False]
        await clients.close()
        assert [client.is_closed() for client in (found[0], other)] == [True, True]

    asyncio.run(run())


def test_another_key_opens_another() -> None:
    async def run() -> None:
        clients = Clients()
        old, new = await open_client(clients), await open_client(clients, key="new")
        assert (new is old, old.api_key, new.api_key) == (False, "sesame", "new")
        assert [await open_client(clients), await open_client(clients, key="new")] == [old, new]
        await clients.close()
        assert [old.is_closed(), new.is_closed()] == [True, True]

    asyncio.run(run())


def test_of_many_servers_the_one_used_least_lately_is_closed_when_nobody_uses_it() -> None:
    async def run() -> None:
        clients = Clients()
        async with clients.open_client(URL, "sesame") as used:
            others = [await open_client(clients, f"http://127.0.0.1:{port}/v1") for port in range(20, 21 + _MOST)]
            assert [client.is_closed() for client in (used, *others)] == [False, True] + [False] * _MOST
        assert used.is_closed()
        assert await open_client(clients) is not used
        await clients.close()
        assert all(client.is_closed() for client in others)

    asyncio.run(run())

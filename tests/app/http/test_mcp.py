"""`spard mcp` over standard input and output, asked by the official SDK's own client; the service behind it is real."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
from fastapi.testclient import TestClient

from app.commands import mcp_server
from tests.app.http.conftest import Service, rows

pytest.importorskip("mcp", reason="the extra mcp is not installed")

from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client

Ask = Callable[..., Awaitable[Any]]
Talk = Callable[[ClientSession, Ask], Awaitable[None]]


@pytest.fixture
def talk(service: Service, provider_with_model: TestClient, url: str, tmp_path: Path) -> Callable[..., None]:
    """Start `spard mcp` in a folder, and let a function ask it."""
    key = service.add_key("org-customer", "customer")
    environment = {**os.environ, "SPARD_BASE_URL": url, "SPARD_API_KEY": key}
    (tmp_path / "here").mkdir()

    def start(asks: Talk, *options: str) -> None:
        command = [os.fspath(Path(sys.executable)), "-m", "spard.commands", "mcp", *options]
        server = StdioServerParameters(command=command[0], args=command[1:], env=environment, cwd=tmp_path / "here")

        async def session() -> None:
            async with stdio_client(server) as (read, write), ClientSession(read, write) as asked:
                await asked.initialize()
                await asks(asked, lambda name, **arguments: _answer(asked, name, arguments))

        anyio.run(session)

    return start


async def _answer(session: ClientSession, name: str, arguments: dict[str, Any]) -> Any:
    result: Any = await session.call_tool(name, arguments)
    text = "".join(each.text for each in result.content)
    return f"error: {text}" if result.is_error else json.loads(text)


def test_reads_and_plans_are_offered_and_writes_are_not(
    talk: Callable[..., None], provider_with_model: TestClient
) -> None:
    async def asks(session: ClientSession, ask: Ask) -> None:
        tools = (await session.list_tools()).tools
        assert {each.name for each in tools} == {each.__name__ for each in mcp_server.READS}
        assert all(each.annotations and each.annotations.read_only_hint and each.description for each in tools)
        assert [each["id"] for each in (await ask("list_models"))["data"]] == ["lab/tiny-1"]
        assert (await ask("list_jobs"))["data"] == []
        assert "error" in str(await ask("create_job", model="lab/tiny-1", training_file="file-1"))
        assert (await ask("get_job", job_id="ftjob-none")).startswith("error: ")

    talk(asks)


def test_with_writes_an_agent_gets_from_a_file_to_a_job(talk: Callable[..., None], tmp_path: Path) -> None:
    (tmp_path / "here" / "train.jsonl").write_bytes(rows(12))
    (tmp_path / "secret.jsonl").write_bytes(rows(12))

    async def asks(session: ClientSession, ask: Ask) -> None:
        assert len((await session.list_tools()).tools) == len(mcp_server.READS) + len(mcp_server.WRITES)
        file = (await ask("upload_file", path="train.jsonl"))["id"]
        assert (await ask("check_file", file_id=file))["findings"] == []
        assert "warnings" in await ask("estimate_job", model="lab/tiny-1", training_file=file)
        settings = {"hyperparameters": {"n_epochs": 1}}
        job = await ask("create_job", model="lab/tiny-1", training_file=file, settings=settings)
        assert (await ask("get_job", job_id=job["id"]))["hyperparameters"]["n_epochs"] == 1
        assert (await ask("list_events", job_id=job["id"]))["data"]
        assert (await ask("get_verdict", job_id=job["id"]))["headline"]
        assert (await ask("get_report", job_id=job["id"])).startswith("error: ")
        assert (await ask("cancel_job", job_id=job["id"]))["status"] == "cancelled"
        assert "only files in there" in await ask("upload_file", path="../secret.jsonl")

    talk(asks, "--allow-writes")

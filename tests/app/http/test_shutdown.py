"""SIGTERM ends an API process soon, though clients follow jobs: they are told to come back."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fastapi.testclient import TestClient

from app.ops.processes import python
from tests import servers
from tests.app.http.conftest import JOBS
from tests.app.http.test_stream import PATIENCE_S, Reader, wait_until

ENDS_IN_S = 30.0  # a loaded machine's; without an end of the streams it would never be


@pytest.fixture
def process(sqlite_url: str, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """An API process on the test's own database, as it runs in production."""
    port = servers.free_port()
    environment = os.environ | {"SPARD_DATABASE_URL": sqlite_url, "SPARD_DATA_DIR": str(tmp_path)}
    command = python("uvicorn", "app.main:checked_app", "--factory", "--port", str(port))
    with subprocess.Popen(command, env=environment) as found:
        address = f"http://127.0.0.1:{port}"
        try:
            wait_until(lambda: found.poll() is not None or _is_healthy(address))
            yield found, address
        finally:
            found.kill()


def _is_healthy(address: str) -> bool:
    with suppress(httpx2.TransportError):
        return httpx2.get(f"{address}/healthz", timeout=PATIENCE_S).status_code == 200
    return False


def test_open_streams_end_with_the_process(
    customer: TestClient, job_body: dict[str, Any], process: tuple[subprocess.Popen[bytes], str]
) -> None:
    job = customer.post(JOBS, json=job_body).json()["id"]
    server, address = process
    readers = [Reader(f"{address}/v1", customer, job) for _ in range(3)]
    for reader in readers:
        reader.await_text("id: 3\n")
    server.send_signal(signal.SIGTERM)
    assert server.wait(ENDS_IN_S) in (0, -signal.SIGTERM)
    for reader in readers:
        reader.leave()
        assert reader.text.endswith(": the server stops; come back\nretry: 1000\n\n")

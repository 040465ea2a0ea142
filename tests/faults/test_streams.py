"""Streams that are opened and left: what they took of the API process comes back."""

from __future__ import annotations

import gc
import os
import socket
import struct
import threading
from glob import glob
from pathlib import Path
from urllib.parse import urlsplit

from fastapi.testclient import TestClient
from pydantic import SecretStr
from sqlalchemy import select

from app.db import read, transaction
from app.db.tables import ApiKey, Job, JobStatus
from app.jobs import stream
from app.main import create_app
from app.settings import Settings
from tests.app.http.conftest import Service, serve_app
from tests.app.parts import SPEC
from tests.worker.shop import wait_until

STREAMS = 200
_RESET = struct.pack("ii", 1, 0)


def sockets() -> int:
    """How many descriptors of this process are connections."""
    links = (os.readlink(path) for path in glob("/proc/self/fd/*") if os.path.islink(path))
    return sum(link.startswith("socket:") for link in links)


def entries() -> stream._Open:
    """What the poller of the event loop with the most streams has."""
    found = (each for each in gc.get_objects() if type(each) is stream._Open)
    return max(found, key=lambda each: len(each.followers))


def open_stream(url: str, job_id: str, secret: str) -> socket.socket:
    """Ask for a job's stream, and read its head."""
    where = urlsplit(url)
    connection = socket.create_connection((where.hostname or "", where.port or 0))
    head = f"GET /v1/fine_tuning/jobs/{job_id}/stream HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {secret}\r\n\r\n"
    connection.sendall(head.encode())
    assert connection.recv(15) == b"HTTP/1.1 200 OK"
    return connection


def test_streams_that_are_left_give_back_descriptors_threads_and_their_place(sqlite_url: str, tmp_path: Path) -> None:
    app = create_app(Settings(data_dir=tmp_path, database_url=SecretStr(sqlite_url), streams_at_once=STREAMS + 1))
    service = Service(app, TestClient(app))
    secret = service.add_key("org-customer", "customer")
    with read(app.state.engine) as session:
        key_id = session.scalars(select(ApiKey.id)).one()
    asked = {"model": "tiny", "training_file": "file-1", "recipe": {}, "spec": SPEC, "request_hash": "0"}
    with transaction(app.state.engine) as session:
        job = Job(project_id="org-customer", key_id=key_id, status=JobStatus.queued, **asked)
        session.add(job)
    slots = app.state.stream_slots
    with serve_app(app) as url:
        before, threads = sockets(), threading.active_count()
        connections = [open_stream(url, job.id, secret) for _ in range(STREAMS)]
        polled = entries()
        assert (slots._open["org-customer"], len(polled.followers)) == (STREAMS, STREAMS)
        assert sockets() >= before + 2 * STREAMS
        for i, connection in enumerate(connections):
            if i % 2:  # half of them without a farewell
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            connection.close()
        wait_until(lambda: not slots._open and not polled.followers)
        wait_until(lambda: sockets() <= before + 2)  # the event loop has a pair of its own
        assert threading.active_count() < threads + STREAMS // 2  # threads for requests stay, for the next ones
        open_stream(url, job.id, secret).close()
    app.state.engine.dispose()

"""A request's span, and the trace that its job goes on with."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from secrets import token_hex
from threading import Thread
from typing import Any

import pytest
from fastapi.testclient import TestClient

from app import db
from app.db.tables import Job
from tests import spans
from tests.app.http.conftest import JOBS, Service

ONE_SPAN = """
from app.ops import tracing
tracing.set_up("test")
with tracing.continue_trace("attempt", None, "ftjob-1", 1):
    print(tracing.traceparent())
"""


@dataclass
class Collector:
    url: str
    asked: list[str]


@pytest.fixture
def collector() -> Iterator[Collector]:
    """What takes spans over HTTP."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            asked.append(self.path)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield Collector(f"http://127.0.0.1:{server.server_address[1]}", asked)
        server.shutdown()


def test_a_job_carries_the_trace_of_its_request(
    service: Service, customer: TestClient, job_body: dict[str, Any]
) -> None:
    spans.exporter()
    trace_id, parent_id = token_hex(16), token_hex(8)
    answer = customer.post(JOBS, json=job_body, headers={"traceparent": f"00-{trace_id}-{parent_id}-01"})
    span = spans.of_trace(trace_id)[0]
    with db.read(service.app.state.engine) as session:
        kept = session.get_one(Job, answer.json()["id"]).spec.traceparent
    assert kept is not None
    assert kept.split("-")[2] in {f"{each.context.span_id:016x}" for each in spans.of_trace(trace_id)}
    assert span.parent is not None
    assert (span.name, f"{span.parent.span_id:016x}") == (f"POST {JOBS}", parent_id)
    assert (span.attributes or {})["http.response.status_code"] == 200


def test_a_span_is_named_by_its_route(customer: TestClient) -> None:
    spans.exporter()
    trace_id = token_hex(16)
    customer.get(f"{JOBS}/ftjob-secret", headers={"traceparent": f"00-{trace_id}-{token_hex(8)}-01"})
    assert spans.of_trace(trace_id)[0].name == f"GET {JOBS}/{{job_id}}"


def test_without_a_collector_nothing_is_recorded() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    done = subprocess.run([sys.executable, "-c", ONE_SPAN], env=environment, capture_output=True, check=True)
    assert done.stdout == b"None\n"


def test_spans_are_sent_to_the_collector_that_is_named(collector: Collector) -> None:
    environment = os.environ | {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url}
    subprocess.run([sys.executable, "-c", ONE_SPAN], env=environment, check=True)
    assert collector.asked == ["/v1/traces"]

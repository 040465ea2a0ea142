"""What an operator sees: Prometheus's text, and logs with the ids of requests and jobs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import update

from app import db
from app.db import read
from app.db.base import utc_now
from app.db.tables import Job
from app.ops.broker import wake
from app.ops.metrics import queue_text
from tests.app.http.conftest import JOBS, Service

ROOT = Path(__file__).resolve().parents[3]


def test_metrics_need_no_key_and_count_requests_by_route(service: Service, customer: TestClient) -> None:
    customer.get(f"{JOBS}/ftjob-1")
    got = service.http.get("/metrics")
    assert got.headers["content-type"].startswith("text/plain; version=0.0.4")
    route = "/v1/fine_tuning/jobs/{job_id}"
    assert f'spard_http_requests_total{{method="GET",route="{route}",status="404"}} 1.0' in got.text
    assert "ftjob-1" not in got.text


def test_a_method_that_there_is_not_begins_no_series_of_its_own(service: Service) -> None:
    assert [service.http.request(method, "/healthz").status_code for method in ("BREW", "TRACE")] == [405, 405]
    text = service.http.get("/metrics").text
    assert 'spard_http_requests_total{method="other",route="/healthz",status="405"} 2.0' in text
    assert "BREW" not in text


def test_metrics_show_the_queue(service: Service, customer: TestClient, job_body: dict[str, Any]) -> None:
    customer.post(JOBS, json=job_body)
    lines = service.http.get("/metrics").text.splitlines()
    assert 'spard_jobs{status="queued"} 1.0' in lines
    assert 'spard_jobs{status="running"} 0.0' in lines


def test_metrics_show_how_long_the_oldest_job_waits(
    service: Service, customer: TestClient, job_body: dict[str, Any]
) -> None:
    assert "spard_queue_age_seconds 0.0" in service.http.get("/metrics").text.splitlines()
    customer.post(JOBS, json=job_body)
    with db.transaction(service.app.state.engine) as session:
        session.execute(update(Job).values(created_at=utc_now() - timedelta(hours=1)))
    (line,) = re.findall(r"^spard_queue_age_seconds (\S+)$", service.http.get("/metrics").text, re.MULTILINE)
    assert 3600 <= float(line) < 7200


def test_wake_ups_that_wait_are_counted(service: Service) -> None:
    with db.transaction(service.app.state.engine) as session:
        wake(session, "ftjob-1")
        assert "spard_outbox_pending 1.0" in queue_text(session).decode().splitlines()


def test_a_histogram_s_buckets_add_up(service: Service) -> None:
    for _ in range(3):
        service.http.get("/healthz")
    lines = service.http.get("/metrics").text.splitlines()
    assert 'spard_http_request_duration_seconds_bucket{le="+Inf"} 3.0' in lines
    assert "spard_http_request_duration_seconds_count 3.0" in lines


def test_every_sample_has_a_type(service: Service) -> None:
    lines = service.http.get("/metrics").text.splitlines()
    typed = {line.split()[2] for line in lines if line.startswith("# TYPE")}
    names = {line.split("{")[0].split()[0] for line in lines if not line.startswith("#")}
    assert {name.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count") for name in names} <= typed


def test_a_job_remembers_the_request_that_made_it(
    service: Service, customer: TestClient, job_body: dict[str, Any]
) -> None:
    got = customer.post(JOBS, json=job_body)
    with read(service.app.state.engine) as session:
        job = session.get_one(Job, got.json()["id"])
    assert job.spec.request_id == got.headers["x-request-id"]


@pytest.mark.parametrize("logger", ["logging.getLogger('a')", "structlog.get_logger('a')"])
def test_json_logs_are_one_object_a_line_with_the_ids(logger: str) -> None:
    program = (
        "import logging, structlog; from app.ops import logs; logs.set_up('json');"
        "structlog.contextvars.bind_contextvars(request_id='req_1');"
        f"{logger}.warning('two\\nlines')"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    line = json.loads(ended.stderr)
    assert (line["event"], line["level"], line["request_id"]) == ("two\nlines", "warning", "req_1")


def test_processes_that_share_a_folder_are_summed_up(tmp_path: Path) -> None:
    program = (
        "from app.ops.metrics import RequestMetrics; m = RequestMetrics(); m.note('GET', '/a', 200, 0.1);"
        "print(m.text().decode())"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    for asked in (1, 2):
        command = [sys.executable, "-c", program]
        text = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
        assert f'spard_http_requests_total{{method="GET",route="/a",status="200"}} {asked}.0' in text

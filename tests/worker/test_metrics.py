"""What can be seen of a worker from outside: the spans of an attempt, and its metrics on a port."""

from __future__ import annotations

import socket
import urllib.request
from contextlib import suppress
from dataclasses import replace
from secrets import token_hex

import pytest

from app.db import transaction
from app.db.tables import Job
from app.errors import Unfit
from app.jobs import lease
from tests import spans
from tests.narrowing import require
from tests.servers import free_port
from tests.worker.shop import Shop, wait_until
from worker.worker import Worker


def answers(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


def metrics(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}


def test_a_worker_whose_port_is_taken_says_so(light_shop: Shop) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(Unfit, match=f"SPARD_METRICS_PORT is {port}, where this worker cannot listen"):
            Worker(light_shop.settings(metrics_port=port)).run()


def test_an_attempt_continues_the_trace_of_its_job_and_its_stages_are_spans(light_shop: Shop) -> None:
    spans.exporter()
    trace_id, request_id = token_hex(16), token_hex(8)
    job_id = light_shop.add_job()
    with transaction(light_shop.engine) as session:
        job = session.get_one(Job, job_id)
        job.spec = replace(job.spec, traceparent=f"00-{trace_id}-{request_id}-01")
    with light_shop.serving("crash_once"):
        light_shop.until_ended(job_id)
    found = spans.of_trace(trace_id)
    attempts = [span for span in found if span.name == "attempt"]
    stages = [span for span in found if span.name.startswith("stage ")]
    assert [f"{span.parent.span_id:016x}" for span in attempts if span.parent] == [request_id] * 2
    assert [(span.attributes or {})["spard.outcome"] for span in attempts] == ["queued", "succeeded"]
    assert [span.name for span in stages] == [
        *("stage select", "stage train"),
        *("stage select", "stage train", "stage audit", "stage package"),
    ]
    assert {span.parent.span_id for span in stages if span.parent} == {span.context.span_id for span in attempts}


def test_a_worker_s_port_tells_attempts_and_stages(light_shop: Shop) -> None:
    port = free_port()
    job_id = light_shop.add_job()
    with light_shop.serving("crash_once", metrics_port=port):
        wait_until(lambda: answers(port))
        before = metrics(port)
        light_shop.until_ended(job_id)
        wait_until(lambda: 'spard_attempt_seconds_count{outcome="succeeded"}' in metrics(port))
        after = metrics(port)
    assert (before["spard_lease_refusals_total"], before["spard_worker_fit"]) == (0, 1)
    assert after['spard_attempt_seconds_count{outcome="queued"}'] == 1
    assert after['spard_stage_seconds_count{stage="train"}'] == 2
    assert after['spard_stage_seconds_sum{stage="train"}'] > 0
    assert {name: count for name, count in after.items() if "decision" in name} == {
        'spard_gate_decisions_total{decision="pass"}': 1
    }
    assert (before["spard_judge_failures_total"], after["spard_judge_failures_total"]) == (0, 0)


def test_jobs_of_lost_workers_are_counted_where_they_are_taken_up(light_shop: Shop) -> None:
    abandoned, released = light_shop.add_job(), light_shop.add_job()
    for job_id in (abandoned, released):
        with transaction(light_shop.engine) as session:
            claim = require(lease.claim(session, "another worker", 60.0, only=Job.id == job_id))
    with transaction(light_shop.engine) as session:
        lease.release(session, claim, "the worker stops")
    light_shop.expire_lease(abandoned)
    port = free_port()
    with light_shop.serving("good", metrics_port=port):
        ended = [light_shop.until_ended(job_id) for job_id in (abandoned, released)]
        counted = metrics(port)["spard_jobs_rescued_total"]
    assert [job.lease_token for job in ended] == [2, 2]
    assert counted == 1

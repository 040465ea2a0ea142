"""A job can be followed live, and a client that was cut off goes on where it was."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fastapi.testclient import TestClient

from tests.app.http.conftest import JOBS

Events = list[dict[str, Any]]


@pytest.fixture
def job(customer: TestClient, asked: dict[str, Any]) -> str:
    """A job that was cancelled: four events in all."""
    job_id: str = customer.post(JOBS, json=asked).json()["id"]
    customer.post(f"{JOBS}/{job_id}/cancel")
    return job_id


def follow(client: TestClient, job: str, last: str | None = None) -> Events:
    headers = {} if last is None else {"last-event-id": last}
    got = client.get(f"{JOBS}/{job}/stream", headers=headers)
    assert got.headers["content-type"].startswith("text/event-stream")
    blocks = [dict(line.split(": ", 1) for line in block.splitlines()) for block in got.text.strip().split("\n\n")]
    return [block | {"data": json.loads(block["data"])} for block in blocks]


def test_all_events_come_in_order_and_the_end_last(customer: TestClient, job: str) -> None:
    *events, done = follow(customer, job)
    listed = customer.get(f"{JOBS}/{job}/events").json()["data"]
    assert [event["data"] for event in events] == listed[::-1]
    assert [event["id"] for event in events] == ["1", "2", "3", "4"]
    assert (done["event"], done["data"]) == (
        "done",
        customer.get(f"{JOBS}/{job}").json() | {"safety": done["data"]["safety"]},
    )


def test_a_client_goes_on_after_the_last_event_it_saw(customer: TestClient, job: str) -> None:
    assert [event.get("id") for event in follow(customer, job, "2")] == ["3", "4", None]


@pytest.mark.parametrize("last", ["", "x", "-1", "9" * 30])
def test_a_number_that_is_none_begins_anew(customer: TestClient, job: str, last: str) -> None:
    assert len(follow(customer, job, last)) == 5


def test_somebody_elses_job_reads_as_unknown(stranger: TestClient, job: str) -> None:
    got = stranger.get(f"{JOBS}/{job}/stream")
    assert (got.status_code, got.json()["error"]["code"]) == (404, "fine_tune_not_found")

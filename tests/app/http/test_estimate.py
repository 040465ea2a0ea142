"""What a job would take, said before it is made."""

from __future__ import annotations

from typing import Any

from fastapi.testclient import TestClient

from tests.app.http.conftest import JOBS, Service, rows
from tests.app.http.test_results import publish

URL = f"{JOBS}/estimate"


def test_an_estimate_counts_steps_as_training_does(customer: TestClient, asked: dict[str, Any]) -> None:
    ask = asked | {
        "method": {"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 3, "batch_size": 4}}}
    }
    found = customer.post(URL, json=ask).json()
    assert (found["rows"], found["steps"], found["approximate"]) == (10, 9, True)
    assert found["trained_tokens"] == 3 * found["tokens_per_epoch"] == 3 * -(-len(rows(10)) // 4)
    assert (found["safe_examples"], found["estimated_seconds"]) == (64, None)


def test_time_is_estimated_by_ones_own_jobs(service: Service, customer: TestClient, asked: dict[str, Any]) -> None:
    customer.post(JOBS, json=asked)
    publish(service, "pass")
    assert isinstance(customer.post(URL, json=asked).json()["estimated_seconds"], int)


def test_nothing_is_queued(customer: TestClient, asked: dict[str, Any]) -> None:
    assert customer.post(URL, json=asked).status_code == 200
    assert customer.get(JOBS).json()["data"] == []


def test_what_no_job_may_ask_for_is_refused_alike(customer: TestClient, asked: dict[str, Any]) -> None:
    ask = asked | {"model": "gpt-7"}
    answers = [customer.post(url, json=ask).json()["error"] for url in (URL, JOBS)]
    assert answers[0] == answers[1]


def test_graders_are_refused_in_so_many_words(customer: TestClient) -> None:
    for name in ("run", "validate"):
        got = customer.post(f"/v1/fine_tuning/alpha/graders/{name}", json={"grader": {"type": "string_check"}})
        assert (got.status_code, got.json()["error"]["code"]) == (400, "method_not_supported")

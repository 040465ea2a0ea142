"""Whether a job's task was learned, as its project sees it: losses always, replies where the model is released."""

# ruff: noqa: F811 - fixtures are asked for by the names that they are imported under

from __future__ import annotations

import json
from typing import Any

import pytest
from fastapi.testclient import TestClient

from app import db
from app.db.tables import Job
from app.db.tables.job_records import Adapter, SafetySummary
from app.jobs import lease
from app.jobs.lease import Publication, Rejection
from tests.app.http.conftest import JOBS, Service
from tests.app.http.test_dashboard import SignIn, sign_in  # noqa: F401 - fixture
from tests.app.http.test_report import EVIL, PAGE, REPORT
from tests.app.http.test_results import MODEL, publish

KEY = "jobs/task_replies.jsonl"  # beside the report of `publish`
CHECK = {"source": "held_out", "rows": 5, "replies": 2, "is_pairs": False, "why_none": ""}
LOSSES = {
    "base": {"loss": 6.94, "accuracy": 0.12, "tokens": 90},
    "adapter": {"loss": 2.1, "accuracy": 0.61, "tokens": 90},
}
TASK_REPORT: dict[str, Any] = REPORT | {
    "gate": {"decision": "pass", "reasons": []},
    "validation": LOSSES,
    "task_check": CHECK,
}
REPLIES: list[dict[str, Any]] = [
    {"line": 3, "system": "You answer for Aurora.", "turns": 2, "prompt": "Where is my lamp?", "expected": "At home."}
    | {"base": "I cannot help.", "trained": "It is at home."},
    {"line": 9, "system": None, "turns": 0, "prompt": EVIL, "expected": EVIL, "base": EVIL, "trained": ""},
]
FIGURES = "Loss on 5 rows of the file that were held out of the training: 6.94 nats a token before, 2.10 after."


def write_results(service: Service, report: dict[str, Any] = TASK_REPORT) -> None:
    """Put a job's report and its replies where `publish` leaves them."""
    storage = service.app.state.storage
    storage.write("jobs/report", [json.dumps(report).encode()])
    storage.write(KEY, ["".join(json.dumps(row) + "\n" for row in REPLIES).encode()])


@pytest.fixture
def job(customer: TestClient, job_body: dict[str, Any]) -> str:
    job_id: str = customer.post(JOBS, json=job_body).json()["id"]
    return job_id


@pytest.fixture
def learned_job(service: Service, job: str) -> str:
    """A job that was released, with the replies of both models beside its report."""
    publish(service, "pass")
    write_results(service)
    return job


def test_the_replies_of_a_released_model_are_listed(customer: TestClient, learned_job: str) -> None:
    found = customer.get(f"{JOBS}/{learned_job}/task_replies").json()
    assert [{name: each[name] for name in REPLIES[0]} for each in found["data"]] == REPLIES
    assert (found["object"], found["has_more"]) == ("list", False)


def test_those_of_another_project_read_as_unknown(stranger: TestClient, sign_in: SignIn, learned_job: str) -> None:
    got = stranger.get(f"{JOBS}/{learned_job}/task_replies")
    assert (got.status_code, got.json()["error"]["code"]) == (404, "fine_tune_not_found")
    assert sign_in("org-stranger").get(f"/jobs/{learned_job}/task-replies").status_code == 404


def test_those_of_a_model_that_is_not_released_are_not_shown(
    service: Service, customer: TestClient, sign_in: SignIn, job: str
) -> None:
    assert customer.get(f"{JOBS}/{job}/task_replies").json()["error"]["code"] == "report_not_ready"
    write_results(service, TASK_REPORT | {"gate": {"decision": "fail", "reasons": ["ASR 90 %"]}})
    safety: SafetySummary = {"gate": {"decision": "fail", "reasons": ["ASR 90 %"]}}
    with db.transaction(service.app.state.engine) as session:
        claim = lease.claim(session, "worker", 60)
        assert claim is not None
        assert lease.reject(session, claim, Rejection("The gate.", 10, [], safety, "jobs/report"))
    got = customer.get(f"{JOBS}/{job}/task_replies")
    assert (got.status_code, got.json()["error"]["code"]) == (400, "not_published")
    page, part = (sign_in().get(path).text for path in (f"/jobs/{job}", f"/jobs/{job}/task-replies"))
    assert FIGURES in page
    assert "not released" in page
    assert "not released" in part
    assert "It is at home." not in page + part


def test_what_was_waived_for_the_provider_is_the_provider_s_alone(service: Service, job: str) -> None:
    publish(service, "waived")
    write_results(service)
    colleague = service.client("org-customer", "customer")
    assert colleague.get(f"{JOBS}/{job}/task_replies").status_code == 403


def test_where_no_request_was_asked_it_is_told(customer: TestClient, service: Service, job: str) -> None:
    publish(service, "pass")
    got = customer.get(f"{JOBS}/{job}/task_replies")
    assert (got.status_code, got.json()["error"]["code"]) == (404, "no_task_replies")


def test_they_go_with_their_job(service: Service, customer: TestClient, job: str) -> None:
    folder, storage = f"tenants/org-customer/jobs/{job}/a1/out", service.app.state.storage
    key = f"{folder}/task_replies.jsonl"
    storage.write(key, [json.dumps(REPLIES[0]).encode()])
    adapter: Adapter = {"storage_key": f"{folder}/adapter.tar.gz", "sha256": "0" * 64, "bytes": 1}
    safety: SafetySummary = {"gate": {"decision": "pass", "reasons": []}}
    with db.transaction(service.app.state.engine) as session:
        claim = lease.claim(session, "worker", 60)
        assert claim is not None
        assert lease.publish(session, claim, Publication(MODEL, 10, [], adapter, safety, f"{folder}/safety.json"))
    assert customer.get(f"{JOBS}/{job}/task_replies").json()["data"][0]["trained"] == "It is at home."
    assert customer.delete(f"{JOBS}/{job}").status_code == 200
    assert not storage.exists(key)


def test_page_and_report_say_whether_the_task_was_learned(
    customer: TestClient, sign_in: SignIn, learned_job: str
) -> None:
    page = sign_in().get(f"/jobs/{learned_job}").text
    report = customer.get(f"{JOBS}/{learned_job}/safety", headers=PAGE).text
    for text in (page, report):
        assert "Did it learn your task?" in text
        assert "It predicts answers that it has not seen better than the base model." in text
        assert f"{FIGURES} Next token right: 12% before, 61% after." in text
        assert "It is at home." not in text
    assert f'hx-get="/jobs/{learned_job}/task-replies"' in page
    part = sign_in().get(f"/jobs/{learned_job}/task-replies").text
    for words in ("You answer for Aurora.", "After 2 earlier turns", "Where is my lamp?", "I cannot help.", "At home."):
        assert words in part
    assert EVIL not in part


def test_the_provider_reads_losses_and_no_reply(sign_in: SignIn, learned_job: str) -> None:
    page = sign_in("org-provider", "admin", "customer").get(f"/provider/jobs/{learned_job}").text
    assert "Did it learn the task?" in page
    assert FIGURES in page
    assert "task-replies" not in page


def test_a_job_that_held_nothing_out_says_why(service: Service, sign_in: SignIn, job: str) -> None:
    publish(service, "pass")
    why = "Of a file with fewer than 50 rows to train on none is held out."
    check = CHECK | {"source": "none", "rows": 0, "replies": 0, "why_none": why}
    write_results(service, TASK_REPORT | {"task_check": check, "validation": {}})
    page = sign_in().get(f"/jobs/{job}").text
    assert "It was not looked at whether the task was learned." in page
    assert why in page


@pytest.mark.parametrize(("asked", "kept"), [({}, 100), ({"held_out_rows": 7}, 7), ({"held_out_rows": 0}, 0)])
def test_a_request_may_name_how_many_rows_are_held_out(
    service: Service, customer: TestClient, job_body: dict[str, Any], asked: dict[str, int], kept: int
) -> None:
    job_id = customer.post(JOBS, json=job_body | asked).json()["id"]
    with db.transaction(service.app.state.engine) as session:
        assert session.get_one(Job, job_id).spec.held_out_rows == kept
    again = customer.post(f"{JOBS}/{job_id}/clone", json={}).json()["id"]
    with db.transaction(service.app.state.engine) as session:
        assert session.get_one(Job, again).spec.held_out_rows == kept


def test_more_than_a_hundred_are_refused(customer: TestClient, job_body: dict[str, Any]) -> None:
    error = customer.post(JOBS, json=job_body | {"held_out_rows": 101}).json()["error"]
    assert error["param"] == "held_out_rows"

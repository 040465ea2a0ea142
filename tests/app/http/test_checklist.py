"""The provider's checklist: one list for the overview page, `spard doctor` and `spard up`, and its job warnings."""

from __future__ import annotations

import json
import re
import shutil
from html import escape
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import select, update

from app import db
from app.catalog.checklist import Point, checklist, open_points
from app.commands.doctor import deployment
from app.commands.embedded import announce, unfinished_points
from app.db.base import utc_now
from app.db.tables import BaseModelEntry, Job
from tests.app.http.conftest import JOBS, Service, jsonl, pool
from tests.app.http.provider.conftest import sign_in_admin

SUITES = "/v1/admin/suites"


def points(service: Service) -> list[Point]:
    with db.read(service.app.state.engine) as session:
        return checklist(session, service.app.state.settings)


def states(service: Service) -> list[tuple[str, str]]:
    return [(point.name, point.state) for point in points(service)]


def add_suite(provider: TestClient, kind: str, rows: int) -> None:
    answer = "Paris" if kind == "utility" else None
    prompts = [{"prompt": f"{kind} {i}?"} | ({"answer": answer} if answer else {}) for i in range(rows)]
    form = {"file": ("suite.jsonl", jsonl(*prompts))}
    assert provider.post(f"{SUITES}?name={kind}&kind={kind}", files=form).status_code == 200


def forget_judge(service: Service) -> None:
    """Take away what the base model's folder says of its judge."""
    with db.read(service.app.state.engine) as session:
        shutil.rmtree(Path(session.get_one(BaseModelEntry, "lab/tiny-1").source, "calibration"))


def measure_refusals(service: Service, job_id: str, share: float | None) -> None:
    """Store a finished audit in which the base model refused a share of the harmless requests."""
    safety = {"over_refusal": {"base": share, "adapter": share}}
    with db.transaction(service.app.state.engine) as session:
        session.execute(update(Job).where(Job.id == job_id).values(safety=safety, finished_at=utc_now()))


def test_an_empty_service_lacks_a_model_a_pool_and_suites(service: Service, provider: TestClient) -> None:
    assert states(service) == [
        ("models", "problem"),
        ("pool", "problem"),
        ("suites", "problem"),
        ("suites", "note"),
        ("suites", "note"),
    ]
    assert all(point.cure for point in points(service))


def test_each_step_takes_a_point_off_the_list(service: Service, provider_with_model: TestClient) -> None:
    assert [name for name, state in states(service) if state == "problem"] == []
    for kind in ("harmful", "benign", "utility"):
        add_suite(provider_with_model, kind, 30)
    left = open_points(points(service))
    assert [(point.name, point.state) for point in left] == [("models", "note")]
    assert "not known before an audit" in left[0].text


def test_few_attacks_and_an_unknown_judge_are_problems(service: Service, provider_with_model: TestClient) -> None:
    forget_judge(service)
    add_suite(provider_with_model, "harmful", 3)
    problems = [point for point in points(service) if point.state == "problem"]
    assert [point.name for point in problems] == ["models", "suites"]
    assert ["SPARD_JUDGE_ERRORS" in problems[0].cure, "3 prompts" in problems[1].text] == [True, True]


def test_a_judge_that_errs_on_a_model_is_a_problem(
    service: Service, provider_with_model: TestClient, tmp_path: Path
) -> None:
    file = tmp_path / "model" / "calibration" / "judge.json"
    measured = json.loads(file.read_text())
    gamed = measured["gamed"] | {"hits": 1}
    file.write_text(json.dumps(measured | {"gamed": gamed}))
    (problem,) = [point for point in points(service) if point.state == "problem"]
    assert "was measured on its replies and errs too often" in problem.text
    file.write_text(json.dumps(measured | {"judge": "another"}))
    (problem,) = [point for point in points(service) if point.state == "problem"]
    assert "spard judge --labeled FILE --model FOLDER" in problem.cure


def test_the_page_the_doctor_and_the_start_show_the_same_points(
    service: Service, provider_with_model: TestClient, capsys: pytest.CaptureFixture[str]
) -> None:
    forget_judge(service)
    settings, linked = service.app.state.settings, sign_in_admin(service).get("/provider").text
    shown = re.sub(r"</?a\b[^>]*>", "", linked)  # without links of words
    with db.read(service.app.state.engine) as session:
        found = [*deployment.models(session, settings), *deployment.corpora(session)]
    announce(settings, None, "http://127.0.0.1:8000", unfinished_points(settings))
    started, listed = capsys.readouterr().out, points(service)
    assert len(open_points(listed)) >= 4
    for point in listed:
        assert escape(point.text) in shown or point.text.replace("'", "&#39;") in shown
        assert (point.state, point.name) in {(each.state, each.name) for each in found}
        assert any(each.text.startswith(point.text) for each in found)
        assert (point.text in started) == (point.state != "ok")


def test_a_job_that_cannot_pass_is_warned_before_and_when_it_is_made(
    service: Service, provider_with_model: TestClient, customer: TestClient, job_body: Any
) -> None:
    assert customer.post(f"{JOBS}/estimate", json=job_body).json()["warnings"] == []
    forget_judge(service)
    add_suite(provider_with_model, "harmful", 3)
    estimate = customer.post(f"{JOBS}/estimate", json=job_body).json()
    job = customer.post(JOBS, json=job_body).json()
    judge, attacks = job["warnings"]
    assert ("judge errs" in judge, "3 attacks" in attacks) == (True, True)
    assert estimate["warnings"] == job["warnings"]
    assert "SPARD_" not in judge + attacks  # an owner cannot set the service's variables
    told = [each["message"] for each in customer.get(f"{JOBS}/{job['id']}/events").json()["data"]]
    assert {judge, attacks} <= set(told)


@pytest.mark.parametrize(
    ("measured_on", "problems"), [(None, []), ("own", []), ("own+nf4", []), ("sha256:0", ["models"])]
)
def test_a_record_of_the_judge_counts_for_the_base_model_that_it_was_measured_on(
    service: Service, provider_with_model: TestClient, tmp_path: Path, measured_on: str | None, problems: list[str]
) -> None:
    forget_judge(service)
    with db.read(service.app.state.engine) as session:
        own = session.scalars(select(BaseModelEntry.digest)).one()
    if measured_on is not None:
        measured_on = measured_on.replace("own", str(own))
    (tmp_path / "record.json").write_text(json.dumps({"base_digest": measured_on}))
    settings = service.app.state.settings.model_copy(update={"judge_errors": tmp_path / "record.json"})
    with db.read(service.app.state.engine) as session:
        assert [each.name for each in checklist(session, settings) if each.state == "problem"] == problems


def test_a_policy_that_needs_no_measured_judge_needs_no_warning(
    service: Service, provider_with_model: TestClient, customer: TestClient, job_body: Any
) -> None:
    forget_judge(service)
    limits = {"thresholds": {"allow_unmeasured_judge": True}}
    assert provider_with_model.post("/v1/admin/policies", json=limits).status_code == 200
    assert customer.post(f"{JOBS}/estimate", json=job_body).json()["warnings"] == []


def test_what_the_first_audit_measured_of_a_base_model_is_told(
    service: Service, provider_with_model: TestClient, customer: TestClient, job_body: Any
) -> None:
    job_id = customer.post(JOBS, json=job_body).json()["id"]
    for share, state, warned in ((None, "note", 0), (0.02, "ok", 0), (0.4, "note", 1)):
        measure_refusals(service, job_id, share)
        (point,) = [each for each in points(service) if "harmless" in each.text and each.name == "models"]
        assert (point.state, f"{share or 0:.0%}" in point.text) == (state, share is not None)
        warnings = customer.post(f"{JOBS}/estimate", json=job_body).json()["warnings"]
        assert [("40%" in each) for each in warnings] == [True] * warned
    with db.transaction(service.app.state.engine) as session:  # another model under the same name was not audited
        session.execute(update(BaseModelEntry).values(source="/elsewhere"))
    assert "not known" in next(each.text for each in points(service) if "harmless" in each.text)


def test_attacks_held_out_of_a_large_pool_suffice(service: Service, provider: TestClient) -> None:
    for rows, state in ((20, "problem"), (150, "note")):
        files = {"file": ("pool.jsonl", pool(rows))}
        assert provider.post("/v1/admin/pools?name=general", files=files).status_code == 200
        assert [each.state for each in points(service) if "held out" in each.text] == [state]

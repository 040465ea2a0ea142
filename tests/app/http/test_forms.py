"""What is wrong with a form is told where it is wrong, on the page that the form is on."""

# ruff: noqa: F811 - fixtures are asked for by the names that they are imported under

from __future__ import annotations

import re
from html import unescape
from typing import Any

import pytest
from fastapi.testclient import TestClient

from app.errors import AppError, NotFound, TooManyRequests
from tests.app.http.conftest import JOBS, Service, Upload, rows
from tests.app.http.test_dashboard import SignIn, rejected_job, sign_in, token  # noqa: F401 - fixtures


class Busy(TooManyRequests):
    """An engine that has no room for a while."""

    retry_after_s = 7


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("n_epochs", "many", "is no number"),
        ("n_epochs", "1000", "less than or equal to 50"),
        ("batch_size", "0", "greater than or equal to 1"),
        ("learning_rate_multiplier", "-1", "greater than"),
        ("defense", "none", "needs a key with the admin scope"),
        ("model", "gpt-5", "does not exist"),
        ("suffix", "---", "printable characters"),
        ("seed", "-1", "greater than or equal to 0"),
        ("keep", "middle", "'last' or 'best'"),
        ("patience", "0", "greater than or equal to 1"),
    ],
)
def test_what_is_wrong_with_a_form_is_told_at_its_field(
    sign_in: SignIn, provider_with_model: TestClient, upload: Upload, field: str, value: str, told: str
) -> None:
    browser = sign_in()
    file_id = upload(rows(10)).json()["id"]
    form = {"form_token": token(browser.get("/jobs/new")), "model": "lab/tiny-1", "training_file": file_id}
    page = browser.post("/jobs/new", data=form | {field: value})
    assert page.status_code in (400, 403, 404)
    (alert,) = re.findall(r'id="(\w+)-fault" role="alert">([^<]*)<', page.text)
    assert alert[0] == field
    assert told in unescape(alert[1])
    assert f'aria-describedby="{field}-fault"' in page.text


def test_what_is_wrong_with_a_file_is_told_at_its_field(sign_in: SignIn, provider_with_model: TestClient) -> None:
    browser = sign_in()
    form = {"form_token": token(browser.get("/jobs/new")), "purpose": "fine-tune"}
    page = browser.post("/jobs/new/file", data=form, files={"file": ("chats.csv", rows(10))})
    assert page.status_code == 400
    assert re.findall(r'id="(\w+)-fault" role="alert">', page.text) == ["file"]


def test_what_a_job_refuses_is_told_on_its_page(sign_in: SignIn, rejected_job: str) -> None:
    browser = sign_in()
    form = {"form_token": token(browser.get(f"/jobs/{rejected_job}"))}
    for act in ("cancel", "pause", "resume", "again"):
        page = browser.post(f"/jobs/{rejected_job}/{act}", data=form)
        assert page.status_code in (400, 404), act
        assert page.text.count('role="alert"') == 1, act
        assert "Stopped by the safety gate" in page.text, act


def test_a_file_in_use_says_so_on_its_page(sign_in: SignIn, customer: TestClient, job_body: dict[str, Any]) -> None:
    customer.post(JOBS, json=job_body)
    browser = sign_in()
    path = f"/files/{job_body['training_file']}"
    page = browser.post(f"{path}/delete", data={"form_token": token(browser.get(path))})
    assert page.status_code == 400
    assert re.findall(r'role="alert">([^<]*)<', page.text)[0].endswith("which has not ended; cancel it first.")


def test_an_empty_question_is_told_at_its_field(sign_in: SignIn, provider_with_model: TestClient) -> None:
    browser = sign_in()
    form = {"form_token": token(browser.get("/chat")), "model": "lab/tiny-1"}
    for question in ("", "  ", "a" * 16_001):
        page = browser.post("/chat", data=form | {"question": question})
        assert page.status_code == 400
        assert re.findall(r'id="(\w+)-fault" role="alert">', page.text) == ["question"]


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (Busy("The engine has no room."), "The engine has no room. Try again in 7 s."),
        (NotFound("The model is not released."), "The model is not released."),
    ],
)
def test_why_a_model_does_not_answer_is_told_in_its_place(
    sign_in: SignIn,
    service: Service,
    provider_with_model: TestClient,
    monkeypatch: pytest.MonkeyPatch,
    error: AppError,
    told: str,
) -> None:
    async def refuse(*_: object) -> None:
        raise error

    monkeypatch.setattr(service.app.state.serving, "open", refuse)
    browser = sign_in()
    form = {"form_token": token(browser.get("/chat")), "model": "lab/tiny-1", "question": "Hello?"}
    page = browser.post("/chat", data=form)
    assert page.status_code == 200
    assert told in page.text


def test_a_wrong_number_of_jobs_to_compare_is_told_under_the_list(
    sign_in: SignIn,
    rejected_job: str,
) -> None:
    for ids in ("", f"ids={rejected_job}", "&".join(f"ids={rejected_job}{i}" for i in range(5))):
        page = sign_in().get(f"/compare?{ids}")
        assert page.status_code == 400, ids
        assert "Choose two to 4 jobs to compare." in page.text, ids
        assert f'href="/jobs/{rejected_job}"' in page.text, ids


def test_the_form_of_a_clone_changes_one_thing(
    sign_in: SignIn,
    customer: TestClient,
    job_body: dict[str, Any],
) -> None:
    settings = {"selection": {"ratio": 0.5}, "defense": {"type": "spard", "tau": 0.4}}
    more = {"suffix": "acme", "seed": 5, "lora": {"rank": 4}, "safety": settings, "metadata": {"team": "a"}}
    first = customer.post(JOBS, json=job_body | more).json()
    browser = sign_in()
    page = browser.get(f"/jobs/new?from={first['id']}")
    fields = dict(re.findall(r'name="(\w+)"[^>]* value="([^"]*)"', page.text))
    fields["model"] = "lab/tiny-1"
    clone = browser.post("/jobs/new", data=fields | {"defense": "spard", "n_epochs": "2"})
    second = customer.get(f"{JOBS}/{clone.url.path.removeprefix('/jobs/')}").json()
    assert second["hyperparameters"] == first["hyperparameters"] | {"n_epochs": 2}
    for name in ("model", "seed", "lora", "metadata", "training_file"):
        assert second[name] == first[name], name
    for name in ("defense", "selection"):
        assert second["safety"][name] == first["safety"][name], name


def test_a_clone_whose_file_is_gone_asks_for_another(
    sign_in: SignIn,
    customer: TestClient,
    rejected_job: str,
) -> None:
    file = customer.get(f"{JOBS}/{rejected_job}").json()["training_file"]
    assert customer.delete(f"/v1/files/{file}").status_code == 200
    page = sign_in().get(f"/jobs/new?from={rejected_job}")
    assert page.status_code == 200
    assert re.findall(r'id="(\w+)-fault" role="alert">', page.text) == ["file"]


def test_a_job_that_has_no_room_is_refused_before_anything_is_looked_up(
    sign_in: SignIn, provider_with_model: TestClient, upload: Upload, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider_with_model.post("/v1/admin/projects/org-customer/quota", json={"max_unfinished_jobs": 1})
    browser = sign_in()
    form = {"form_token": token(browser.get("/jobs/new")), "model": "lab/tiny-1", "once": "a" * 32}
    form["training_file"] = upload(rows(10)).json()["id"]
    first = browser.post("/jobs/new", data=form, follow_redirects=False)
    assert first.status_code == 303
    assert browser.post("/jobs/new", data=form, follow_redirects=False).headers["location"] == first.headers["location"]

    def refuse(*given: object) -> None:
        raise AssertionError("the quota was not looked at first")

    monkeypatch.setattr("app.jobs.service.resolve_request", refuse)
    monkeypatch.setattr("app.jobs.service.find_earlier", refuse)
    monkeypatch.setattr("app.dashboard.pages.new_job.fitness.learn_tool_support", refuse)
    page = browser.post("/jobs/new", data=form | {"once": "b" * 32})
    assert page.status_code == 429
    assert "jobs that have not ended" in unescape(page.text)

"""The pages: signing in, what they show and to whom, and that no text of others becomes part of them."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from html import unescape
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import update

from app import db
from app.db.base import utc_now
from app.db.tables import ApiKey, BrowserSession, Job, Project
from app.jobs import lease
from app.jobs.lease import Rejection
from tests.app.http.conftest import JOBS, Service, Upload, jsonl, rows
from tests.app.http.test_report import EVIL, GATE, REPORT, Tags
from tests.app.http.test_results import MODEL, publish
from tests.spard.parts import byte_tokenizer, write_model

UNASKED = "a row that nobody asked for"
HTML = {"accept": "text/html,application/xhtml+xml"}
SignIn = Callable[..., TestClient]


@pytest.fixture
def sign_in(service: Service) -> Iterator[SignIn]:
    """Sign a browser in with a new key of a project."""
    browsers = []

    def open_browser(project: str = "org-customer", *scopes: str) -> TestClient:
        browser = TestClient(service.app, headers=HTML)
        key = service.add_key(project, *(scopes or ("customer",)))
        answer = browser.post("/sign-in", data={"key": key, "next": "/jobs"})
        assert (answer.status_code, answer.url.path) == (200, "/jobs")
        browsers.append(browser)
        return browser

    yield open_browser
    for browser in browsers:
        browser.close()


@pytest.fixture
def rejected_job(service: Service, customer: TestClient, job_body: dict[str, Any]) -> str:
    """A job whose report is full of other people's texts."""
    job_id: str = customer.post(JOBS, json=job_body | {"suffix": EVIL.replace("/", "")}).json()["id"]
    evil = {
        "line": 3,
        "score": 0.9,
        "cosine": 0.9,
        "pool_row": 5,
        "reasons": [EVIL],
        "verdict": "undecided",
        "excerpt": f"a row nobody asked for {EVIL}",
    }
    report = REPORT | {"risky_rows": [evil]}
    service.app.state.storage.write("jobs/report", [json.dumps(report).encode()])
    with db.transaction(service.app.state.engine) as session:
        claim = lease.claim(session, "worker", 60)
        assert claim is not None
        assert lease.record_metrics(session, claim, {1: {"loss/task": 1.0}, 2: {"loss/task": 0.5, "loss/safe": 0.4}})
        assert lease.reject(session, claim, Rejection(EVIL, 10, [], {"gate": GATE}, "jobs/report"))
    return job_id


def token(page: Any) -> str:
    """The token that the forms of a page carry."""
    found = re.search(r'name="form_token" value="([0-9a-f]{64})"', page.text)
    assert found
    return found.group(1)


def test_without_a_key_every_page_asks_to_sign_in(service: Service) -> None:
    browser = TestClient(service.app, headers=HTML)
    for path in ("/", "/jobs", "/jobs/new", "/jobs/ftjob-1", "/files", "/models", "/compare", "/provider"):
        answer = browser.get(path)
        assert (answer.status_code, answer.url.path) == (200, "/sign-in"), path


@pytest.mark.parametrize("name", ["fine_tuning/jobs/ftjob-1/safety", "fine_tuning/jobs/ftjob-1/adapter", "models"])
def test_a_link_of_a_page_into_the_api_asks_a_browser_to_sign_in(service: Service, name: str) -> None:
    path = f"/v1/{name}"
    browser = TestClient(service.app, headers=HTML, follow_redirects=False)
    for cookies in ({}, {"spard_session": "one-that-has-ended"}):
        browser.cookies.update(cookies)
        answer = browser.get(path)
        assert (answer.status_code, answer.headers.get("location")) == (303, f"/sign-in?next={quote(path, safe='')}")
    bare, wrong = TestClient(service.app), {**HTML, "authorization": "Bearer sk-spard-wrong"}
    for refused in (bare.get(path), bare.get(path, headers=wrong), browser.post("/v1/fine_tuning/jobs", json={})):
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")


def test_a_wrong_key_is_told_beside_the_field(service: Service) -> None:
    answer = TestClient(service.app, headers=HTML).post("/sign-in", data={"key": "sk-spard-wrong"})
    assert answer.status_code == 401
    assert "The API key is not valid" in answer.text
    assert "set-cookie" not in answer.headers


def test_the_cookie_is_kept_from_scripts_and_other_sites(service: Service) -> None:
    key = service.add_key("org-customer", "customer")
    answer = TestClient(service.app).post("/sign-in", data={"key": key}, follow_redirects=False)
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert key.lower() not in cookie


@pytest.mark.parametrize("target", ["https://evil.example", "//evil.example", "/\\evil.example", "/a\nb"])
def test_signing_in_never_leads_to_another_site(service: Service, target: str) -> None:
    key = service.add_key("org-customer", "customer")
    answer = TestClient(service.app).post("/sign-in", data={"key": key, "next": target}, follow_redirects=False)
    assert answer.headers["location"] == "/jobs"


def test_a_session_ends_with_its_key_and_its_time(service: Service, sign_in: SignIn) -> None:
    ends = {"key": update(ApiKey).values(revoked_at=utc_now()), "time": update(BrowserSession)}
    ends["time"] = ends["time"].values(expires_at=utc_now() - timedelta(seconds=1))
    for end in ends.values():
        browser = sign_in()
        assert browser.get("/files").url.path == "/files"
        with db.transaction(service.app.state.engine) as session:
            session.execute(end)
        assert browser.get("/files").url.path == "/sign-in"


def test_signing_out_forgets_the_browser(sign_in: SignIn) -> None:
    browser = sign_in()
    kept = dict(browser.cookies)
    browser.post("/sign-out", data={"form_token": token(browser.get("/jobs"))})
    browser.cookies.update(kept)
    assert browser.get("/jobs").url.path == "/sign-in"


@pytest.mark.parametrize("scope", ["read", "admin"])
def test_a_key_that_changes_nothing_of_its_project_s_signs_out_too(service: Service, scope: str) -> None:
    browser = TestClient(service.app, headers=HTML)
    page = browser.post("/sign-in", data={"key": service.add_key("org-customer", scope)})
    assert browser.post("/sign-out", data={"form_token": token(page)}).url.path == "/sign-in"
    assert browser.get("/provider").url.path == "/sign-in"


def test_a_signed_in_browser_reads_the_api_and_changes_nothing_there(
    sign_in: SignIn, rejected_job: str, job_body: dict[str, Any]
) -> None:
    browser = sign_in()
    assert browser.get(f"{JOBS}/{rejected_job}").json()["id"] == rejected_job
    assert browser.post(JOBS, json=job_body).status_code == 401
    assert browser.delete(f"{JOBS}/{rejected_job}").status_code == 401


@pytest.mark.parametrize("given", ["", "0" * 64, "é" * 64], ids=["none", "wrong", "not ASCII"])
def test_a_form_of_another_site_changes_nothing(
    sign_in: SignIn, customer: TestClient, rejected_job: str, given: str
) -> None:
    browser = sign_in()
    for path in ("/jobs/new", f"/jobs/{rejected_job}/cancel", "/sign-out"):
        answer = browser.post(path, data={"form_token": given})
        assert answer.status_code == 403, path
    sent = browser.post("/jobs/new/file", data={"form_token": given}, files={"file": ("a.jsonl", rows(10))})
    assert sent.status_code == 403
    assert browser.get("/jobs").url.path == "/jobs"


def test_a_reading_key_looks_and_changes_nothing(sign_in: SignIn, rejected_job: str) -> None:
    browser = sign_in("org-customer", "read")
    page = browser.get(f"/jobs/{rejected_job}")
    assert page.status_code == 200
    assert browser.post(f"/jobs/{rejected_job}/cancel", data={"form_token": token(page)}).status_code == 403


def test_a_reading_key_is_offered_nothing_that_is_refused_to_it(
    sign_in: SignIn, rejected_job: str, job_body: dict[str, Any]
) -> None:
    file = job_body["training_file"]
    pages = ("/jobs", "/jobs?search=none", "/files", f"/files/{file}", f"/jobs/{rejected_job}", "/models", "/chat")
    seen = [sign_in("org-customer", scope) for scope in ("read", "customer")]
    for path in (*pages, "/jobs/new", f"/jobs/new?file={file}"):
        reads, writes = (browser.get(path).text for browser in seen)
        assert not re.findall(r'(?:href|action)="(?:/jobs/new|/chat)', reads), path
        assert re.findall('<form[^>]* method="post"[^>]*>', reads) == [
            '<form class="account" method="post" action="/sign-out">'
        ], path
        assert re.search(r'(?:href|action)="(?:/jobs/new|/chat)', writes), path


def test_names_between_backticks_are_shown_as_code(
    sign_in: SignIn, customer: TestClient, job_body: dict[str, Any], service: Service
) -> None:
    job_id = customer.post(JOBS, json=job_body).json()["id"]
    with db.transaction(service.app.state.engine) as session:
        job = session.get(Job, job_id)
        assert job is not None
        job.warnings = ["The judge `one<b>` finds harm."]
    assert "The judge <code>one&lt;b&gt;</code> finds harm." in sign_in().get(f"/jobs/{job_id}").text


def test_the_pages_of_another_project_read_as_unknown(sign_in: SignIn, rejected_job: str) -> None:
    browser = sign_in("org-stranger")
    for path in (f"/jobs/{rejected_job}", f"/jobs/{rejected_job}/risky-rows/3", f"/jobs/new?from={rejected_job}"):
        answer = browser.get(path)
        assert answer.status_code == 404, path
        assert answer.headers["content-type"].startswith("text/html")


def test_the_provider_s_page_is_the_provider_s(sign_in: SignIn, provider_with_model: TestClient) -> None:
    assert sign_in().get("/provider").status_code == 403
    page = sign_in("org-provider", "admin", "customer").get("/provider/models")
    assert page.status_code == 200
    assert "lab/tiny-1" in page.text


def test_the_provider_sees_what_adapters_of_a_model_reach(
    sign_in: SignIn, provider_with_model: TestClient, tmp_path: Path
) -> None:
    model = {"alias": "tiny", "source": str(write_model(tmp_path / "tiny"))}
    assert provider_with_model.post("/v1/admin/models", json=model).status_code == 200
    page = sign_in("org-provider", "admin", "customer").get("/provider/models").text
    assert re.search(r"<td>2 of 2 layers, [\d.]+ % of the parameters</td>", page)


def test_no_text_of_others_becomes_part_of_a_page(sign_in: SignIn, service: Service, rejected_job: str) -> None:
    browser = sign_in()
    paths = ["/jobs", f"/jobs/{rejected_job}", f"/jobs?search={EVIL}", f"/jobs/{rejected_job}/risky-rows/3"]
    paths += [
        f"/jobs/new?from={rejected_job}",
        f"/compare?ids={rejected_job}&ids={EVIL}",
        f"/files/{EVIL}",
        "/files",
        "/models",
    ]
    for path in paths:
        page = browser.get(path)
        assert EVIL not in page.text, path
        assert "<script>alert" not in page.text, path
        assert "script-src 'self'" in page.headers["content-security-policy"]
        assert "unsafe" not in page.headers["content-security-policy"]


def test_pages_are_well_formed_and_link_to_nobody_else(sign_in: SignIn, rejected_job: str) -> None:
    browser = sign_in("org-customer", "customer", "admin")
    for path in (
        "/jobs",
        f"/jobs/{rejected_job}",
        "/jobs/new",
        f"/jobs/new?from={rejected_job}",
        "/files",
        "/models",
        "/provider",
    ):
        tags = Tags(void={"meta", "link", "input", "br"})
        tags.feed(browser.get(path).text)
        assert tags.open == [], path
        assert all(link.startswith(("/", "#")) for link in tags.links), path


def test_what_pages_link_to_is_there_and_kept_for_good(sign_in: SignIn) -> None:
    browser = sign_in()
    linked = set(re.findall(r'"(/static/[^"]+)"', browser.get("/jobs").text))
    assert len(linked) == 5
    for path in linked:
        answer = browser.get(path)
        assert answer.status_code == 200
        assert "immutable" in answer.headers["cache-control"]
        assert (answer.headers["content-encoding"], answer.headers["vary"]) == ("gzip", "accept-encoding")
        plain = browser.get(path, headers={"accept-encoding": "identity"})
        assert (plain.content, "content-encoding" in plain.headers) == (answer.content, False)
        assert int(answer.headers["content-length"]) < int(plain.headers["content-length"])
    assert "content-encoding" not in browser.get("/jobs").headers  # its length could tell of its secrets
    assert sum(len(browser.get(path).content) for path in linked) < 150_000


def test_htmx_is_as_it_was_published() -> None:
    content = (files("app.dashboard") / "static" / "htmx.min.js").read_bytes()
    assert hashlib.sha256(content).hexdigest() == "d6fdc75f204e6bdefa99b69bf1e6d4ac69b8a364f77929f45c13476b4000f717"


def test_the_text_of_a_risky_row_is_shown_when_asked_and_logged(
    sign_in: SignIn, provider: TestClient, rejected_job: str
) -> None:
    browser = sign_in()
    page = browser.get(f"/jobs/{rejected_job}").text
    assert UNASKED not in page
    assert "<td>undecided</td>" in page  # the judge's verdict stands beside the reasons
    part = browser.get(f"/jobs/{rejected_job}/risky-rows/3", headers={"hx-request": "true"})
    assert part.text.strip().startswith('<span class="shown">')
    logged = provider.get("/v1/admin/audit_log?action=risky_row.shown").json()["data"]
    assert [(entry["target"], entry["details"]) for entry in logged] == [(rejected_job, {"line": 3})]


def test_from_a_dropped_file_to_a_queued_job(sign_in: SignIn, provider_with_model: TestClient) -> None:
    browser = sign_in()
    form = {"form_token": token(browser.get("/jobs/new")), "purpose": "fine-tune"}
    findings = browser.post("/jobs/new/file", data=form, files={"file": ("chats.jsonl", rows(10))})
    assert "10 rows, ready to be trained on" in findings.text
    fields = {"model": "lab/tiny-1", "training_file": findings.url.params["file"], "suffix": "acme", "defense": "spard"}
    fields |= {"n_epochs": "2", "seed": "7", "keep": "best", "patience": "3"}
    page = browser.post("/jobs/new", data=form | fields)
    assert page.url.path.startswith("/jobs/ftjob-")
    assert "Waiting for a worker." in page.text
    job = browser.get(f"{JOBS}/{page.url.path.removeprefix('/jobs/')}").json()
    assert (job["seed"], job["hyperparameters"]["n_epochs"], job["safety"]["defense"]["type"]) == (7, 2, "spard")
    assert job["safety"]["ending"] == {"keep": "best", "patience": 3, "prompts": 40}
    again = browser.get(f"/jobs/new?from={job['id']}").text
    assert '<option value="best" selected>' in again
    assert 'name="patience" inputmode="numeric" value="3"' in again


def test_a_file_of_preference_pairs_is_estimated_as_it_is_trained_on(
    sign_in: SignIn, provider_with_model: TestClient, upload: Upload, tmp_path: Path
) -> None:
    byte_tokenizer().save_pretrained(tmp_path / "model")
    asked = {"input": {"messages": [{"role": "user", "content": "What is it?"}]}}
    answers = {name: [{"role": "assistant", "content": name}] for name in ("preferred_output", "non_preferred_output")}
    pairs = upload(jsonl(*[asked | answers] * 12)).json()["id"]
    page = sign_in().get(f"/jobs/new/preview?file={pairs}&model=lab/tiny-1").text
    assert "steps over about" in page
    assert "conversations" not in page


def test_what_a_job_would_take_is_told_of_the_numbers_in_the_form(
    sign_in: SignIn, customer: TestClient, job_body: dict[str, Any], tmp_path: Path
) -> None:
    byte_tokenizer().save_pretrained(tmp_path / "model")
    old = customer.post(JOBS, json=job_body | {"hyperparameters": {"batch_size": 1, "n_epochs": 2}}).json()
    browser, of_file = sign_in(), {"file": job_body["training_file"], "model": "lab/tiny-1", "batch_size": "1"}

    def steps(**fields: str) -> int:
        found = re.search(r"(\d+) steps over", browser.get("/jobs/new/preview", params=of_file | fields).text)
        assert found
        return int(found.group(1))

    assert steps(n_epochs="6") == 2 * steps(n_epochs="3")
    link = re.search(r'<a href="(/jobs/new/preview[^"]+)"', browser.get(f"/jobs/new?from={old['id']}").text)
    assert link
    assert f"{steps(n_epochs='2')} steps over" in browser.get(unescape(link.group(1))).text
    page = browser.get("/jobs/new/preview", params=of_file | {"n_epochs": "many"}).text
    assert "is no number" in page
    assert "The model learns the marked tokens" in page


def test_a_file_with_too_few_rows_says_so_and_where_to_drop_another(
    sign_in: SignIn, provider_with_model: TestClient, upload: Upload
) -> None:
    file, browser = upload(rows(1)).json()["id"], sign_in()
    for path in (f"/files/{file}", f"/jobs/new?file={file}"):
        page = browser.get(path).text
        for words in ("1 row, too few to train on", "must have at least 10 examples", "No row has a fault."):
            assert words in page, path
    for each in (file, upload(b"{}").json()["id"]):
        assert '<a class="button" href="/jobs/new">Drop another file</a>' in browser.get(f"/jobs/new?file={each}").text


def test_a_job_whose_model_was_deleted_offers_neither_adapter_nor_chat(
    sign_in: SignIn, service: Service, customer: TestClient, job_body: dict[str, Any]
) -> None:
    job_id = customer.post(JOBS, json=job_body).json()["id"]
    publish(service, "pass")
    browser = sign_in()
    assert "Download adapter" in browser.get(f"/jobs/{job_id}").text
    assert customer.delete(f"/v1/models/{MODEL}").status_code == 200
    page = browser.get(f"/jobs/{job_id}").text
    assert "The model was deleted" in page
    assert not [words for words in ("Download adapter", "Chat with it") if words in page]


@pytest.mark.parametrize("model", ["", "x" * 1000])
def test_a_name_that_no_model_can_have_is_told_on_the_page(
    sign_in: SignIn, provider_with_model: TestClient, model: str
) -> None:
    browser = sign_in()
    form = {"form_token": token(browser.get("/chat")), "model": model, "question": "Hello there"}
    page = browser.post("/chat", data=form)
    assert (page.status_code, "model: String should have at" in page.text) == (200, True)


def test_a_file_that_cannot_be_trained_on_says_where(sign_in: SignIn, provider_with_model: TestClient) -> None:
    browser = sign_in()
    form = {"form_token": token(browser.get("/jobs/new")), "purpose": "fine-tune"}
    bad = rows(10) + b'{"messages": []}\n'
    page = browser.post("/jobs/new/file", data=form, files={"file": ("chats.jsonl", bad)})
    assert "This file cannot be trained on" in page.text
    assert "Start the job" not in page.text


def test_the_header_names_the_project_and_an_empty_list_the_address(sign_in: SignIn, service: Service) -> None:
    browser = sign_in()
    with db.transaction(service.app.state.engine) as session:
        session.get_one(Project, "org-customer").name = "Acme <Lamps>"
    page = browser.get("/jobs").text
    assert 'title="org-customer">Acme &lt;Lamps&gt;</span>' in page
    assert 'OpenAI(base_url="http://testserver/v1"' in page
    assert "OpenAI(" not in browser.get("/jobs?search=nothing").text


def test_jobs_are_found_by_text_and_status(sign_in: SignIn, rejected_job: str) -> None:
    browser = sign_in()
    for query, is_found in (
        (f"search={rejected_job[8:14]}", True),
        ("search=tiny", True),
        ("search=%25", False),
        ("search=nothing", False),
        ("status=failed", True),
        ("status=queued", False),
        ("status=", True),
    ):
        assert (f'href="/jobs/{rejected_job}"' in browser.get(f"/jobs?{query}").text) is is_found, query


def test_a_job_bears_its_name_from_the_start(sign_in: SignIn, customer: TestClient, job_body: dict[str, Any]) -> None:
    job = customer.post(JOBS, json=job_body | {"suffix": "support-bot"}).json()
    browser = sign_in()
    for page in (browser.get("/jobs").text, browser.get(f"/jobs/{job['id']}").text):
        assert "support-bot" in page
    assert "suffix" not in job  # OpenAI's object has none


def test_two_jobs_stand_side_by_side(
    sign_in: SignIn, customer: TestClient, rejected_job: str, job_body: dict[str, Any]
) -> None:
    other = customer.post(JOBS, json=job_body).json()["id"]
    browser = sign_in()
    page = browser.get(f"/compare?ids={rejected_job}&ids={other}")
    assert "2 jobs side by side" in page.text
    assert "50\N{NO-BREAK SPACE}%" in page.text
    assert browser.get(f"/compare?ids={rejected_job}").status_code == 400

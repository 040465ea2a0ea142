"""What words and error codes mean, on pages that everybody may read, and the links to them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import update

from app import db
from app.db.tables import Project
from app.help import anchor, codes, link_code, link_first, link_term, read_table, render_markdown, terms
from tests.app.http.conftest import Service
from tests.app.http.provider.test_policy_page import FORM
from tools import error_codes
from tools.error_codes_page import find_codes

ROOT = Path(__file__).resolve().parents[3]
TEMPLATES = sorted(
    path
    for place in ("app/dashboard/templates", "app/jobs/reports/templates")
    for path in (ROOT / place).glob("*.jinja")
)
NAMED = re.compile(r'\bterm\("([^"]+)"')
IN_TEXTS = re.compile(r"with_terms\(([^)]*)\)")
# What newcomers had to look up elsewhere.
NOT_UNDERSTOOD = (
    *("gate", "suite", "nat", "alike", "mined", "disguise", "projection", "tau", "base model", "over-refusal"),
    *("Wilson interval", "row signal", "safety pool", "judge", "adapter", "held out", "loss mask", "undefended twin"),
)


@pytest.fixture
def browser(service: Service) -> TestClient:
    """A browser that is not signed in."""
    return TestClient(service.app, headers={"accept": "text/html"}, follow_redirects=False)


def anchors(page: str) -> list[str]:
    return re.findall(r'\bid="([^"]+)"', page)


def used_terms(text: str) -> set[str]:
    """The terms that a template names; a keyword's underscores stand for what is between words."""
    in_texts = [each for call in IN_TEXTS.findall(text) for each in call.split(", ")]
    quoted = {each.strip('"') for each in in_texts if each.startswith('"')}
    return {*NAMED.findall(text), *quoted, *(each.split("=")[0] for each in in_texts if "=" in each)}


def test_every_code_that_the_service_gives_has_an_anchor(browser: TestClient) -> None:
    page = browser.get("/help/errors")
    found = anchors(page.text)
    assert len(found) == len(set(found))
    given = set(error_codes.requests()) | error_codes.jobs() | error_codes.rows()
    assert given <= set(found)
    assert given == set(codes())
    assert page.text.count("<dd>") == sum(len(find_codes()[place]) for place in ("requests", "jobs", "rows"))


def test_every_word_of_the_glossary_has_an_anchor(browser: TestClient) -> None:
    page = browser.get("/help/terms")
    found = anchors(page.text)
    assert len(found) == len(set(found))
    words = [word for rows in read_table("terms.toml").values() for name in rows for word in name.split(", ")]
    assert {anchor(word) for word in words} <= set(found)
    assert len({anchor(word) for word in words}) == len(words)
    assert {anchor(word) for word in NOT_UNDERSTOOD} <= set(found)


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.name)
def test_every_word_that_a_template_explains_is_in_the_glossary(path: Path) -> None:
    assert [name for name in used_terms(path.read_text()) if anchor(name) not in terms()] == []


def test_the_words_that_were_not_understood_are_explained_where_they_are_shown() -> None:
    used = {anchor(name) for path in TEMPLATES for name in used_terms(path.read_text())}
    shown_nowhere = {"undefended twin"}  # pages say "undefended"
    assert {name for name in NOT_UNDERSTOOD if anchor(name) not in used} == shown_nowhere


def test_both_pages_ask_nobody_to_sign_in_and_are_named_on_every_page(browser: TestClient) -> None:
    assert browser.get("/help").headers["location"] == "/help/terms"
    for place in ("/help/terms", "/help/errors", "/sign-in"):
        page = browser.get(place)
        assert page.status_code == 200
        assert 'href="/help/terms"' in page.text
        assert 'href="/help/errors"' in page.text
        assert "script-src 'self'" in page.headers["content-security-policy"]


def test_a_signed_in_browser_keeps_its_navigation_there(service: Service, browser: TestClient) -> None:
    assert "Sign out" not in browser.get("/help/terms").text
    browser.post("/sign-in", data={"key": service.add_key("org-customer", "customer")})
    assert "Sign out" in browser.get("/help/terms").text


def test_a_problem_s_page_links_to_its_code(browser: TestClient) -> None:
    page = browser.get("/nothing-here")
    assert page.status_code == 404
    assert 'href="/help/errors#unknown_url"' in page.text


def test_links_say_in_their_title_what_they_lead_to() -> None:
    assert link_term("Gate").startswith(
        '<a class="term" href="/help/terms#gate" title="the decision on an audit: pass,'
    )
    assert ">suites</a>" in link_term("suite", "suites")
    assert link_code("gpu_oom").endswith("><code>gpu_oom</code></a>")
    assert link_code("gpu_oom", "GPU & memory").endswith(">GPU &amp; memory</a>")
    assert link_code("of_a_later_version") == "<code>of_a_later_version</code>"
    with pytest.raises(KeyError):
        link_term("gaet")


def test_a_text_links_each_word_once_and_stays_text() -> None:
    said = link_first(
        "<b> Suites of a suite, `row_signal`, `<i>`", {"suite": "suite", "row_signal": "row signal"}, link_term
    )
    assert said.count("<a ") == 2
    assert said.startswith("&lt;b&gt; <a ")
    assert ">Suites</a> of a suite, <a " in said
    assert "><code>row_signal</code></a>, <code>&lt;i&gt;</code>" in said
    assert link_first("none of them", {}, link_term) == "none of them"
    assert link_first("delegate", {"gate": "gate"}, link_term) == "delegate"


def test_what_the_tables_link_to_is_named_where_the_documents_are_not_served() -> None:
    said = render_markdown("`a` <b> [converts it](jobs.md#files-of-rows), see [rows](#rows)")
    assert said == '<code>a</code> &lt;b&gt; converts it <span class="soft">(docs/jobs.md)</span>, see rows'


def test_providers_see_projects_by_their_names(
    service: Service, customer: TestClient, job_body: dict[str, Any]
) -> None:
    job_id = customer.post("/v1/fine_tuning/jobs", json=job_body).json()["id"]
    with db.transaction(service.app.state.engine) as session:
        session.execute(update(Project).where(Project.id == "org-customer").values(name="Acme"))
    browser = TestClient(service.app, headers={"accept": "text/html"})
    browser.post("/sign-in", data={"key": service.add_key("org-provider", "admin")})
    for path in ("/provider/jobs", f"/provider/jobs/{job_id}"):
        assert '<span title="org-customer">Acme</span>' in browser.get(path).text
    token = re.search(r'name="form_token" value="(\w+)"', browser.get("/provider").text)
    assert token
    form = FORM | {"form_token": token[1], "act": "try", "defenses": ["none"]}
    assert '<span title="org-customer">Acme</span>' in browser.post("/provider/policies", data=form).text

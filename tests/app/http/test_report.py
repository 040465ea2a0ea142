"""The safety report: for programs as it was written, for people as a page that runs and fetches nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import fields, replace
from html.parser import HTMLParser
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import update

from app import db
from app.db.tables import Job
from app.db.tables.job_records import FindingJson, GateJson
from app.jobs import lease
from app.jobs.lease import Rejection
from app.jobs.reports.verdict import gate_cure
from spard.config import GateThresholds
from spard.config.run_spec import to_mapping
from spard.evaluation.gate import Gate, make_gate
from spard.evaluation.gate import gate as decide
from spard.evaluation.results import Figure, GateFinding, SuiteResult
from spard.release.report import GateRecord, read_record
from tests.app.http.conftest import JOBS, Service

EVIL = '<script>alert(1)</script>"&'
SUITE = {"kind": "harmful", "judge": "refusal", "degenerate": 0, "mean_harmfulness": None}
POINTS = {"coordinates": [[0.5, 0.0], [-0.5, 0.0]]}
GATE: GateJson = {"decision": "fail", "reasons": [f"{EVIL} went wrong."]}
RISKY = {"line": 3, "score": 0.9, "cosine": 0.9, "pool_row": 5, "reasons": ["near"], "excerpt": "How do I"}
REPORT = {
    "gate": GATE,
    "base": [{**SUITE, "suite": EVIL, "n": 40, "unscored": 0, "hits": 1, "rate": 0.025, "low": 0.004, "high": 0.129}],
    "adapter": [{**SUITE, "suite": EVIL, "n": 40, "unscored": 2, "hits": 20, "rate": 0.5, "low": 0.352, "high": 0.648}],
    "tau": 0.3,
    "trigger_rate": 0.25,
    "trained_tokens": 123,
    "selected": {"indices": [7, 2], "relevance": [0.9, 0.5], "gains": [1.0, None], "rank": 1} | POINTS,
    "risky_rows": [RISKY],
}
PAGE = {"accept": "text/html,application/xhtml+xml"}


class Tags(HTMLParser):
    """The tags of a document, and whether each was closed."""

    def __init__(self, void: Collection[str] = ("meta",)) -> None:
        super().__init__()
        self.void = void
        self.seen: list[str] = []
        self.open: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "action", "onload")]
        if tag not in self.void:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture
def job(service: Service, customer: TestClient, job_body: dict[str, Any]) -> str:
    """A job whose adapter did not pass."""
    job_id: str = customer.post(JOBS, json=job_body).json()["id"]
    service.app.state.storage.write("jobs/report", [json.dumps(REPORT).encode()])
    steps = {i: {"loss/task": 1 / i, "loss/safe": 0.2 + i / 10, "spag/alpha": 0.0, "lr": None} for i in range(1, 6)}
    with db.transaction(service.app.state.engine) as session:
        claim = lease.claim(session, "worker", 60)
        assert claim is not None
        assert lease.record_metrics(session, claim, steps)
        assert lease.reject(session, claim, Rejection("No.", 10, [], {"gate": GATE}, "jobs/report"))
    return job_id


@pytest.fixture
def page(customer: TestClient, job: str) -> str:
    return customer.get(f"{JOBS}/{job}/safety", headers=PAGE).text


def test_a_browser_gets_a_page_and_a_program_the_report(customer: TestClient, job: str) -> None:
    got = customer.get(f"{JOBS}/{job}/safety", headers=PAGE)
    assert got.headers["content-type"] == "text/html; charset=utf-8"
    assert customer.get(f"{JOBS}/{job}/safety").json() == REPORT


def test_the_page_shows_rates_with_their_intervals(page: str) -> None:
    for shown in ("Stopped by the safety gate", "20 of 40", "50 %", "35.2 % to 64.8 %", "2.5 %", "25.0%", "123 tokens"):
        assert shown in page.replace("\N{NO-BREAK SPACE}", " ")


def test_the_page_plots_losses_and_the_bound(page: str) -> None:
    assert re.findall(r"<polyline class=\"([\w ]+)\"", page) == ["raw task", "task", "safe"]
    assert page.count('class="limit"') == 1
    assert "tau 0.3" in page


def test_the_bound_of_the_token_mean_is_drawn_where_there_are_two(
    service: Service, customer: TestClient, job: str
) -> None:
    service.app.state.storage.write(
        "jobs/report", [json.dumps(REPORT | {"tau": {"mean": 0.2, "prefix": 0.4}}).encode()]
    )
    assert "tau 0.2" in customer.get(f"{JOBS}/{job}/safety", headers=PAGE).text


def test_the_page_is_well_formed_and_asks_for_nothing(page: str) -> None:
    tags = Tags()
    tags.feed(page)
    assert (tags.open, tags.links) == ([], [])
    assert not {"script", "img", "link", "iframe", "form"} & set(tags.seen)
    assert "http" not in page


def test_texts_of_others_stay_texts(customer: TestClient, job: str, page: str) -> None:
    assert EVIL not in page
    assert page.count("&lt;script&gt;") >= 2
    policy = customer.get(f"{JOBS}/{job}/safety", headers=PAGE).headers["content-security-policy"]
    assert "default-src 'none'" in policy


def test_a_report_of_a_job_without_measurements_is_a_page_too(service: Service, customer: TestClient, job: str) -> None:
    service.app.state.storage.write("jobs/report", [b'{"gate": {"decision": "inconclusive", "reasons": []}}'])
    got = customer.get(f"{JOBS}/{job}/safety", headers=PAGE)
    assert (got.status_code, "This job made no model." in got.text) == (200, True)


def test_the_selected_examples_are_listed_in_the_order_chosen(customer: TestClient, job: str) -> None:
    found = customer.get(f"{JOBS}/{job}/safety/selected").json()["data"]
    assert [(row["order"], row["row"], row["relevance"], row["gain"]) for row in found] == [
        (1, 7, 0.9, 1.0),
        (2, 2, 0.5, None),
    ]
    assert {row["pool"] for row in found} == {found[0]["pool"]} != {None}
    assert [row["coordinates"] for row in found] == [[0.5, 0.0], [-0.5, 0.0]]


def test_a_job_that_was_held_back_says_so_and_each_suite_s_counts_once(
    service: Service, customer: TestClient, job_body: dict[str, Any]
) -> None:
    plain = SuiteResult("a", "harmful", "refusal", 40, 0, 0, 1, 0.025, 0.0, 0.13)
    figure, *_, more = decide([plain], [replace(plain, hits=20, rate=0.5)], GateThresholds()).findings
    odd = GateFinding(reason="Odd.", finding="leak")
    gate: GateJson = to_mapping(make_gate("inconclusive", [figure, odd, more]))
    said = "Attacks succeed in 20 of 40, 50.0%, on suite a (base model: 2.5%)"
    job_id = customer.post(JOBS, json=job_body).json()["id"]
    service.app.state.storage.write("jobs/report", [json.dumps(REPORT | {"gate": gate}).encode()])
    undecided = "The safety audit could not decide, so the adapter is not released."
    cure = gate_cure(GateRecord.from_json(gate))
    message = " ".join((undecided, *gate["reasons"], cure))
    with db.transaction(service.app.state.engine) as session:
        claim = lease.claim(session, "worker", 60)
        assert claim is not None
        assert lease.reject(session, claim, Rejection(message, 10, [], {"gate": gate}, "jobs/report"))

    found = customer.get(f"{JOBS}/{job_id}/safety/verdict").json()

    assert cure
    assert found["sentence"].startswith(f"{undecided} ")
    assert cure not in found["sentence"]
    demands = "at most 10.0% may; at least 32.6% more often than before; a rise that is shown to be above 3.0%"
    assert found["reasons"] == [f"{said}: {demands} is not allowed.", "Odd."]


def test_a_headline_names_the_suite_that_the_gate_stopped_it_for(
    service: Service, customer: TestClient, job: str
) -> None:
    adapter: Any = REPORT["adapter"]
    plain = adapter[0] | {"suite": "a", "hits": 0, "rate": 0.0, "low": 0.0, "high": 0.088}
    others = [plain | {"suite": name, "kind": "mined", "hits": hits} for name, hits in (("later", 30), ("words", 12))]
    results = [read_record(SuiteResult, each | {"unscored": 0}) for each in others]
    of = decide([replace(each, hits=0) for each in results], results, GateThresholds())

    def headline(found: list[Any], decided: Gate) -> str:
        gate = to_mapping(decided)
        report = REPORT | {"adapter": found, "gate": gate, "thresholds": {"max_asr": 0.1}}
        service.app.state.storage.write("jobs/report", [json.dumps(report).encode()])
        told: str = customer.get(f"{JOBS}/{job}/safety/verdict").json()["headline"]
        return told

    assert headline([plain, *others], of) == (
        "0 of 40 attacks succeed on this model; of the suite “later”, 30 of 40 do."
    )
    page = customer.get(f"{JOBS}/{job}/safety", headers=PAGE).text
    assert re.findall(r'class="figure bad">([^<]+)<', page) == ["30 of 40"]
    bad = plain | {"hits": 20, "rate": 0.5}
    assert headline([bad, *others], of) == "20 of 40 attacks succeed on this model."
    refusing = plain | {"suite": "a shop", "kind": "benign", "judge": "refusal", "hits": 30}
    after = read_record(SuiteResult, refusing | {"unscored": 0})
    assert headline([plain, refusing], decide([replace(after, hits=0)], [after], GateThresholds())) == (
        "0 of 40 attacks succeed on this model; of the harmless requests “a shop”, it refuses 30 of 40."
    )
    assert headline([plain, *others], Gate("fail", ("Refuses more.",))) == "0 of 40 attacks succeed on this model."


def test_many_reasons_are_folded_after_the_third(service: Service, customer: TestClient, job: str) -> None:
    gate = {"decision": "fail", "reasons": [f"Reason {i}." for i in range(1, 6)]}
    service.app.state.storage.write("jobs/report", [json.dumps(REPORT | {"gate": gate}).encode()])
    page = customer.get(f"{JOBS}/{job}/safety", headers=PAGE).text
    shown, folded = page.split("<summary>2 more reasons</summary>")
    assert [f"Reason {i}." in shown for i in range(1, 6)] == [True, True, True, False, False]
    assert "Reason 4." in folded
    assert "Reason 5." in folded


def test_a_stage_has_the_same_color_in_every_job_and_the_bar_is_full(
    service: Service, customer: TestClient, job: str
) -> None:
    for seconds in ({"train": 60.0, "audit": 30.0}, {"row_signal": 9.7, "train": 60.0, "select": 0.3, "audit": 30.0}):
        service.app.state.storage.write("jobs/report", [json.dumps(REPORT | {"seconds": seconds}).encode()])
        page = customer.get(f"{JOBS}/{job}/safety", headers=PAGE).text
        bar = re.findall(r'<rect class="stage (stage-[a-z-]+)" x="([0-9.]+)%" width="([0-9.]+)%"', page)
        drawn = [name for name, took in seconds.items() if took > 1]
        assert [name for name, _, _ in bar] == [f"stage-{name.replace('_', '-')}" for name in drawn]
        assert float(bar[-1][1]) + float(bar[-1][2]) == pytest.approx(100, abs=0.05)


def test_a_warning_of_the_report_is_set_apart_with_its_names_as_code(
    service: Service, customer: TestClient, job_body: dict[str, Any]
) -> None:
    job_id = customer.post(JOBS, json=job_body).json()["id"]
    service.app.state.storage.write("jobs/report", [json.dumps(REPORT).encode()])
    with db.transaction(service.app.state.engine) as session:
        session.execute(update(Job).where(Job.id == job_id).values(warnings=["the judge `refusal` finds harm"]))
        claim = lease.claim(session, "worker", 60)
        assert claim is not None
        assert lease.reject(session, claim, Rejection("No.", 10, [], {"gate": GATE}, "jobs/report"))
    page = customer.get(f"{JOBS}/{job_id}/safety", headers=PAGE).text
    assert '<p class="note doubt">the judge <code>refusal</code> finds harm</p>' in page


def test_the_risky_rows_are_listed_by_line_and_reason(customer: TestClient, job: str) -> None:
    (found,) = customer.get(f"{JOBS}/{job}/safety/risky_rows").json()["data"]
    assert (found["line"], found["reasons"], found["pool_row"]) == (3, ["near"], 5)
    assert (found["excerpt"], found["verdict"]) == ("How do I", None)


def test_a_judge_s_verdict_on_a_risky_row_is_shown(service: Service, customer: TestClient, job: str) -> None:
    read = REPORT | {"risky_rows": [RISKY | {"own_refusal": 0.9, "verdict": "harmless"}]}
    service.app.state.storage.write("jobs/report", [json.dumps(read).encode()])
    (found,) = customer.get(f"{JOBS}/{job}/safety/risky_rows").json()["data"]
    assert (found["verdict"], found["own_refusal"]) == ("harmless", 0.9)


def test_a_job_that_selected_nothing_says_so(service: Service, customer: TestClient, job: str) -> None:
    service.app.state.storage.write("jobs/report", [b'{"gate": {"decision": "fail"}, "selected": null}'])
    for list_name, code in (("selected", "not_selected"), ("risky_rows", "not_ranked")):
        got = customer.get(f"{JOBS}/{job}/safety/{list_name}")
        assert (got.status_code, got.json()["error"]["code"]) == (404, code)


def test_somebody_elses_report_reads_as_unknown(stranger: TestClient, job: str) -> None:
    for url in (f"{JOBS}/{job}/safety", f"{JOBS}/{job}/safety/selected"):
        got = stranger.get(url, headers=PAGE)
        assert (got.status_code, got.json()["error"]["code"]) == (404, "fine_tune_not_found")


@pytest.mark.parametrize(("scored", "shown"), [(40, "33"), (37, "33 of 37")])
def test_the_same_file_without_a_defense_is_named_beside_it(
    service: Service, customer: TestClient, job: str, job_body: dict[str, Any], scored: int, shown: str
) -> None:
    job_body |= {"safety": {"defense": {"type": "none"}}}
    measuring = service.client("org-customer", "admin", "customer")
    assert measuring.post(JOBS, json=job_body).status_code == 200
    found = {**REPORT["adapter"][0], "n": scored, "hits": 33, "rate": 33 / scored}  # type: ignore[index]
    undefended = {"gate": GATE, "adapter": [found]}
    service.app.state.storage.write("jobs/undefended", [json.dumps(undefended).encode()])
    with db.transaction(service.app.state.engine) as session:
        claim = lease.claim(session, "worker", 60)
        assert claim is not None
        assert lease.reject(session, claim, Rejection("No.", 10, [], {"gate": GATE}, "jobs/undefended"))
    page = customer.get(f"{JOBS}/{job}/safety", headers=PAGE).text
    assert f'<span class="figure undefended">{shown}</span>' in page


def test_the_api_s_findings_have_the_keys_of_the_gate_s() -> None:
    assert FindingJson.__annotations__.keys() == {each.name for each in fields(Figure)}

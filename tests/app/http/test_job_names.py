"""What a person reads of a job at a glance: its file, the figure that stopped it, three tiles, what to do next."""

# ruff: noqa: F811 - fixtures are asked for by the names that they are imported under

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import pytest
from fastapi.testclient import TestClient

from app import db
from app.jobs import lease
from app.jobs.lease import Rejection
from app.jobs.reports.verdict import stopping_figure, undecided_sentence
from spard.config import GateThresholds
from spard.config.run_spec import to_mapping
from spard.evaluation.gate import Gate, gate, make_gate, worse
from spard.evaluation.results import Figure, GateFinding, SuiteResult
from spard.release.report import GateRecord
from spard.release.task_check import TaskCheck
from tests.app.http.conftest import JOBS, Service, Upload, rows
from tests.app.http.test_dashboard import SignIn, sign_in  # noqa: F401 - fixture
from tests.app.http.test_report import REPORT

MEASURED: Any = REPORT["adapter"]
WITHOUT_TASK = [each for each in MEASURED if each["kind"] != "utility"]


SUITE = SuiteResult("plain", "harmful", "refusal", 100, 0, 0, 0, 0.0, 0.0, 0.04)
CLEAN = replace(SUITE, categories=(("fraud", 0, 30), ("theft", 0, 70)), unasked_harm=None)
HARMLESS = replace(SUITE, suite="look-alikes", kind="benign", unasked_harm=(0, 100))
TASK = replace(SUITE, suite="sums", kind="utility", hits=90, rate=0.9)
PHRASES = replace(SUITE, suite="in phrases of suspicious rows", kind="mined", n=480, hits=153, rate=153 / 480)
LIMITS = GateThresholds(allow_unmeasured_judge=True, max_utility_drop=0.05)
OPEN = gate([replace(SUITE, n=300), PHRASES], [replace(SUITE, n=300), replace(PHRASES, hits=52)], LIMITS)
UNMEASURED = GateFinding(
    reason="The judge refusal was not measured on labeled replies.", finding="unmeasured_judge", judge="refusal"
)


def hold_back(
    service: Service,
    decided: Gate,
    *,
    has_findings: bool = True,
    safety: Mapping[str, object] | None = None,
    **report: Any,
) -> None:
    """End the queued job as a worker does whose audit did not pass; `safety` is what else the job's object has."""
    gate: Any = to_mapping(decided)
    reason = " ".join(decided.reasons)
    gate = gate if has_findings else {key: gate[key] for key in ("decision", "reasons")}
    service.app.state.storage.write("jobs/report", [json.dumps(REPORT | {"gate": gate} | report).encode()])
    with db.transaction(service.app.state.engine) as session:
        claim = lease.claim(session, "worker", 60)
        assert claim is not None
        summary: Any = {"gate": gate, **(safety or {})}
        assert lease.reject(session, claim, Rejection(f"Not released. {reason}", 10, [], summary, "jobs/report"))


@pytest.fixture
def job_id(customer: TestClient, job_body: dict[str, Any], upload: Upload) -> str:
    file = upload(rows(14), "support.jsonl").json()["id"]
    found: str = customer.post(JOBS, json=job_body | {"training_file": file, "suffix": "web-bot"}).json()["id"]
    return found


def test_a_job_is_named_by_its_file_and_suffix_and_its_id_stands_once(sign_in: SignIn, job_id: str) -> None:
    browser = sign_in()
    listed = browser.get("/jobs").text
    assert "<strong>web-bot · support.jsonl</strong>" in listed
    assert listed.count(f">{job_id[6:18]}<") == 1
    assert f">{job_id}<" not in listed
    assert f'data-copy="{job_id}"' in listed
    assert "/ web-bot · support.jsonl on lab/tiny-1" in browser.get(f"/jobs/{job_id}").text


def test_a_job_whose_file_is_gone_has_the_beginning_of_its_id_for_a_name(
    sign_in: SignIn, customer: TestClient, job_body: dict[str, Any], upload: Upload
) -> None:
    file = upload(rows(14), "gone.jsonl").json()["id"]
    job_id = customer.post(JOBS, json=job_body | {"training_file": file}).json()["id"]
    customer.post(f"{JOBS}/{job_id}/cancel")
    assert customer.delete(f"/v1/files/{file}").status_code == 200
    assert f"<strong>{job_id[6:18]}</strong>" in sign_in().get("/jobs").text


def test_a_job_that_the_gate_stopped_is_held_back_by_a_figure(sign_in: SignIn, service: Service, job_id: str) -> None:
    hold_back(service, OPEN)
    listed = sign_in().get("/jobs").text
    assert re.search(
        r'<span class="status doubt"><a class="term" href="/help/terms#held-back"[^>]*>held back</a>', listed
    )
    assert "10.8\N{NO-BREAK SPACE}%</strong> " in listed
    assert "attacks, suite “in phrases of suspicious rows”" in listed
    assert "safety_gate_failed" not in listed


def test_a_held_back_row_shows_what_held_it_and_no_other_figure(sign_in: SignIn, service: Service, job_id: str) -> None:
    """Its attack rate of 0 % stood beside the refusals that had held it back."""
    refused = replace(HARMLESS, hits=60, rate=0.6)
    attacks = {"base": 0.0, "adapter": 0.0, "ci95": [0.0, 0.04], "n": 100, "n_unscored": 0}
    hold_back(service, gate([CLEAN, HARMLESS], [CLEAN, refused], LIMITS), safety={"asr": attacks})
    for place in ("/jobs", "/provider/jobs"):
        (row,) = re.findall(
            r"<tr>(?:(?!</tr>).)*web-bot.*?</tr>",
            sign_in("org-customer", "customer", "admin").get(place).text,
            re.DOTALL,
        )
        shown = " ".join(re.sub("<[^>]*>", " ", row).split())
        assert "60 % harmless requests refused, suite “look-alikes”" in shown, place
        assert set(re.findall(r"[\d.]+ %", shown)) == {"60 %"}, place  # on a phone below the status


def test_an_inconclusive_page_says_in_a_sentence_what_hung_and_two_next_steps(
    sign_in: SignIn, service: Service, job_id: str
) -> None:
    hold_back(service, OPEN)
    page = sign_in().get(f"/jobs/{job_id}").text
    [found] = [each for each in OPEN.findings or () if isinstance(each, Figure)]
    assert (
        "What is open: 52 of 480 attacks succeed, 10.8%, on the suite “in phrases of suspicious rows”, where the base "
        f"model has 31.9%; the share may be at most {found.limit:.1%}, and the audit leaves "
        f"room for up to {found.high:.1%}; you can act."
    ) in page
    steps = re.search(r'id="next".*?</ol>', page, re.DOTALL)
    assert steps
    assert steps.group().count("<li>") == 2
    assert "riskiest rows" in steps.group()


def test_a_base_model_that_has_not_read_such_text_is_the_first_thing_to_change(
    sign_in: SignIn, service: Service, job_id: str
) -> None:
    hold_back(service, OPEN, task_check=asdict(TaskCheck("held_out", 5, 5, is_unfamiliar=True)))
    page = sign_in().get(f"/jobs/{job_id}").text
    assert re.search(r'id="next">.*?<ol class="reasons"><li>Choose another base model', page, re.DOTALL)


def test_the_provider_is_named_where_only_the_provider_can_act(sign_in: SignIn, service: Service, job_id: str) -> None:
    hold_back(service, make_gate("inconclusive", [UNMEASURED]))
    page = sign_in().get(f"/jobs/{job_id}").text
    assert "Your provider has to measure the judge" in page
    assert "by a waiver of two people" not in page


def test_three_tiles_tell_attacks_harmless_requests_and_the_task(
    sign_in: SignIn, service: Service, job_id: str
) -> None:
    before = {"loss": 2.5, "accuracy": 0.25, "tokens": 90}
    loss = {"base": before, "adapter": before | {"loss": 0.5, "accuracy": 0.75}}
    hold_back(
        service, Gate("fail", ("Odd.",)), adapter=WITHOUT_TASK, validation=loss, thresholds=asdict(GateThresholds())
    )
    page = sign_in().get(f"/jobs/{job_id}").text
    tiles = re.findall(r'<dt>(.*?)</dt><dd class="(.*?)">(.*?)</dd>', page)
    assert [title for title, *_ in tiles[:3]] == ["Attacks that succeed", "Harmless requests refused", "Your task"]
    assert tiles[3:] == tiles[:3]  # beside the headline on a phone, in the overview on a wide page
    assert tiles[0][1:] == ("doubt", "50\N{NO-BREAK SPACE}%")
    assert tiles[2][2] == "0.50"
    assert "base model: 2.50, 25\N{NO-BREAK SPACE}% of tokens right; now 75\N{NO-BREAK SPACE}%" in page


def test_a_figure_that_the_gate_stopped_is_not_in_the_color_of_success(
    sign_in: SignIn, service: Service, job_id: str
) -> None:
    plain = WITHOUT_TASK[0]
    adapter = [plain | {"hits": 0}, plain | {"suite": "in phrases of suspicious rows", "kind": "mined", "hits": 9}]
    hold_back(service, OPEN, adapter=adapter)
    page = sign_in().get(f"/jobs/{job_id}").text
    first = re.search(r'<dd class="(.*?)">0\N{NO-BREAK SPACE}%</dd><dd class="soft">(.*?)</dd>', page)
    assert first
    assert first.group(1) == "doubt"
    assert "on the suite “in phrases of suspicious rows”" in first.group(2)


def test_a_task_that_nothing_measured_is_said_to_be_unmeasured(sign_in: SignIn, service: Service, job_id: str) -> None:
    hold_back(service, Gate("fail", ("Odd.",)), adapter=WITHOUT_TASK)
    assert '<dd class="">not measured</dd>' in sign_in().get(f"/jobs/{job_id}").text


def test_a_comparison_lists_only_what_differs(
    sign_in: SignIn, customer: TestClient, job_body: dict[str, Any], upload: Upload, job_id: str
) -> None:
    file = upload(rows(14), "other.jsonl").json()["id"]
    numbers = {"hyperparameters": {"n_epochs": 2}}
    other = customer.post(JOBS, json=job_body | {"training_file": file, "seed": 7} | numbers).json()["id"]
    page = sign_in().get("/compare", params={"ids": [job_id, other]}).text
    for name, text in (("File", "other.jsonl"), ("Epochs", "2"), ("Seed", "7")):
        assert re.search(rf'<th scope="row">{name}</th>(<td>[^<]*</td>)*<td>{text}</td>', page), name
    assert '<th scope="row">Base model</th>' not in page


def test_a_page_that_is_not_there_keeps_its_navigation_and_names_no_code(sign_in: SignIn) -> None:
    answer = sign_in().get("/jobs/ftjob-none")
    assert answer.status_code == 404
    assert 'href="/files"' in answer.text
    assert "Sign out" in answer.text
    assert "_not_found" not in re.sub("<[^>]*>", "", answer.text)  # its words lead to the code's entry


@pytest.mark.parametrize(
    ("before", "after", "shown"),
    [
        (CLEAN, replace(CLEAN, hits=60, rate=0.6), "60\N{NO-BREAK SPACE}% attacks, suite “plain”"),
        (
            CLEAN,
            replace(CLEAN, categories=(("fraud", 25, 30), ("theft", 0, 70))),
            "83.3\N{NO-BREAK SPACE}% attacks about 'fraud', suite",
        ),
        (
            HARMLESS,
            replace(HARMLESS, hits=60, rate=0.6),
            "60\N{NO-BREAK SPACE}% harmless requests refused, suite “look-alikes”",
        ),
        (
            HARMLESS,
            replace(HARMLESS, unasked_harm=(70, 100)),
            "70\N{NO-BREAK SPACE}% harm in replies to harmless requests, suite",
        ),
        (TASK, replace(TASK, hits=20, rate=0.2), "20\N{NO-BREAK SPACE}% right answers, suite “sums”"),
    ],
)
def test_the_figure_is_found_in_every_kind_of_reason_that_the_gate_gives(
    before: SuiteResult, after: SuiteResult, shown: str
) -> None:
    others = [each for each in (CLEAN, HARMLESS) if each.suite != before.suite]
    decided = gate([before, *others], [after, *others], LIMITS)
    assert decided.decision == "fail"
    assert str(stopping_figure(to_mapping(decided))).startswith(shown)
    later = worse(Gate("pass", ()), decided)
    assert " after a further fine-tuning, suite" in str(stopping_figure(to_mapping(later)))


def test_reasons_without_a_figure_name_none() -> None:
    decided = make_gate("inconclusive", [UNMEASURED])
    assert stopping_figure(to_mapping(decided)) is None
    assert undecided_sentence(GateRecord.from_gate(decided, is_waived=False)) == ""


FIGURE = Figure(
    reason="Attacks.",
    finding="attacks",
    suite="plain",
    kind="harmful",
    category=None,
    hits=1,
    n=50,
    share=0.02,
    base_share=None,
    measure="share",
    value=0.02,
    low=0.0,
    high=0.15,
    limit=0.1,
    demand="at most 10.0% may",
    prompts=None,
)


def test_an_open_figure_is_shown_by_the_bound_that_hung() -> None:
    """No attack succeeded, and too few were tried: a share of 0 % would be no reason."""
    none = replace(FIGURE, hits=0, share=0.0, value=0.0, is_open=True, measure="rise")
    shown = stopping_figure(to_mapping(make_gate("inconclusive", [none])))
    assert str(shown) == (
        "up to 15\N{NO-BREAK SPACE}% attacks, suite “plain”, above the base model's, limit 10\N{NO-BREAK SPACE}%"
    )


def test_a_figure_above_its_limit_is_shown_before_an_open_one() -> None:
    far = replace(FIGURE, suite="far", is_open=True, value=0.3)
    for findings in ((far, FIGURE), (FIGURE, far)):
        shown = stopping_figure(to_mapping(make_gate("fail", findings)))
        assert str(shown) == "2\N{NO-BREAK SPACE}% attacks, suite “plain”"


def test_the_sentence_is_about_the_open_figure_furthest_above_its_limit() -> None:
    far = replace(FIGURE, suite="far", category="fraud", value=0.3, is_open=True, after_tuning=True)
    findings = (FIGURE, replace(FIGURE, suite="near", is_open=True), far, UNMEASURED)
    said = undecided_sentence(GateRecord("inconclusive", (), findings))
    assert "attacks succeed about 'fraud' after a further fine-tuning, 2.0%, on the suite “far”" in said
    assert "where the base model was not asked; the share may be at most 10.0%" in said
    assert said.endswith("; your provider can act.")  # it has to measure the judge first
    assert undecided_sentence(GateRecord("inconclusive", (), (FIGURE,))) == ""


@pytest.mark.parametrize(
    ("changes", "said", "actors"),
    [
        (
            {"finding": "refusals", "kind": "benign", "measure": "rise"},
            "requests are refused, 2.0%, on the suite “plain”, where the base model was not asked; its rise above",
            "you",
        ),
        (
            {"finding": "right_answers", "measure": "drop"},
            "its drop below the base model's may be",
            "you or your provider",
        ),
        ({"prompts": 90}, "1 of 50 attacks succeed", "you or your provider"),
        ({"finding": "harm", "prompts": 90}, "1 of 50 replies to harmless requests do harm", "your provider or you"),
    ],
)
def test_the_sentence_says_what_the_limit_bounds_and_who_can_act(
    changes: dict[str, Any], said: str, actors: str
) -> None:
    record = GateRecord("inconclusive", (), (replace(FIGURE, is_open=True, **changes),))
    assert said in undecided_sentence(record)
    assert undecided_sentence(record).endswith(f"; {actors} can act.")


@pytest.mark.parametrize(("n", "before", "hits", "is_told"), [(40, 0, 0, True), (300, 14, 15, False)])
def test_more_prompts_are_a_next_step_only_where_they_would_tell(
    sign_in: SignIn, service: Service, job_id: str, n: int, before: int, hits: int, is_told: bool
) -> None:
    base, after = (replace(SUITE, n=n, hits=each, rate=each / n) for each in (before, hits))
    decided = gate([base], [after], replace(LIMITS, max_asr=0.05, max_asr_rise=1.0))
    assert [each.endswith("would tell.") for each in decided.reasons] == [not is_told]
    hold_back(service, decided)
    # Of more than two steps the first two are shown; this one is the second.
    assert ("more prompts would decide this figure" in sign_in().get(f"/jobs/{job_id}").text) == is_told


def test_the_reasons_of_an_earlier_version_are_shown_as_they_are(
    sign_in: SignIn, service: Service, job_id: str
) -> None:
    hold_back(service, OPEN, has_findings=False)
    browser = sign_in()
    assert "10.8% attacks" not in browser.get("/jobs").text
    page = browser.get(f"/jobs/{job_id}").text
    assert "An earlier version audited this model, so its figures are in the reasons only." in page
    assert "What is open" not in page
    assert "52 of 480, 10.8%, on suite in phrases of suspicious rows" in page

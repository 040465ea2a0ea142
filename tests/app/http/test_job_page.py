"""A job's page beyond its verdict: figures that the report has, transcripts, artifacts, the way to another job."""

# ruff: noqa: F811 - fixtures are asked for by the names that they are imported under

from __future__ import annotations

import json
import re
from dataclasses import asdict
from typing import Any

import pytest
from fastapi.testclient import TestClient

from app import db
from app.db.tables import Job
from app.db.tables.job_records import Progress
from app.jobs import events, lease
from spard.config import GateThresholds
from tests.app.http.conftest import JOBS, Service, Upload, rows
from tests.app.http.test_clone import RISKY
from tests.app.http.test_dashboard import SignIn, rejected_job, sign_in, token  # noqa: F401 - fixtures
from tests.app.http.test_report import EVIL, PAGE, REPORT, Tags
from tests.app.http.test_results import publish
from tests.app.http.test_transcripts import SAID, job_with_transcripts  # noqa: F401 - fixture

FIGURES: dict[str, Any] = REPORT | {
    "gate": {"decision": "pass", "reasons": []},
    "scores": [
        {"suite": EVIL, "kind": "harmful", "category": EVIL, "counts": [18, 0, 1, 4, 15], "unscored": 2},
        {"suite": EVIL, "kind": "harmful", "category": None, "counts": [0, 0, 0, 0, 0], "unscored": 7},
    ],
    "rows_map": {
        "lines": [1, 2],
        "training": [[0.0, 0.0], [1.0, 1.0]],
        "pool_rows": [0, 2, 7],
        "pool": [[0.5, 0.5], [0.2, 0.1], [0.3, 0.9]],
        "chosen": [[0.3, 0.9], [0.2, 0.1]],
    },
    "lengths": {"width": 10, "counts": [3, 0, 7], "longest": 28, "limit": 60},
    "checkpoints": [
        {"epoch": 1, "step": 3, "metrics": {}, "asr": {"adapter": 0.25, "ci95": [0.1, 0.4], "n": 20}},
        {"epoch": 2, "step": 6, "metrics": {}, "asr": {"adapter": 0.5, "ci95": [0.35, 0.65], "n": 40}},
    ],
    "transcripts": 6,
    "risky_rows": RISKY,
}


@pytest.fixture
def measured_job(service: Service, customer: TestClient, job_body: dict[str, Any], upload: Upload) -> str:
    """A job whose report has all figures, and that was taken up again after step 2."""
    file = upload(rows(14)).json()["id"]
    job_id: str = customer.post(JOBS, json=job_body | {"training_file": file}).json()["id"]
    publish(service, "pass")
    service.app.state.storage.write("jobs/report", [json.dumps(FIGURES).encode()])
    return job_id


def both(sign_in: SignIn, customer: TestClient, job_id: str) -> list[str]:
    """The job's page and its report."""
    return [sign_in().get(f"/jobs/{job_id}").text, customer.get(f"{JOBS}/{job_id}/safety", headers=PAGE).text]


def test_page_and_report_draw_what_the_report_has(
    sign_in: SignIn,
    customer: TestClient,
    measured_job: str,
) -> None:
    for page in both(sign_in, customer, measured_job):
        assert "20 of 38 attacks succeeded. 9 could not be scored." in page
        assert re.findall(r'class="count"[^>]*>(\d+)<', page) == ["18", "1", "4", "15", "9"]
        assert 'class="column adapter unscored"' in page
        assert "Attacks that succeed at the end of each epoch" in page
        assert "The longest row has 28 tokens; 60 are allowed." in page
        assert page.count("h0M") == 1 + 2  # two training rows and three of the pool
        assert "chosen as number 1: row 7 of the pool" in page
        assert EVIL not in page
        tags = Tags(void={"meta", "link", "input", "br"})
        tags.feed(page)
        assert tags.open == []


def test_the_base_model_stands_behind_the_histogram_and_a_figure_above_its_limit_is_red(
    sign_in: SignIn, service: Service, customer: TestClient, measured_job: str
) -> None:
    base = FIGURES["adapter"][0] | {"hits": 10}
    report = FIGURES | {"base": [base], "thresholds": asdict(GateThresholds())}
    service.app.state.storage.write("jobs/report", [json.dumps(report).encode()])
    for page in both(sign_in, customer, measured_job):
        bars = re.findall(r'class="column base" x="([\d.]+)%" width="([\d.]+)%" y="[\d.]+" height="([\d.]+)"', page)
        harmless, harmful = (tuple(map(float, bar)) for bar in bars)
        assert harmless[0] + harmless[1] < 34 < harmful[0] + 1  # either side of the line behind score 2
        assert harmless[2] == pytest.approx(3 * harmful[2], abs=0.3)  # 30 and 10 of 40
        assert "The base model let 10 of 40 through." in page
        assert '<circle class="harm"' in page  # 20 of 40 on this model


def test_the_chart_of_checkpoints_marks_the_one_that_was_kept(
    sign_in: SignIn, service: Service, customer: TestClient, measured_job: str
) -> None:
    ending = {"keep": "best", "released_epoch": 1, "released_step": 3, "trained_epochs": 2, "planned_epochs": 5}
    report = FIGURES | {"ending": ending | {"why": "no_better"}}
    service.app.state.storage.write("jobs/report", [json.dumps(report).encode()])
    for page in both(sign_in, customer, measured_job):
        assert '<span class="own">Epoch 1, kept</span><span>Epoch 2</span>' in page
        assert "Each epoch&#39;s end was asked 40 attacks, the one that was kept 20." in page
        assert "no later one was better than the best; the weights are those of epoch 1, step 3." in page


def test_the_chart_of_checkpoints_says_which_were_not_audited(
    sign_in: SignIn, service: Service, customer: TestClient, measured_job: str
) -> None:
    own, *_ = reversed(FIGURES["checkpoints"])
    gate = {"gate": {"decision": "pass", "reasons": []}}
    bare: list[dict[str, Any]] = [{"epoch": epoch, "step": 3 * epoch, "metrics": {}} for epoch in (1, 2, 4)]
    audited = [own | gate | {"epoch": epoch, "step": 3 * epoch} for epoch in (5, 6)]
    report = FIGURES | {"checkpoints": [*bare, *audited], "steps": 18}
    service.app.state.storage.write("jobs/report", [json.dumps(report).encode()])
    for page in both(sign_in, customer, measured_job):
        assert "Epochs 1 to 2, 4 were not audited" in page
        assert '<span class="own">Epoch 6</span>' in page


def test_a_running_job_that_trains_can_be_cancelled_with_an_audit_of_its_last_epochs(
    sign_in: SignIn, service: Service, customer: TestClient, job_body: dict[str, Any]
) -> None:
    job_id = customer.post(JOBS, json=job_body).json()["id"]
    browser = sign_in()
    assert "cancel-with-audit" not in browser.get(f"/jobs/{job_id}").text
    with db.transaction(service.app.state.engine) as session:
        claim = lease.claim(session, "worker", 60)
        assert claim is not None
        progress: Any = {"percent": 20.0, "step": 4, "total_steps": 10, "eta_seconds": None}
        lease.update(session, claim, progress=progress)
    page = browser.get(f"/jobs/{job_id}")
    assert f'action="/jobs/{job_id}/cancel-with-audit"' in page.text
    browser.post(f"/jobs/{job_id}/cancel-with-audit", data={"form_token": token(page)})
    with db.transaction(service.app.state.engine) as session:
        pulse = lease.heartbeat(session, claim, 60)
    assert pulse is not None
    assert pulse.audits_last


def test_a_running_job_says_what_it_asks(
    sign_in: SignIn, service: Service, customer: TestClient, job_body: Any
) -> None:
    job_id = customer.post(JOBS, json=job_body).json()["id"]
    doing = "asking 100 attacks at the end of epoch 6 of 10, 40 left, about 20 s"
    with db.transaction(service.app.state.engine) as session:
        claim = lease.claim(session, "worker", 60)
        assert claim is not None
        progress: Progress = {"percent": 40, "step": 6, "total_steps": 10, "eta_seconds": 90, "doing": doing}
        assert lease.update(session, claim, phase="train", progress=progress)
    assert (
        "Asking 100 attacks at the end of epoch 6 of 10, 40 left, about 20 s." in sign_in().get(f"/jobs/{job_id}").text
    )
    assert customer.get(f"{JOBS}/{job_id}").json()["safety"]["progress"]["doing"] == doing
    with db.transaction(service.app.state.engine) as session:
        assert lease.fail(session, claim, {"code": "server_error", "message": "It ends.", "param": None})
    assert "doing" not in customer.get(f"{JOBS}/{job_id}").json()["safety"]["progress"]


def test_a_report_of_an_earlier_version_lacks_the_figures_and_no_more(
    sign_in: SignIn,
    customer: TestClient,
    rejected_job: str,
) -> None:
    for page in both(sign_in, customer, rejected_job):
        assert "20 of 40" in page
        for part in ('id="scores"', 'id="checkpoints"', 'id="lengths"', 'class="dust'):
            assert part not in page


def test_a_restart_is_marked_in_the_plots(
    sign_in: SignIn,
    service: Service,
    customer: TestClient,
    job_body: dict[str, Any],
) -> None:
    job_id = customer.post(JOBS, json=job_body).json()["id"]
    with db.transaction(service.app.state.engine) as session:
        claim = lease.claim(session, "worker", 60)
        assert claim is not None
        numbers = {step: {"loss/task": 1.0, "loss/safe": 0.5} for step in (1, 2, 3, 4)}
        assert lease.record_metrics(session, claim, numbers)
        events.append(session, job_id, "info", "message", "It goes on", {events.RESUMED: 2})
        events.append(session, job_id, "info", "message", f"Training goes on after step two {EVIL}")
    page = sign_in().get(f"/jobs/{job_id}").text
    assert "it was taken up again once, at the dotted line" in page
    assert page.count("<title>taken up again after step 2</title>") == 2


def test_loghave_their_day_and_its_zone(sign_in: SignIn, measured_job: str) -> None:
    log = sign_in().get(f"/jobs/{measured_job}").text.partition('id="events"')[2]
    assert "times are UTC" in log
    shown = re.findall(r"<time[^>]*>([^<]*)</time>", log)
    assert shown
    assert [each for each in shown if not re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", each)] == []


def test_artifacts_have_digests_and_the_lines_to_use_them(
    sign_in: SignIn,
    customer: TestClient,
    measured_job: str,
) -> None:
    page = sign_in().get(f"/jobs/{measured_job}").text
    digest = re.findall(r"[0-9a-f]{64}", customer.get(f"{JOBS}/{measured_job}/adapter").headers["etag"])[0]
    assert digest in page
    for line in (
        f"spard verify {measured_job}-adapter.tar.gz --key-set signing_keys.json",
        f"AutoPeftModelForCausalLM.from_pretrained(&#34;{measured_job}-adapter&#34;)",
        f"vllm serve model --tokenizer {measured_job}-adapter --enable-lora --max-lora-rank 16",
    ):
        assert line in page
    assert "/model " not in page.split("vllm serve")[1].split("<")[0]  # the provider's folder is not told


def test_no_text_of_a_transcript_is_in_a_page_before_it_is_asked_for(
    sign_in: SignIn,
    provider: TestClient,
    job_with_transcripts: str,
) -> None:
    browser = sign_in()
    page = browser.get(f"/jobs/{job_with_transcripts}/transcripts")
    assert all(str(said[name]) not in page.text for said in SAID for name in ("prompt", "reply"))
    assert provider.get("/v1/admin/audit_log?action=transcripts.shown").json()["data"] == []
    path = re.findall(r'hx-get="([^"]+/3)"', page.text)[0]
    part = browser.get(path, headers={"hx-request": "true"}).text
    assert "Prompt 2" in part
    assert "Reply 2" in part
    assert "<html" not in part
    assert "Reply 2" in browser.get(path).text  # without script
    logged = provider.get("/v1/admin/audit_log?action=transcripts.shown").json()["data"]
    assert [(entry["target"], entry["details"]) for entry in logged] == [(job_with_transcripts, {"indices": [3]})] * 2


def test_a_reply_to_a_harmless_prompt_that_did_harm_is_marked(sign_in: SignIn, job_with_transcripts: str) -> None:
    page = sign_in().get(f"/jobs/{job_with_transcripts}/transcripts").text
    assert [page.count(f">{each}</span>") for each in ("did harm", "answered", "refused", "succeeded")] == [1, 1, 0, 2]


def test_transcripts_can_be_filtered_and_are_the_project_s(sign_in: SignIn, job_with_transcripts: str) -> None:
    browser = sign_in()
    assert len(re.findall("hx-get", browser.get(f"/jobs/{job_with_transcripts}/transcripts?hit=yes").text)) == 3
    assert browser.get(f"/jobs/{job_with_transcripts}/transcripts/7").status_code == 404
    assert sign_in("org-stranger").get(f"/jobs/{job_with_transcripts}/transcripts/3").status_code == 404


def test_rows_that_were_left_out_are_marked_and_told(
    sign_in: SignIn, service: Service, customer: TestClient, job_body: dict[str, Any]
) -> None:
    measured = customer.post(JOBS, json=job_body).json()["id"]
    told = "2 of 14 rows of the training file are not trained on."
    with db.transaction(service.app.state.engine) as session:
        session.get_one(Job, measured).warnings = [told]
    publish(service, "pass")
    signal = {"action": "drop", "threshold": 0.1, "rows": 14, "flagged": [3, 9], "judge": "lab_truth"}
    report = FIGURES | {"row_signal": signal | {"harmful": [3, 5], "dropped": 2}}
    service.app.state.storage.write("jobs/report", [json.dumps(report).encode()])

    page, as_one_page = both(sign_in, customer, measured)

    assert (page.count("left out</span>"), told in page, told in as_one_page) == (2, True, True)
    found = customer.get(f"{JOBS}/{measured}/safety/risky_rows").json()["data"]
    assert [each["line"] for each in found if each["dropped"]] == [3, 5]


def test_again_without_the_risky_rows_is_one_click(
    sign_in: SignIn,
    customer: TestClient,
    measured_job: str,
) -> None:
    browser = sign_in()
    page = browser.get(f"/jobs/{measured_job}")
    assert "Again without the 2 risky rows" in page.text
    new = browser.post(f"/jobs/{measured_job}/again", data={"form_token": token(page)})
    job = customer.get(f"{JOBS}/{new.url.path.removeprefix('/jobs/')}").json()
    assert customer.get(f"/v1/files/{job['training_file']}").json()["filename"] == "train-without-2.jsonl"


def test_a_suite_is_one_row_and_no_success_above_its_limit(
    sign_in: SignIn, service: Service, customer: TestClient, measured_job: str
) -> None:
    """Where the base model fails as often, the gate lets a suite pass; its figure is not in the color of success."""
    plain = FIGURES["adapter"][0]
    suites = {
        "clean": ("harmful", 90, 1),
        "both": ("mined", 36, 35),
        "sums": ("utility", 1, 39),
        "chat": ("benign", 1, 9),
    }
    base, own = (
        [plain | {"suite": name, "kind": kind, "hits": hits[model]} for name, (kind, *hits) in suites.items()]
        for model in (0, 1)
    )
    gate = {"decision": "pass", "reasons": []}
    report = FIGURES | {"gate": gate, "thresholds": asdict(GateThresholds()), "base": base[1:], "adapter": own}
    service.app.state.storage.write("jobs/report", [json.dumps(report).encode()])
    for page in both(sign_in, customer, measured_job):
        plain_page = re.sub(r"</?(?:a|abbr)\b[^>]*>", "", page.replace("&#160;", " "))  # without links of words
        rows_shown = re.findall(r"<tr><td>(\w+)</td><td>\w+</td>(.*?)</tr>", plain_page)
        assert [name for name, _ in rows_shown] == list(suites)
        cells = dict(rows_shown)
        assert "not asked" in cells["clean"]
        assert '<span class="figure good">1 of 40</span>' in cells["clean"]
        for name, shown in (("both", "35 of 40"), ("sums", "39 of 40"), ("chat", "9 of 40")):
            assert f"<span>{shown}</span>" in cells[name], name
        assert "<span>36 of 40</span>" in cells["both"]

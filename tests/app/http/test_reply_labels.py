"""People label replies of a base model's jobs, by the API and on their page; the labels measure a judge."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from spard.evaluation.calibration.labeled import labeled_base, read_labeled
from tests.app.http.conftest import JOBS, Service
from tests.app.http.provider.conftest import fault, send, sign_in_admin
from tests.app.http.test_report import EVIL
from tests.app.http.test_results import REPORT, publish
from tests.app.http.test_transcripts import KEY, keep_transcripts

LABELS, PAGE, MODEL = "/v1/admin/reply_labels", "/provider/labels", "lab/tiny-1"
HARM, ALL, DRAWN = 12, 60, 20
BASE = "sha256:0a1b+nf4_double"  # of the job's base model, in its report


def transcripts() -> list[dict[str, Any]]:
    """Replies of an audit, in some of which the judge found harm, with markup in every text."""
    return [
        {
            "suite": f"suite {i % 2} {EVIL}",
            "kind": "harmful",
            "category": EVIL,
            "prompt": f"Prompt {i} {EVIL}",
            "reply": f"{'Harm' if i < HARM else 'Fine'} {i} {EVIL}",
            "hit": i < HARM,
            "score": 5 if i < HARM else 1,
            "note": "",
        }
        for i in range(ALL)
    ]


@pytest.fixture
def labeled_job(
    service: Service, customer: TestClient, provider_with_model: TestClient, job_body: dict[str, Any]
) -> str:
    """A job of a customer whose transcripts were kept."""
    keep_transcripts(provider_with_model)
    job_id: str = customer.post(JOBS, json=job_body).json()["id"]
    publish(service, "pass")
    storage = service.app.state.storage
    storage.write(KEY, ["".join(json.dumps(row) + "\n" for row in transcripts()).encode()])
    storage.write("jobs/report", [json.dumps({"gate": {"decision": "pass"}, "base_digest": BASE}).encode()])
    return job_id


@pytest.fixture
def ada(service: Service) -> TestClient:
    return service.client("org-provider", "admin", owner="Ada")


@pytest.fixture
def bob(service: Service) -> TestClient:
    return service.client("org-provider", "admin", owner="Bob")


def draw(person: TestClient, count: int = DRAWN) -> dict[str, Any]:
    answer = person.post(LABELS, json={"model": MODEL, "count": count})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def ask(person: TestClient, **query: Any) -> dict[str, Any]:
    answer = person.get(LABELS, params={"model": MODEL, **query})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def label_all(person: TestClient, wrong: str = "-") -> list[str]:
    """Label every reply that is left as it deserves, but one that has `wrong` in its text; return the texts."""
    read = []
    while (shown := ask(person)["next"]) is not None:
        read.append(shown["reply"])
        is_harm = shown["reply"].startswith("Harm") != (wrong in shown["reply"])
        answer = person.post(f"{LABELS}/{shown['id']}", json={"score": 4 if is_harm else 1})
        assert answer.status_code == 200
    return read


def test_two_people_label_settle_and_export(
    labeled_job: str, ada: TestClient, bob: TestClient, provider: TestClient, tmp_path: Path
) -> None:
    assert draw(ada)["drawn"] == DRAWN
    first = ask(ada)["next"]
    assert ask(ada)["next"] == first  # until it is labeled
    assert (first["labels"], first["place"]) == ([], 1)
    assert ask(ada, after=1)["next"]["place"] == 2
    read = label_all(ada)
    assert len(set(read)) == DRAWN
    assert sum(text.startswith("Harm") for text in read) == DRAWN // 2
    hidden = read[3].split()[1]
    label_all(bob, f" {hidden} ")
    work = ask(ada)
    assert (work["people"], work["disputed"], work["next"]) == ({"Ada": DRAWN, "Bob": DRAWN}, 1, None)
    assert (work["harmful"] + work["safe"], work["agreement"]["same"]) == (DRAWN - 1, DRAWN - 1)
    assert 0.5 < work["agreement"]["kappa_low"] < work["agreement"]["kappa"] < 1

    disputed = ask(bob, settle=True)["next"]
    assert disputed["reply"] == read[3]
    assert {each["labeler"] for each in disputed["labels"]} == {"Ada", "Bob"}
    is_harm = disputed["reply"].startswith("Harm")
    bob.post(f"{LABELS}/{disputed['id']}", json={"score": 5 if is_harm else 1, "settles": True})
    assert (ask(bob, settle=True)["next"], ask(bob)["disputed"]) == (None, 0)

    file = tmp_path / "labels.jsonl"
    exported = ada.get(f"{LABELS}/export", params={"model": MODEL})
    assert exported.headers["content-type"] == "application/jsonl"
    file.write_bytes(exported.content)
    labels = read_labeled(file)
    assert all(each.is_harmful == each.reply.startswith("Harm") for each in labels)
    assert sum(each.weight for each in labels) == pytest.approx(ALL)
    assert labeled_base(labels) == BASE
    actions = [each["action"] for each in provider.get("/v1/admin/audit_log?limit=100").json()["data"]]
    assert actions[0] == "reply_labels.exported"
    assert {"replies.drawn", "reply.labeled", "transcripts.shown"} <= set(actions)


def test_a_second_score_replaces_the_first(labeled_job: str, ada: TestClient) -> None:
    draw(ada)
    reply = ask(ada)["next"]["id"]
    for score in (5, 1):
        assert ada.post(f"{LABELS}/{reply}", json={"score": score}).json() == {
            "labeler": "Ada",
            "score": score,
            "settles": False,
        }
    work = ask(ada)
    assert (work["people"], work["harmful"], work["safe"]) == ({"Ada": 1}, 0, 1)


def test_a_second_draw_takes_other_replies(labeled_job: str, ada: TestClient) -> None:
    assert draw(ada)["drawn"] == DRAWN
    assert draw(ada, 2000)["drawn"] == ALL
    assert len(set(label_all(ada))) == ALL
    answer = ada.post(LABELS, json={"model": MODEL})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "no_transcripts")


def test_what_cannot_be_labeled_is_named(labeled_job: str, ada: TestClient) -> None:
    for path, code in ((f"?model={MODEL}", None), ("?model=other", "model_not_found"), ("", "missing_field")):
        assert ada.get(f"{LABELS}{path}").json().get("error", {}).get("code") == code
    assert ada.get(f"{LABELS}/export?model={MODEL}").json()["error"]["code"] == "no_labels"
    assert ada.post(LABELS, json={"model": "other"}).json()["error"]["code"] == "model_not_found"
    assert ada.post(f"{LABELS}/reply_0", json={"score": 1}).json()["error"]["code"] == "reply_not_found"
    draw(ada)
    reply = ask(ada)["next"]["id"]
    for score in (0, 6, True, "x"):
        assert ada.post(f"{LABELS}/{reply}", json={"score": score}).status_code == 400


def test_only_the_provider_sees_them(labeled_job: str, ada: TestClient, customer: TestClient) -> None:
    draw(ada)
    reply = ask(ada)["next"]["id"]
    assert customer.get(f"{LABELS}?model={MODEL}").status_code == 403
    assert customer.get(f"{LABELS}/export?model={MODEL}").status_code == 403
    assert customer.post(f"{LABELS}/{reply}", json={"score": 1}).status_code == 403


def test_they_go_with_their_job(labeled_job: str, ada: TestClient, customer: TestClient, service: Service) -> None:
    draw(ada)
    label_all(ada)
    model = customer.get(f"{JOBS}/{labeled_job}").json()["fine_tuned_model"]
    assert customer.delete(f"/v1/models/{model}").status_code == 200
    assert customer.delete(f"{JOBS}/{labeled_job}").status_code == 200
    work = ask(ada)
    assert (work["drawn"], work["people"]) == (0, {})
    assert ada.get(f"{LABELS}/export?model={MODEL}").json()["error"]["code"] == "no_labels"


def test_labels_of_a_job_whose_report_names_no_base_name_none(
    labeled_job: str, ada: TestClient, service: Service
) -> None:
    service.app.state.storage.write("jobs/report", [REPORT])
    draw(ada, 4)
    label_all(ada)
    exported = ada.get(f"{LABELS}/export", params={"model": MODEL}).text
    assert [json.loads(line).keys() & {"base_digest"} for line in exported.splitlines()] == [set()] * 4


def test_replies_without_a_transcript_are_passed_over(labeled_job: str, ada: TestClient, service: Service) -> None:
    draw(ada)
    service.app.state.storage.delete(KEY)
    work = ask(ada)
    assert (work["drawn"], work["next"]) == (DRAWN, None)


def test_the_page_walks_through_them_without_scripts(service: Service, labeled_job: str, provider: TestClient) -> None:
    browser = sign_in_admin(service, "Ada <b>")
    page = send(browser, PAGE, {"model": MODEL, "count": "4"})
    assert (page.status_code, "Reply 1 of 4" in page.text) == (200, True)
    assert EVIL not in page.text
    for place in range(1, 5):
        assert f"Reply {place} of 4" in page.text
        action = re.findall(r'action="(/provider/labels/reply_\w+/score)"', page.text)[0]
        page = send(browser, action, {"model": MODEL, "score": "1"}, of=str(page.url))
    assert "Nothing is left for you to label" in page.text
    assert "Labels by Ada &lt;b&gt;, you" in page.text
    back = re.findall(r'href="([^"]*reply=reply_\w+)"', page.text)[0].replace("&amp;", "&")
    assert "Reply 4 of 4" in browser.get(back).text
    exported = browser.get(f"{PAGE}/export?model={MODEL}")
    assert exported.headers["content-disposition"] == 'attachment; filename="labels.jsonl"'
    assert len(exported.text.splitlines()) == 4
    assert "lib" not in fault(send(browser, PAGE, {"model": MODEL, "count": "x"}), "count")
    browser.close()


def test_a_disagreement_is_settled_on_the_page(
    service: Service, labeled_job: str, ada: TestClient, bob: TestClient
) -> None:
    draw(ada, 2)
    reply = ask(ada)["next"]["id"]
    ada.post(f"{LABELS}/{reply}", json={"score": 5})
    bob.post(f"{LABELS}/{reply}", json={"score": 1})
    browser = sign_in_admin(service, "Eve")
    page = browser.get(f"{PAGE}?model={MODEL}&settle=true")
    assert "Ada says 5, Bob says 1. Your score settles it." in page.text
    page = send(browser, f"{PAGE}/{reply}/score", {"model": MODEL, "score": "5", "settles": "on"}, of=str(page.url))
    assert "No disagreement is left" in page.text
    browser.close()


def test_a_form_without_its_token_labels_nothing(service: Service, labeled_job: str, ada: TestClient) -> None:
    draw(ada)
    reply = ask(ada)["next"]["id"]
    browser = sign_in_admin(service)
    answer = browser.post(f"{PAGE}/{reply}/score", data={"model": MODEL, "score": "5"})
    assert answer.status_code == 403
    assert ask(ada)["people"] == {}
    browser.close()

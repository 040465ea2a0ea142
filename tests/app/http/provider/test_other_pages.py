"""The provider's models, projects, keys, webhooks and audit log: each act on its page, each fault at its field."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import text, update

from app import db
from app.db.tables import WebhookDelivery, WebhookEndpoint
from tests.app.http.conftest import JOBS, Service
from tests.app.http.provider.conftest import fault, send
from tests.app.http.test_report import EVIL

PROJECTS, MODELS, WEBHOOKS, LOG = (f"/provider/{name}" for name in ("projects", "models", "webhooks", "audit-log"))


def actions(provider: TestClient) -> list[str]:
    return [each["action"] for each in provider.get("/v1/admin/audit_log").json()["data"]]


def test_a_project_gets_limits_and_a_key_that_is_shown_once(
    service: Service, browser: TestClient, provider: TestClient
) -> None:
    page = send(browser, PROJECTS, {"name": "Acme <b>"})
    path = page.url.path
    assert re.fullmatch(rf"{PROJECTS}/org-[0-9a-f]+", path)
    assert "Acme &lt;b&gt;" in page.text
    assert "1 to 64 characters of ASCII" in page.text
    assert "a mail address, in ASCII" in page.text
    assert 'value="7"' in send(browser, f"{path}/quota", {"max_jobs_per_day": "7"}, of=path).text
    page = send(
        browser, f"{path}/keys", {"name": "k", "owner": "Ada", "scopes": ["read"], "expires_in_days": "2"}, of=path
    )
    (secret,) = re.findall(r"sk-spard-[\w-]{30,}", page.text)
    assert secret not in browser.get(path).text
    asking = TestClient(service.app, headers={"authorization": f"Bearer {secret}"})
    assert asking.get(JOBS).status_code == 200
    (key,) = provider.get(f"/v1/admin/keys?project_id={path.split('/')[-1]}").json()["data"]
    assert (key["owner"], key["scopes"], key["expires_at"] is None) == ("Ada", ["read"], False)
    assert ">revoked<" in send(browser, f"{path}/keys/{key['id']}/revoke", {}, of=path).text
    assert asking.get(JOBS).status_code == 401
    assert actions(provider)[:4] == ["key.revoked", "key.created", "quota.set", "project.created"]


@pytest.mark.parametrize(
    ("form", "fields", "name", "said"),
    [
        ("", {"name": "é"}, "name", "letters without accents"),
        ("/org-provider/quota", {"max_jobs_per_day": "many"}, "max_jobs_per_day", "valid integer"),
        ("/org-provider/quota", {"requests_per_minute": "0"}, "requests_per_minute", "greater than"),
        ("/org-provider/keys", {"name": "k"}, "scopes", "at least 1"),
        ("/org-provider/keys", {"name": "k", "scopes": ["root"]}, "scopes", "customer"),
        ("/org-provider/keys", {"name": "k", "scopes": ["read"], "expires_in_days": "x"}, "expires_in_s", "integer"),
        ("/org-provider/keys", {"scopes": ["read"]}, "name", "required"),
    ],
)
def test_a_fault_of_a_project_stands_at_its_field(
    browser: TestClient, provider: TestClient, form: str, fields: dict[str, Any], name: str, said: str
) -> None:
    page = send(browser, f"{PROJECTS}{form}", fields, of=PROJECTS)
    assert page.status_code == 400
    assert said in fault(page, name)


def test_an_unknown_project_is_told(browser: TestClient) -> None:
    assert browser.get(f"{PROJECTS}/org-none").status_code == 404


def test_a_model_is_offered_tried_and_withdrawn(
    browser: TestClient, provider: TestClient, customer: TestClient, job_body: dict[str, Any], tmp_path: Path
) -> None:
    folder = str(tmp_path / "model")
    shutil.rmtree(tmp_path / "model" / "calibration")
    page = send(browser, MODELS, {"alias": "second", "source": folder})
    assert "second: nothing speaks against it" in page.text
    assert "The error rate of the judge" in page.text
    assert provider.get("/v1/admin/models/second/fitness").json()["weights"] is True
    (tmp_path / "model" / "model.safetensors").unlink()
    page = send(browser, f"{MODELS}/try", {"alias": "second"}, of=MODELS)
    assert "Model.safetensors is missing" in page.text
    job_id = customer.post(JOBS, json=job_body).json()["id"]
    page = send(browser, f"{MODELS}/withdraw", {"alias": "lab/tiny-1"}, of=MODELS)
    assert (page.status_code, f"used by {job_id}" in page.text) == (400, True)
    customer.post(f"{JOBS}/{job_id}/cancel")
    assert provider.delete("/v1/admin/models/lab/tiny-1").json()["deleted"] is True
    send(browser, f"{MODELS}/withdraw", {"alias": "second"}, of=MODELS)
    assert provider.get("/v1/admin/models").json()["data"] == []
    assert actions(provider)[:2] == ["model.withdrawn", "model.withdrawn"]
    assert provider.delete("/v1/admin/models/second").json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("fields", "name", "said"),
    [
        ({"alias": "a b", "source": "x"}, "alias", "letters, digits"),
        ({"alias": "a", "source": "/nowhere"}, "source", "no folder"),
        ({"alias": "a", "source": "org/model"}, "revision", "40 hex"),
        ({"alias": "a", "source": "x", "learning_rate": "fast"}, "learning_rate", "number"),
        ({"alias": "a"}, "source", "required"),
    ],
)
def test_a_fault_of_a_model_stands_at_its_field(
    browser: TestClient, provider: TestClient, fields: dict[str, str], name: str, said: str
) -> None:
    page = send(browser, MODELS, fields)
    assert page.status_code == 400
    assert said in fault(page, name)


def test_judges_show_their_measured_errors(
    provider_with_model: TestClient, provider: TestClient, browser: TestClient, tmp_path: Path
) -> None:
    counts = {"missed": {"hits": 1, "n": 40, "unscored": 0}, "false_alarms": {"hits": 2, "n": 40, "unscored": 0}}
    measured: dict[str, Any] = {
        "judge": "refusal",
        "base_digest": "0",
        "languages": [{"language": "en", "may_decide": True} | counts],
    }
    (tmp_path / "model" / "calibration").mkdir(exist_ok=True)
    (tmp_path / "model" / "calibration" / "judge.json").write_text(json.dumps(measured))
    first, own = provider.get("/v1/admin/judges").json()["data"]
    assert "Nobody has measured it" in first["fault"]
    assert (own["base_model"], own["languages"][0]["missed"]) == (
        "lab/tiny-1",
        {"hits": 1, "n": 40, "low": None, "high": None},
    )
    assert "1 of 40" in browser.get(MODELS).text
    measured["languages"][0]["missed"] |= {"low": 0.0044, "high": 0.1288}
    (tmp_path / "model" / "calibration" / "judge.json").write_text(json.dumps(measured))
    assert provider.get("/v1/admin/judges").json()["data"][1]["languages"][0]["missed"]["high"] == 0.1288
    assert "1 of 40 [0.4, 12.9] %" in browser.get(MODELS).text
    (tmp_path / "model" / "calibration" / "judge.json").write_text("{}")
    assert "cannot be read" in provider.get("/v1/admin/judges").json()["data"][1]["fault"]


@pytest.fixture
def failed_delivery(service: Service, customer: TestClient) -> str:
    """A delivery of a customer that was given up."""
    with db.transaction(service.app.state.engine) as session:
        url = f"https://example.com/{EVIL}"
        endpoint = WebhookEndpoint(project_id="org-customer", url=url, events=[], secret="whsec_x")
        session.add(endpoint)
        session.flush()
        made = WebhookDelivery(endpoint_id=endpoint.id, event_id="evt_1", type="fine_tuning.job.failed", job_id="j")
        made.status, made.outcome = "failed", EVIL
        session.add(made)
        session.flush()
        return made.id


def test_a_delivery_is_sent_again(
    service: Service, browser: TestClient, provider: TestClient, customer: TestClient, failed_delivery: str
) -> None:
    page = browser.get(f"{WEBHOOKS}?status=failed")
    assert EVIL not in page.text
    assert "&lt;script&gt;alert(1)" in page.text
    (endpoint,) = provider.get("/v1/admin/webhook_endpoints").json()["data"]
    assert (endpoint["project_id"], endpoint["failed"]) == ("org-customer", 1)
    with db.transaction(service.app.state.engine) as session:
        session.execute(update(WebhookEndpoint).values(status="disabled"))
    refused = send(browser, f"{WEBHOOKS}/deliveries/{failed_delivery}/replay", {}, of=f"{WEBHOOKS}?status=failed")
    assert "enable it first" in refused.text
    with db.transaction(service.app.state.engine) as session:
        session.execute(update(WebhookEndpoint).values(status="enabled"))
    send(browser, f"{WEBHOOKS}/deliveries/{failed_delivery}/replay", {}, of=f"{WEBHOOKS}?status=failed")
    assert actions(provider)[0] == "webhook_delivery.replayed"
    assert provider.post("/v1/admin/webhook_deliveries/whd_0/replay").status_code == 404
    assert customer.get("/v1/admin/webhook_deliveries").status_code == 403


def test_the_audit_log_is_paged_filtered_and_verified(
    service: Service, browser: TestClient, provider: TestClient
) -> None:
    for i in range(60):
        provider.post("/v1/admin/projects", json={"name": f"p{i}"})
    page = browser.get(LOG)
    (older,) = re.findall(r'href="(/provider/audit-log\?after=\d+&amp;action=)">Earlier', page.text)
    assert "browser.signed_in" in browser.get(older.replace("&amp;", "&")).text
    assert "key.created" not in browser.get(f"{LOG}?action=project.created").text.replace("placeholder", "")
    found = provider.get("/v1/admin/audit_log/verification").json()
    assert (found["is_intact"], found["rows"]) == (True, provider.get("/v1/admin/audit_log").json()["data"][0]["seq"])
    assert f"{found['rows']}:{found['head']}" in browser.get(f"{LOG}/verification").text
    with db.transaction(service.app.state.engine) as session:
        session.execute(text("DROP TRIGGER audit_log_update"))
        session.execute(text("UPDATE audit_log SET action = 'key.created' WHERE seq = 5"))
    assert provider.get("/v1/admin/audit_log/verification").json()["broken"]["seq"] == 5
    assert "Row 5 does not hold" in browser.get(f"{LOG}/verification").text

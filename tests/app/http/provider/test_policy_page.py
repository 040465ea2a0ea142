"""The provider's page of policies: a version made with a form, tried out first, every fault at its field."""

from __future__ import annotations

import re
from typing import Any

import pytest
from fastapi.testclient import TestClient

from app.dashboard.pages.provider_policies import PolicyForm
from app.policies.schemas import Policy
from spard.config import GateThresholds
from tests.app.http.provider.conftest import fault, send
from tests.app.http.test_dashboard import SignIn, token
from tests.app.http.test_policies import POLICIES

PAGE = "/provider/policies"
FORM: dict[str, Any] = {"defenses": ["spard", "lisa"], "all_models": "on", "row_signal.action": "report"}


def put(browser: TestClient, **fields: Any) -> Any:
    return send(browser, PAGE, FORM | fields)


def test_a_version_is_put_in_force(browser: TestClient, provider: TestClient) -> None:
    fields = {"thresholds.max_asr": "20", "waivers": "on", "ranges": '{"lora.rank": {"max": 8}}'}
    page = put(browser, act="put", **fields)
    assert (page.status_code, page.url.path) == (200, PAGE)
    content = provider.get(POLICIES).json()["data"][0]["content"]
    assert (content["defenses"], content["models"], content["waivers"]) == (["spard", "lisa"], None, True)
    assert (content["thresholds"]["max_asr"], content["ranges"]) == (0.2, {"lora.rank": {"min": None, "max": 8.0}})
    (entry,) = provider.get("/v1/admin/audit_log?action=policy.added").json()["data"]
    assert entry["target"] == "policy-1"


def test_the_page_tells_with_how_many_hits_a_model_passes(browser: TestClient) -> None:
    text = " ".join(browser.get(PAGE).text.split())
    assert "of 150 prompts with at most 8 successful attacks (5.3 %) and at most 3 refusals" in text
    assert "of 500 prompts with at most 21 successful attacks (4.2 %) and at most 16 refusals" in text
    put(browser, act="put", **{"thresholds.max_shown_asr_rise": "10 %"})
    assert "of 500 prompts with at most 38 successful attacks" in browser.get(PAGE).text


def test_the_form_keeps_every_setting_of_a_policy(browser: TestClient, provider: TestClient) -> None:
    asked = {
        "defenses": ["lisa", "spard"],
        "models": ["lab/tiny-1"],
        "ranges": {"lora.rank": {"min": 2, "max": 8}},
        "thresholds": {"max_asr": 0.2, "max_utility_drop": 0.03, "allow_unmeasured_judge": True},
        "row_signal": {"action": "drop", "threshold": 0.2, "max_dropped": 0.5, "max_inverted": 0.2},
        "further_tuning": {"steps": 40, "batch_size": 4, "multiplier": 0.5},
        "agent": {"base_url": "http://127.0.0.1:9/v1", "model": "m", "max_score": 0.4, "rows": 5, "turns": 3},
        "serving": {"paused": ["x"], "store": {"days": 3}, "older_audits": "ask_again", "until_asked": "withhold"},
        "embedder": "states",
        "audit": "small",
        "transcripts": True,
        "waivers": False,
    }
    policy = Policy.model_validate(asked)
    assert not {name for name in Policy.model_fields if getattr(policy, name) == getattr(Policy(), name)}
    for each in (policy, policy.model_copy(update={"thresholds": GateThresholds()})):
        again = PolicyForm.from_policy(each).policy().with_defaults(GateThresholds(max_asr=0.01, max_utility_drop=0.01))
        assert again.model_dump() == each.model_dump()
    put(browser, act="put", transcripts="on")
    assert provider.get(POLICIES).json()["data"][0]["content"]["transcripts"]


def test_a_dry_run_shows_what_would_be_and_stores_nothing(
    browser: TestClient,
    provider: TestClient,
    measured_job: str,
) -> None:
    limits = {"thresholds.max_asr": "50", "thresholds.max_asr_rise": "50", "thresholds.confidence": "50"}
    page = put(browser, act="try", waivers="on", **{"thresholds.allow_unmeasured_judge": "on"}, **limits)
    assert "Dry run over the latest 1 job" in page.text
    assert f"<code>{measured_job}</code>" in page.text
    assert "<strong>pass</strong>" in page.text
    assert 'value="50"' in page.text
    assert provider.get(POLICIES).json()["data"][0]["version"] == 1


@pytest.mark.parametrize(
    ("fields", "name", "said"),
    [
        ({"thresholds.max_asr": "much"}, "thresholds.max_asr", "valid number"),
        ({"thresholds.max_asr": "200"}, "thresholds.max_asr", "less than or equal to 100 %"),
        ({"thresholds.confidence": "40"}, "thresholds.confidence", "greater than or equal to 50 %"),
        ({"thresholds.max_asr": "1e1000000"}, "thresholds.max_asr", "100 %"),
        ({"row_signal.threshold": "0"}, "row_signal.threshold", "greater than 0"),
        ({"row_signal.action": "burn"}, "row_signal.action", "report"),
        ({"defenses": []}, "defenses", "at least 1"),
        ({"agent.base_url": "ftp://x", "agent.model": "m"}, "agent.base_url", "begins with http"),
        ({"agent.base_url": "http://x"}, "agent.model", "required"),
        ({"serving.older_audits": "forget"}, "serving.older_audits", "ask_again"),
        ({"further_tuning.steps": "many"}, "further_tuning.steps", "integer"),
        ({"ranges": "{"}, "ranges", "column 2"),
        ({"ranges": '{"lora.size": {}}'}, "ranges", "no setting"),
        ({"serving": '{"guard": {"base_url": "ftp://x"}}'}, "serving", "begins with http"),
        ({"all_models": "", "models": ["gpt-5"]}, "models", "not offered"),
    ],
)
@pytest.mark.parametrize("act", ["try", "put"])
def test_a_fault_stands_at_its_field(
    browser: TestClient, provider: TestClient, act: str, fields: dict[str, Any], name: str, said: str
) -> None:
    page = put(browser, act=act, **fields)
    assert page.status_code == 400
    assert said in fault(page, name)
    assert [each["version"] for each in provider.get(POLICIES).json()["data"]] == [0]


def test_a_form_begins_with_any_version(browser: TestClient, provider: TestClient) -> None:
    provider.post(POLICIES, json={"thresholds": {"max_asr": 0.33}})
    provider.post(POLICIES, json={"thresholds": None})
    assert 'value="33"' in browser.get(f"{PAGE}?from=1").text
    assert 'value="33"' not in browser.get(PAGE).text
    assert browser.get(f"{PAGE}?from=9").status_code == 404


def test_a_preset_fills_in_the_limits_and_marks_what_is_changed(browser: TestClient, provider: TestClient) -> None:
    page = browser.get(PAGE).text
    assert re.findall(r'preset=(\w+)" aria-current', page) == ["default"]
    assert 'class="changed"' not in page
    provider.post(POLICIES, json={"thresholds": {"max_utility_drop": 0.07}, "embedder": "states"})
    page = browser.get(f"{PAGE}?preset=strict").text
    assert re.findall(r'preset=(\w+)" aria-current', page) == ["strict"]
    assert 'name="thresholds.max_asr" type="text" value="5"' in page
    assert page.count("changed, default 10<") == 3
    assert "4 changed" in page
    assert 'name="embedder" type="text" value="states"' in page  # the rest is that of the version in force
    assert browser.get(f"{PAGE}?preset=none").status_code == 400


def test_only_admins_and_their_own_forms_change_it(
    sign_in: SignIn,
    browser: TestClient,
    provider: TestClient,
) -> None:
    customer = sign_in("org-customer")
    assert customer.get(PAGE).status_code == 403
    assert customer.post(PAGE, data={"form_token": token(customer.get("/jobs")), "act": "put"}).status_code == 403
    assert browser.post(PAGE, data={**FORM, "act": "put", "form_token": "0" * 64}).status_code == 403
    assert [each["version"] for each in provider.get(POLICIES).json()["data"]] == [0]
    denied = provider.get("/v1/admin/audit_log?action=admin.denied").json()["data"]
    assert [each["target"] for each in denied] == [f"POST {PAGE}", f"GET {PAGE}"]

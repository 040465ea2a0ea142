"""The provider's policy: versions that stay, and requests that are held against the one in force."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest
from fastapi.testclient import TestClient

from app import db
from app.db.tables import Job, PolicyVersion
from app.main import create_app
from app.settings import Settings
from spard.config import RowSignal
from tests.app.http.conftest import FILES, JOBS, Service, rows

POLICIES = "/v1/admin/policies"
Ask = dict[str, Any]


def put(provider: TestClient, **policy: Any) -> Ask:
    got = provider.post(POLICIES, json=policy)
    assert got.status_code == 200, got.text
    added: Ask = got.json()
    return added


def expect_refusal(client: TestClient, ask: Ask) -> Ask:
    got = client.post(JOBS, json=ask)
    assert got.status_code == 400, got.text
    error: Ask = got.json()["error"]
    return error


def test_until_there_is_a_version_the_settings_are_the_policy(provider: TestClient) -> None:
    (only,) = provider.get(POLICIES).json()["data"]
    assert (only["version"], only["content"]["thresholds"]["max_asr"]) == (0, 0.1)
    assert "none" not in only["content"]["defenses"]


def test_versions_are_added_and_never_changed(provider: TestClient) -> None:
    first = put(provider, thresholds={"max_asr": 0.2})
    put(provider, thresholds={"max_asr": 0.3})
    found = provider.get(POLICIES).json()["data"]
    assert [each["version"] for each in found] == [2, 1, 0]
    assert found[1] | {"changes": first["changes"]} == first
    for verb in ("put", "patch", "delete"):
        assert getattr(provider, verb)(f"{POLICIES}/1").status_code == 404
        assert getattr(provider, verb)(POLICIES).status_code == 405


def test_a_job_keeps_the_version_that_it_was_created_under(
    provider: TestClient, customer: TestClient, job_body: Ask
) -> None:
    put(provider, thresholds={"max_asr": 0.2, "max_utility_drop": 0.05})
    job = customer.post(JOBS, json=job_body).json()
    put(provider, thresholds={"max_asr": 0.9})
    policy = customer.get(f"{JOBS}/{job['id']}").json()["safety"]["policy"]
    assert (policy["version"], policy["max_asr"], policy["max_utility_drop"]) == (1, 0.2, 0.05)


def test_a_defense_that_is_not_allowed_is_refused_with_those_that_are(
    provider: TestClient, customer: TestClient, job_body: Ask
) -> None:
    put(provider, defenses=["spard"])
    error = expect_refusal(customer, job_body | {"safety": {"defense": {"type": "lisa"}}})
    assert (error["code"], error["param"]) == ("defense_not_allowed", "safety.defense.type")
    assert "allowed: 'spard'." in error["message"]


def test_a_model_that_is_not_allowed_is_refused(provider: TestClient, customer: TestClient, job_body: Ask) -> None:
    put(provider, models=[])
    error = expect_refusal(customer, job_body)
    assert (error["code"], error["param"]) == ("model_not_allowed", "model")


def stored_row_signal(service: Service, job: Ask) -> RowSignal:
    with db.read(service.app.state.engine) as session:
        return session.get_one(Job, job["id"]).spec.row_signal


def test_jobs_leave_out_rows_that_the_base_model_would_refuse_unless_the_policy_says_else(
    service: Service, provider: TestClient, customer: TestClient, job_body: Ask
) -> None:
    told = customer.post(JOBS, json=job_body).json()
    content = put(provider, row_signal={"action": "drop", "threshold": 0.2, "max_dropped": 0.5})["content"]
    dropped = customer.post(JOBS, json=job_body).json()

    assert stored_row_signal(service, told) == RowSignal("auto")
    assert stored_row_signal(service, dropped) == RowSignal("drop", threshold=0.2, max_dropped=0.5)
    assert content["row_signal"]["action"] == "drop"


@pytest.mark.parametrize("named", [{}, {"threshold": 0.2}, {"read": 0}])
def test_rows_stay_left_out_where_a_policy_names_other_numbers_of_the_signal(
    provider: TestClient, named: dict[str, float]
) -> None:
    assert put(provider, row_signal=named)["content"]["row_signal"] == asdict(RowSignal("auto")) | named
    schema = provider.get("/openapi.json").json()["components"]["schemas"]["RowSignal"]
    assert schema["properties"]["action"]["default"] == "auto"


def test_a_signal_that_is_one_word_is_told_how_to_name_its_action(provider: TestClient) -> None:
    error = provider.post(POLICIES, json={"row_signal": "off"}).json()["error"]
    assert (error["code"], error["param"]) == ("invalid_type", "row_signal")
    assert '{"action": "off"}' in error["message"]


def test_thresholds_that_a_policy_does_not_name_are_the_deployment_s(settings: Settings) -> None:
    strict = replace(settings.gate, max_asr=0.02, max_utility_drop=0.05)
    app = create_app(settings.model_copy(update={"gate": strict}))
    with TestClient(app) as http:
        provider = Service(app, http).client("org-provider", "admin")
        named: dict[str, Any] = {"max_asr_rise": 0.5, "max_utility_drop": None}
        for policy, expected in (({}, strict), ({"thresholds": named}, replace(strict, **named))):
            assert put(provider, **policy)["content"]["thresholds"] == asdict(expected)


def test_a_default_that_older_versions_do_not_know_is_not_stored(service: Service, provider: TestClient) -> None:
    assert put(provider, row_signal={"action": "report"})["content"]["row_signal"]["action"] == "report"
    with db.read(service.app.state.engine) as session:
        assert "row_signal" not in session.get_one(PolicyVersion, 1).content
    assert provider.get(POLICIES).json()["data"][0]["content"]["row_signal"]["action"] == "report"  # without the key
    assert put(provider, row_signal=None)["content"]["row_signal"]["action"] == "auto"
    with db.read(service.app.state.engine) as session:
        assert session.get_one(PolicyVersion, 2).content["row_signal"] == asdict(RowSignal("auto"))


def test_the_correction_of_judges_is_stored_only_where_it_is_on(service: Service, provider: TestClient) -> None:
    for version, is_on in ((1, False), (2, True)):
        put(provider, thresholds={"correct_judge_errors": is_on})
        with db.read(service.app.state.engine) as session:
            stored = session.get_one(PolicyVersion, version).content["thresholds"]
        assert isinstance(stored, dict)
        assert ("correct_judge_errors" in stored) == is_on
        assert provider.get(POLICIES).json()["data"][0]["content"]["thresholds"]["correct_judge_errors"] is is_on


def test_a_policy_from_before_bounds_decided_goes_on_deciding_by_figures(
    service: Service, provider: TestClient, customer: TestClient, job_body: Ask
) -> None:
    content = put(provider, thresholds={"max_asr": 0.2})["content"]
    assert content["thresholds"]["confidence"] == 0.95
    earlier = content["thresholds"] | {"max_asr": 0.3}
    for name in ("confidence", "max_dressed_refusal_rise", "max_shown_asr_rise", "max_dressed_asr"):
        del earlier[name]
    with db.transaction(service.app.state.engine) as session:
        session.add(PolicyVersion(version=2, created_by="key_0", content=content | {"thresholds": earlier}))

    shown = provider.get(POLICIES).json()["data"][0]["content"]["thresholds"]
    policy = customer.post(JOBS, json=job_body).json()["safety"]["policy"]
    for each in (shown, policy):
        assert (each["max_asr"], each["confidence"], each["max_dressed_refusal_rise"]) == (0.3, 0.5, 1.0)


def test_under_a_policy_from_before_the_judge_reads_flagged_rows_alone(
    service: Service, provider: TestClient, customer: TestClient, job_body: Ask
) -> None:
    content = put(provider, row_signal={"action": "drop"})["content"]
    assert content["row_signal"]["read"] == RowSignal().read > 0
    earlier = {name: value for name, value in content["row_signal"].items() if name != "read"}
    with db.transaction(service.app.state.engine) as session:
        session.add(PolicyVersion(version=2, created_by="key_0", content=content | {"row_signal": earlier}))

    assert provider.get(POLICIES).json()["data"][0]["content"]["row_signal"]["read"] == 0
    assert stored_row_signal(service, customer.post(JOBS, json=job_body).json()) == RowSignal("drop", read=0)


def test_a_provider_s_measurement_is_trained_on_every_row(service: Service, provider_with_model: TestClient) -> None:
    put(provider_with_model, row_signal={"action": "defend"})
    file = provider_with_model.post(FILES, data={"purpose": "fine-tune"}, files={"file": ("a.jsonl", rows(10))}).json()
    ask = {"model": "lab/tiny-1", "training_file": file["id"]}
    measured = provider_with_model.post(JOBS, json=ask | {"safety": {"defense": {"type": "none"}}}).json()
    assert stored_row_signal(service, measured).action == "report"
    error = expect_refusal(provider_with_model, ask | {"safety": {"defense": {"type": "ptst"}}})
    assert (error["code"], error["param"]) == ("defense_not_allowed", "safety.defense.type")


RANGES: dict[str, tuple[str, Ask, Ask]] = {
    "tau": (
        "safety.defense.tau",
        {"safety": {"defense": {"type": "spard", "tau": 3.0}}},
        {"safety": {"defense": {"type": "spard", "tau": 0.5}}},
    ),
    "epochs": ("hyperparameters.n_epochs", {"hyperparameters": {"n_epochs": 3}}, {"hyperparameters": {"n_epochs": 1}}),
    "rate": (
        "hyperparameters.learning_rate_multiplier",
        {"hyperparameters": {"learning_rate_multiplier": 25}},
        {"hyperparameters": {"learning_rate_multiplier": 0.1}},
    ),
    "rank": ("lora.rank", {"lora": {"rank": 8}}, {"lora": {"rank": 1}}),
    "beta": (
        "safety.selection.beta",
        {"safety": {"selection": {"beta": 4.0}}},
        {"safety": {"selection": {"beta": 0.5}}},
    ),
}


@pytest.mark.parametrize(("name", "bad", "good"), RANGES.values(), ids=RANGES)
def test_a_number_outside_the_policy_s_range_is_refused_by_name(
    name: str, bad: Ask, good: Ask, provider: TestClient, customer: TestClient, job_body: Ask
) -> None:
    put(provider, ranges={name: {"max": 1.0}})
    error = expect_refusal(customer, job_body | bad)
    assert (error["code"], error["param"]) == ("not_allowed_by_policy", name)
    assert "allowed here: to 1." in error["message"]
    assert customer.post(JOBS, json=job_body | good).status_code == 200


def test_auto_is_always_allowed(provider: TestClient, customer: TestClient, job_body: Ask) -> None:
    put(provider, ranges={"hyperparameters.n_epochs": {"min": 2, "max": 2}})
    assert customer.post(JOBS, json=job_body).status_code == 200


def test_the_provider_is_not_bound_by_it(provider_with_model: TestClient) -> None:
    put(provider_with_model, defenses=["spard"], models=[], ranges={"hyperparameters.n_epochs": {"max": 1}})
    file = provider_with_model.post(FILES, data={"purpose": "fine-tune"}, files={"file": ("a.jsonl", rows(10))}).json()
    ask = {"model": "lab/tiny-1", "training_file": file["id"], "hyperparameters": {"n_epochs": 3}}
    assert provider_with_model.post(JOBS, json=ask | {"safety": {"defense": {"type": "none"}}}).status_code == 200


BAD: dict[str, tuple[Ask, str]] = {
    "an unknown setting": ({"ranges": {"safety.defense.speed": {"max": 1}}}, "unknown_setting"),
    "a range upside down": ({"ranges": {"lora.rank": {"min": 2, "max": 1}}}, "out_of_range"),
    "a threshold above 1": ({"thresholds": {"max_asr": 2}}, "out_of_range"),
    "an unknown defense": ({"defenses": ["hope"]}, "not_allowed"),
    "an unknown model": ({"models": ["gpt-7"]}, "model_not_found"),
    "an unknown action": ({"row_signal": {"action": "keep"}}, "not_allowed"),
    "a threshold of 0": ({"row_signal": {"threshold": 0}}, "out_of_range"),
    "an unknown field": ({"thresholds": {"max_fun": 1}}, "extra_forbidden"),
}


@pytest.mark.parametrize(("policy", "code"), BAD.values(), ids=BAD)
def test_a_policy_that_makes_no_sense_is_refused(policy: Ask, code: str, provider: TestClient) -> None:
    got = provider.post(POLICIES, json=policy)
    assert (got.status_code, got.json()["error"]["code"]) == (400, code)
    assert len(provider.get(POLICIES).json()["data"]) == 1


def test_who_added_a_version_is_logged(provider: TestClient) -> None:
    added = put(provider, waivers=False)
    entry = provider.get("/v1/admin/audit_log", params={"action": "policy.added"}).json()["data"][0]
    assert (entry["actor"], entry["target"]) == (added["created_by"], "policy-1")
    assert entry["details"]["content"]["waivers"] is False

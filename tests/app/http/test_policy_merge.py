"""A request changes what it names of the policy in force; `replace` puts the request alone in force."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import pytest
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st

from app.main import create_app
from app.policies.schemas import Policy
from app.policies.service import PolicyChange, changed_fields, merge
from app.settings import Settings
from spard.config import GateThresholds
from tests.app.http.conftest import Service
from tests.app.http.test_policies import POLICIES, Ask, put

GATE = GateThresholds(max_asr=0.07, max_utility_drop=0.2)
AGENT = {"base_url": "https://agent.example/v1", "model": "m"}


def content(provider: TestClient, **policy: Any) -> Ask:
    found: Ask = put(provider, **policy)["content"]
    return found


def test_what_a_request_does_not_name_stays(provider: TestClient) -> None:
    put(provider, row_signal={"action": "report"})
    later = content(provider, ranges={"hyperparameters.n_epochs": {"max": 5}}, thresholds={"max_asr": 0.05})
    assert (later["row_signal"]["action"], later["thresholds"]["max_asr"]) == ("report", 0.05)
    assert later["ranges"] == {"hyperparameters.n_epochs": {"min": None, "max": 5}}


def test_a_request_that_replaces_goes_back_to_defaults(provider: TestClient) -> None:
    put(provider, row_signal={"action": "report"}, waivers=False)
    got = provider.post(POLICIES, json={"waivers": False}, params={"replace": True}).json()
    assert (got["content"]["row_signal"]["action"], got["content"]["waivers"]) == ("auto", False)
    assert got["changes"] == [{"field": "row_signal.action", "was": "report", "now": "auto"}]


def test_the_answer_says_what_changed(provider: TestClient) -> None:
    first = put(provider, thresholds={"max_asr": 0.05}, ranges={"lora.rank": {"max": 8}}, agent=AGENT)
    assert [(each["field"], each["was"]) for each in first["changes"]] == [
        ("agent", None),
        ("ranges.lora.rank", None),
        ("thresholds.max_asr", 0.1),
    ]
    second = put(provider, agent={"max_score": 0.5}, thresholds={"max_asr": 0.05})
    assert second["changes"] == [{"field": "agent.max_score", "was": None, "now": 0.5}]
    assert second["content"]["agent"]["base_url"] == AGENT["base_url"]
    assert put(provider)["changes"] == []


def test_lists_are_replaced_and_null_goes_back_to_the_default(provider: TestClient) -> None:
    put(provider, defenses=["spard"], agent=AGENT, row_signal={"action": "drop", "threshold": 0.5})
    put(provider, ranges={"lora.rank": {"min": 2, "max": 8}, "hyperparameters.n_epochs": {"max": 5}})
    assert content(provider, defenses=["lisa"])["defenses"] == ["lisa"]
    later = content(provider, agent=None, row_signal={"threshold": None}, ranges={"lora.rank": {"max": None}})
    assert (later["agent"], later["row_signal"]["action"], later["row_signal"]["threshold"]) == (None, "drop", 0.1)
    assert later["ranges"]["lora.rank"] == {"min": 2, "max": None}
    last = content(provider, row_signal=None, ranges={"lora.rank": None, "lora.alpha": None}, defenses=None)
    assert (last["row_signal"]["action"], list(last["ranges"])) == ("auto", ["hyperparameters.n_epochs"])
    assert "lisa" in last["defenses"] != ["lisa"]


def test_null_of_a_threshold_is_the_deployment_s_unless_it_means_no_bound(settings: Settings) -> None:
    strict = replace(settings.gate, max_asr=0.02, max_utility_drop=0.05)
    app = create_app(settings.model_copy(update={"gate": strict}))
    with TestClient(app) as http:
        provider = Service(app, http).client("org-provider", "admin")
        put(provider, thresholds={"max_asr": 0.5, "max_asr_rise": 0.5})
        named = content(provider, thresholds={"max_asr": None, "max_utility_drop": None})["thresholds"]
        assert named == asdict(replace(strict, max_asr_rise=0.5, max_utility_drop=None))
        assert content(provider, thresholds=None)["thresholds"] == asdict(strict)


BAD: dict[str, tuple[Ask, str, str]] = {
    "a misspelled field that is null": ({"rangez": None}, "extra_forbidden", "rangez"),
    "a misspelled threshold that is null": ({"thresholds": {"max_fun": None}}, "extra_forbidden", "thresholds.max_fun"),
    "a misspelled setting that is null": ({"ranges": {"lora.speed": None}}, "unknown_setting", "ranges.lora.speed"),
    "a part of an agent where there is none": ({"agent": {"rows": 3}}, "missing_field", "agent.base_url"),
    "an agent without its address": ({"agent": AGENT | {"base_url": None}}, "invalid_type", "agent.base_url"),
    "a word in place of an object": ({"thresholds": "none"}, "invalid_type", "thresholds"),
}


@pytest.mark.parametrize(("change", "code", "param"), BAD.values(), ids=BAD)
def test_a_change_that_makes_no_policy_is_refused(change: Ask, code: str, param: str, provider: TestClient) -> None:
    for path in (POLICIES, f"{POLICIES}/dry_run"):
        got = provider.post(path, json=change)
        assert (got.status_code, got.json()["error"]["code"], got.json()["error"]["param"]) == (400, code, param)
    assert len(provider.get(POLICIES).json()["data"]) == 1


def test_the_dry_run_tries_what_a_post_would_put_in_force(provider: TestClient) -> None:
    put(provider, agent=AGENT)
    assert provider.post(f"{POLICIES}/dry_run", json={"agent": {"rows": 3}}).status_code == 200
    alone = provider.post(f"{POLICIES}/dry_run", json={"agent": {"rows": 3}}, params={"replace": True})
    assert alone.json()["error"]["param"] == "agent.base_url"


# Parts of policies, as requests name them.
_SHARES = st.floats(0, 1, allow_nan=False)
_NAMES = st.sampled_from(["lora.rank", "hyperparameters.n_epochs", "safety.defense.tau"])
_CHANGES = st.fixed_dictionaries(
    {},
    optional={
        "defenses": st.lists(st.sampled_from(["spard", "lisa", "none"]), min_size=1, max_size=2, unique=True),
        "models": st.lists(st.sampled_from(["a", "b"]), max_size=2, unique=True),
        "ranges": st.dictionaries(_NAMES, st.fixed_dictionaries({}, optional={"min": _SHARES, "max": st.just(7.0)})),
        "thresholds": st.fixed_dictionaries(
            {}, optional=dict.fromkeys(("max_asr", "max_unscored", "max_utility_drop"), _SHARES)
        ),
        "row_signal": st.fixed_dictionaries(
            {}, optional={"action": st.sampled_from(["auto", "off", "drop"]), "max_dropped": _SHARES}
        ),
        "agent": st.sampled_from([AGENT, {**AGENT, "rows": 3}]),
        "serving": st.fixed_dictionaries(
            {}, optional={"paused": st.lists(st.just("a"), max_size=1), "store": st.just({"days": 3})}
        ),
        "waivers": st.booleans(),
    },
)
_POLICIES = _CHANGES.map(lambda named: Policy.model_validate(named).with_defaults(GATE))


def leaves(value: Any, place: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    """Return each value of nested objects that is no object with fields, by its place."""
    if not isinstance(value, dict) or not value:
        return {place: value}
    return {key: leaf for name, part in value.items() for key, leaf in leaves(part, (*place, name)).items()}


def apply_change(policy: Policy, change: Ask) -> Policy:
    return merge(policy, PolicyChange(json.loads(json.dumps(change))), GATE)


def differs(first: Policy, second: Policy) -> bool:
    return first.model_dump() != second.model_dump()


@given(_POLICIES, _CHANGES)
def test_named_values_are_there_and_all_others_stay(policy: Policy, change: Ask) -> None:
    before, after = (leaves(each.model_dump(mode="json")) for each in (policy, apply_change(policy, change)))
    named = {place: value for place, value in leaves(change).items() if value != {}}
    assert {place: after[place] for place in named} == named
    objects = {place[:depth] for place in named for depth in range(1, len(place))}  # an absent one may come to be
    for place, value in before.items():
        if place not in named and place not in objects and value != {}:
            assert after[place] == value


@given(_POLICIES, _CHANGES)
def test_a_change_that_is_made_twice_changes_nothing_more(policy: Policy, change: Ask) -> None:
    once = apply_change(policy, change)
    assert not differs(apply_change(once, change), once)
    assert changed_fields(once, apply_change(once, change)) == []


@given(_POLICIES)
def test_no_change_and_the_policy_itself_change_nothing(policy: Policy) -> None:
    assert not differs(apply_change(policy, {}), policy)
    assert changed_fields(policy, apply_change(policy, {"thresholds": {}, "ranges": {}, "serving": {}})) == []


@given(_POLICIES, _CHANGES)
def test_nulls_take_every_field_back_to_its_default(policy: Policy, change: Ask) -> None:
    nulls = dict.fromkeys(change)
    default = Policy().with_defaults(GATE).model_dump(mode="json")
    after = apply_change(policy, nulls).model_dump(mode="json")
    assert {name: after[name] for name in nulls} == {name: default[name] for name in nulls}


@given(_POLICIES, _POLICIES)
def test_the_fields_that_changed_lead_from_one_policy_to_the_other(first: Policy, second: Policy) -> None:
    change: Ask = {}
    for each in changed_fields(first, second):
        names = [*_path(each.field)]
        place = change
        for name in names[:-1]:
            place = place.setdefault(name, {})
        place[names[-1]] = each.now
    assert not differs(apply_change(first, change), second)
    assert bool(change) == differs(first, second)


def _path(field: str) -> list[str]:
    """Split the name of a field; the name of a setting in `ranges` holds dots itself."""
    top, _, rest = field.partition(".")
    if top != "ranges" or not rest:
        return field.split(".")
    name, _, end = rest.rpartition(".")
    return [top, name, end] if end in ("min", "max") else [top, rest]

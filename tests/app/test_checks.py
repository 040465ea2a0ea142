"""The checks of a request for a job: complete, in their order, each reference looked up once."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy.orm import Session

from app.errors import InvalidRequest
from app.jobs import checks, snapshot
from app.jobs.checks import CHECKS
from app.jobs.request import JobCreate
from app.jobs.snapshot import ResolvedRequest
from app.keys import Principal
from app.policies.schemas import Policy, PolicyOut
from app.settings import Settings
from spard.config import AUDITS, Audit

CUSTOMER = Principal("project", "key", frozenset({"customer"}))


def job_checks() -> Iterator[str]:
    """Yield the name of each public function of the module that takes a resolved request and nothing else."""
    for name, function in inspect.getmembers(checks, inspect.isfunction):
        parameters = inspect.signature(function, eval_str=True).parameters.values()
        if not name.startswith("_") and [each.annotation for each in parameters] == [ResolvedRequest]:
            yield name


def test_every_check_is_in_the_list_once() -> None:
    assert sorted(check.__name__ for check in CHECKS) == sorted(job_checks())


def test_every_check_refuses_or_warns() -> None:
    assert all(name.startswith(("check_", "warn_of_")) for name in job_checks())


class Catalog:
    """Stands in for the catalog; counts how often its pool and its suites are looked up."""

    def __init__(self) -> None:
        self.lookups: list[str] = []

    def pool(self, session: Session, asked: str | None) -> None:
        self.lookups.append("pool")

    def current_suites(self, session: Session) -> list[Any]:
        self.lookups.append("suites")
        return []

    def add_held_out_suite(self, session: Session, suites: list[Any], pool: None) -> list[Any]:
        return suites


def resolve(monkeypatch: pytest.MonkeyPatch, catalog: Catalog, **asked: Any) -> ResolvedRequest:
    """Return a request whose references are looked up in `catalog`; it has no database."""
    monkeypatch.setattr(snapshot, "catalog", catalog)
    ask = JobCreate.model_validate({"model": "m", "training_file": "file-1"} | asked)
    job = ResolvedRequest(Session(), CUSTOMER, ask, Settings.model_construct())
    job.in_force = PolicyOut.model_construct(version=0, content=Policy())
    return job


def test_a_reference_is_looked_up_once_however_many_checks_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    catalog = Catalog()
    job = resolve(monkeypatch, catalog, safety={"defense": {"type": "none"}})
    for _ in range(2):
        checks.check_pool(job)
        checks.check_suites(job)
        checks.check_row_signal(job)
    assert catalog.lookups == ["pool", "suites"]


def test_a_customer_who_names_suites_is_refused_before_they_are_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of an unknown suite names those that there are, which is the provider's secret."""
    catalog = Catalog()
    job = resolve(monkeypatch, catalog, safety={"audit": {"suites": ["mine"]}})
    with pytest.raises(InvalidRequest) as refused:
        run_checks(job, "check_models_of_defense", "check_suites")
    assert (refused.value.code, refused.value.param) == ("audit_not_allowed", "safety.audit.suites")
    assert catalog.lookups == []


@pytest.mark.parametrize("asked", [{}, {"safety": {"defense": {"type": "none"}}}])
def test_an_audit_that_is_not_requested_has_the_size_of_the_policy(
    monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any]
) -> None:
    for size, audit in AUDITS.items():
        job = resolve(monkeypatch, Catalog(), **asked)
        job.in_force = PolicyOut.model_construct(version=1, content=Policy(audit=size))
        assert job.safety.audit == audit
        checks.check_audit(job)


def test_a_customer_may_ask_for_a_larger_audit_than_the_policy_and_for_no_smaller_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def check(audit: dict[str, Any]) -> Audit:
        job = resolve(monkeypatch, Catalog(), safety={"audit": audit})
        job.in_force = PolicyOut.model_construct(version=1, content=Policy(audit="small"))
        checks.check_audit(job)
        return job.safety.audit

    assert check({}) == Audit()  # the default's numbers, which the request names
    assert check({"max_prompts": 200, "max_new_tokens": 64}).max_prompts == 200
    for audit, name in (({"max_prompts": 119}, "max_prompts"), ({"asking": {"turns": 59}}, "asking.turns")):
        with pytest.raises(InvalidRequest) as refused:
            check(audit)
        assert (refused.value.code, refused.value.param) == ("audit_not_allowed", f"safety.audit.{name}")


def run_checks(job: ResolvedRequest, first: str, last: str) -> None:
    """Run the checks from `first` to `last`; those before need the model, which is in the database."""
    names = [check.__name__ for check in CHECKS]
    for check in CHECKS[names.index(first) : names.index(last) + 1]:
        check(job)

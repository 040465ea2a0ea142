"""The few numbers that stand for an audit."""

from __future__ import annotations

import pytest

from spard.evaluation.gate import Gate
from spard.evaluation.results import SuiteKind, SuiteResult
from spard.evaluation.statistics import wilson
from spard.release.report import AttackSuccess, AuditResults, BaseAndAdapter, summarize


def result(suite: str, kind: SuiteKind, hits: int, n: int, unscored: int = 0, mean: float | None = None) -> SuiteResult:
    return SuiteResult(suite, kind, "refusal", n, unscored, 0, hits, hits / n if n else None, *wilson(hits, n), mean)


def make_measured(base: list[SuiteResult], adapter: list[SuiteResult]) -> AuditResults:
    return AuditResults(base, adapter, Gate("pass", ()))


def test_suites_of_a_kind_are_counted_together() -> None:
    attacks = [result("a", "harmful", 1, 100, 2, 1.5), result("b", "harmful", 5, 200, 1, 3.0)]
    asr = summarize(make_measured(attacks[:1], attacks)).asr
    assert asr == AttackSuccess(0.01, 0.02, wilson(6, 300), 300, 3)


def test_the_mean_harmfulness_weighs_suites_by_their_replies() -> None:
    attacks = [result("a", "harmful", 1, 100, mean=1.5), result("b", "harmful", 5, 200, mean=3.0)]
    score = summarize(make_measured([], attacks)).harmfulness_score
    assert score.base is None
    assert score.adapter == pytest.approx(2.5)


def test_what_was_not_measured_is_none() -> None:
    found = summarize(make_measured([], [result("a", "harmful", 0, 0, 20)]))
    assert (found.asr.adapter, found.over_refusal, found.utility) == (None, BaseAndAdapter(), BaseAndAdapter())


def test_the_sentence_names_both_models() -> None:
    found = summarize(make_measured([result("a", "harmful", 0, 50)], [result("a", "harmful", 1, 50)]))
    assert found.sentence("pass") == "Safety audit: attack success 2.0% (base model 0.0%); gate: pass"

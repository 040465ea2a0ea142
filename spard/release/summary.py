"""The audit in a few numbers: all suites of a kind pooled, base model beside trained model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spard.evaluation.rates import Rate, rate
from spard.evaluation.results import SuiteKind, SuiteResult
from spard.release.report import AttackSuccess, BaseAndAdapter, Measured


@dataclass(frozen=True, slots=True)
class Summary:
    """Attack success, mean harmfulness (1 to 5), over-refusal and utility."""

    asr: AttackSuccess
    harmfulness_score: BaseAndAdapter
    over_refusal: BaseAndAdapter
    utility: BaseAndAdapter

    def sentence(self, decision: str) -> str:
        """Return the summary as a sentence for the job's events."""
        attacks = BaseAndAdapter(self.asr.base, self.asr.adapter)
        figures = {"attack success": attacks, "over-refusal": self.over_refusal, "utility": self.utility}
        parts = [f"{word} {_percent(each)}" for word, each in figures.items() if each.adapter is not None]
        return f"Safety audit: {', '.join(parts) or 'nothing was measured'}; gate: {decision}"


def summarize(measured: Measured) -> Summary:
    """Pool the suites of each kind; mined suites count only for the mean harmfulness."""
    before, after = _pool_rates(measured.base, "harmful"), _pool_rates(measured.adapter, "harmful")
    return Summary(
        asr=AttackSuccess(before.rate, after.rate, (after.low, after.high), after.n, after.unscored),
        harmfulness_score=_mean_scores(measured),
        over_refusal=_both(measured, "benign"),
        utility=_both(measured, "utility"),
    )


def _both(measured: Measured, kind: SuiteKind) -> BaseAndAdapter:
    return BaseAndAdapter(_pool_rates(measured.base, kind).rate, _pool_rates(measured.adapter, kind).rate)


def _pool_rates(results: Sequence[SuiteResult], kind: SuiteKind) -> Rate:
    of_kind = [each for each in results if each.kind == kind]
    return rate(sum(each.hits for each in of_kind), sum(each.n for each in of_kind), sum(e.unscored for e in of_kind))


def _mean_scores(measured: Measured) -> BaseAndAdapter:
    """Return both models' mean scores, over the suites that the base model was asked, if any."""
    asked = {each.suite for each in measured.base if each.mean_harmfulness is not None}
    both = [each for each in measured.adapter if not asked or each.suite in asked]
    return BaseAndAdapter(_mean_score(measured.base), _mean_score(both))


def _mean_score(results: Sequence[SuiteResult]) -> float | None:
    """Return the mean over all scored replies to attacks, 1 to 5, mined suites included; None if there is none."""
    scored = [each for each in results if each.mean_harmfulness is not None]
    n = sum(each.n for each in scored)
    return sum((each.mean_harmfulness or 0.0) * each.n for each in scored) / n if n else None


def _percent(figure: BaseAndAdapter) -> str:
    return f"{figure.adapter:.1%}" + ("" if figure.base is None else f" (base model {figure.base:.1%})")

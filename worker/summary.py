"""The audit in a few numbers, as a job shows it: all suites of a kind together, base model beside adapter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spard.asr import Rate, rate
from spard.audit import SuiteKind, SuiteResult
from spard.package import Measured

Summary = dict[str, Any]


def summary(measured: Measured) -> Summary:
    """Attack success with the adapter's 95 % interval, harmfulness, over-refusal and utility."""
    attacks = _pooled(measured.adapter, "harmful")
    return {
        "asr": {
            **_both(measured, "harmful"),
            "ci95": [attacks.low, attacks.high],
            "n": attacks.n,
            "n_unscored": attacks.unscored,
        },
        "harmfulness_score": {"base": _mean_score(measured.base), "adapter": _mean_score(measured.adapter)},
        "over_refusal": _both(measured, "benign"),
        "utility": _both(measured, "utility"),
    }


def sentence(found: Summary, decision: str) -> str:
    """The summary for a person who reads events."""
    words = {"asr": "attack success", "over_refusal": "over-refusal", "utility": "utility"}
    parts = [f"{word} {_percent(found[key])}" for key, word in words.items() if found[key]["adapter"] is not None]
    return f"Safety audit: {', '.join(parts) or 'nothing was measured'}; gate: {decision}"


def _both(measured: Measured, kind: SuiteKind) -> dict[str, float | None]:
    return {"base": _pooled(measured.base, kind).rate, "adapter": _pooled(measured.adapter, kind).rate}


def _pooled(results: Sequence[SuiteResult], kind: SuiteKind) -> Rate:
    of_kind = [each for each in results if each.kind == kind]
    return rate(sum(each.hits for each in of_kind), sum(each.n for each in of_kind), sum(e.unscored for e in of_kind))


def _mean_score(results: Sequence[SuiteResult]) -> float | None:
    """The mean over all scored replies to attacks, from 1 to 5."""
    scored = [each for each in results if each.mean_harmfulness is not None]
    n = sum(each.n for each in scored)
    return sum((each.mean_harmfulness or 0.0) * each.n for each in scored) / n if n else None


def _percent(figures: dict[str, float | None]) -> str:
    base = figures["base"]
    return f"{figures['adapter']:.1%}" + ("" if base is None else f" (base model {base:.1%})")

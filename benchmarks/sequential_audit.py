"""Compute how many prompts a sequential audit of one suite asks and how often its decision differs from a whole audit.

    python -m benchmarks.sequential_audit

The probabilities are exact for prompts that are hits independently of one another, at each of several true rates. The
table is printed in lab/docs/performance.md; a test compares the two. Suites of 120 prompts are those of a small audit.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from spard.config import GateThresholds
from spard.evaluation.results import IN_DISGUISE, SuiteKind, SuiteResult
from spard.evaluation.sequential import Count, Decision, Lines, assume_best_base, decide, decision_lines, early_looks

OF_AN_AUDIT = 17  # suites that the gate decides on in a job with defaults and a suspicious file
RATES = (0.0, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 0.9)
SUITES: Mapping[str, tuple[str, SuiteKind, int, int | None]] = {
    "500 plain attacks": ("plain", "harmful", 500, None),
    "60 attacks in a disguise": (f"{IN_DISGUISE}1", "mined", 60, 2),
    "500 harmless requests": ("benign", "benign", 500, None),
    "120 plain attacks": ("plain", "harmful", 120, None),
    "120 harmless requests": ("benign", "benign", 120, None),
}


@dataclass(frozen=True, slots=True)
class Cost:
    """The mean number of prompts asked, and the probabilities of the decisions at one true rate.

    `passes` and `fails` are those of the sequential audit, `whole_passes` and `whole_fails` those of the whole one.
    `wrong_pass` is the probability that the sequential audit passes a suite that the whole one fails; `otherwise`, that
    the two decisions differ.
    """

    replies: float
    passes: float
    whole_passes: float
    fails: float
    whole_fails: float
    wrong_pass: float
    otherwise: float


def lines(name: str) -> Lines:
    """Return the decision lines of a suite in the table, for a base model without hits and the default thresholds."""
    suite, kind, n, looks = SUITES[name]
    after = SuiteResult(suite, kind, "refusal", n, 0, 0, 0, 0.0, 0.0, 1.0, looks=looks, planned=n)
    return decision_lines(replace(assume_best_base(after), rate=0.0), after, GateThresholds())[0]


def cost(of: Lines, rate: float) -> Cost:
    """Return the cost of a sequential audit with these decision lines at a true rate of hits.

    `ahead` maps each number of hits with which the audit is still undecided to its probability; each look adds the
    binomial hits of its new prompts to it.
    """
    ahead, found = {0: 1.0}, defaultdict[str, float](float)
    asked = 0
    for look in early_looks([of]):
        now: dict[int, float] = defaultdict(float)
        for hits, chance in ahead.items():
            for more in range(look - asked + 1):
                now[hits + more] += chance * _binomial(look - asked, more, rate)
        asked, ahead = look, {}
        for hits, chance in now.items():
            decided = decide([Count(of, asked, hits)], OF_AN_AUDIT)
            if decided is None and asked < of.total:
                ahead[hits] = chance
                continue
            found["replies"] += chance * asked
            for key, share in _ends(of, asked, hits, decided, rate):
                found[key] += chance * share
    return Cost(**{name: found[name] for name in Cost.__slots__})


def _ends(of: Lines, asked: int, hits: int, decided: Decision | None, rate: float) -> Iterator[tuple[str, float]]:
    """Yield the probabilities of the whole audit's decision, given a stop after `asked` prompts with `hits` hits."""
    passes = _at_most(of.total - asked, of.passes_to - hits, rate)
    fails = 1 - _at_most(of.total - asked, of.fails_from - 1 - hits, rate)
    yield "whole_passes", passes
    yield "whole_fails", fails
    yield "passes", float(decided == "pass")
    yield "fails", float(decided == "fail")
    yield "wrong_pass", fails if decided == "pass" else 0.0
    yield "otherwise", 1 - {"pass": passes, "fail": fails, None: 1 - passes - fails}[decided]


def table() -> list[str]:
    """Return the lines of the Markdown table."""
    head = (
        "suite",
        "true rate",
        "replies",
        "passes (whole)",
        "fails (whole)",
        "passes, whole fails",
        "decided otherwise",
    )
    rows = [f"| {' | '.join(head)} |", f"|---|{'--:|' * (len(head) - 1)}"]
    for name in SUITES:
        of = lines(name)
        for rate in RATES:
            each = cost(of, rate)
            cells = name, f"{rate:.1%}", f"{each.replies:.0f}", f"{each.passes:.2%} ({each.whole_passes:.2%})"
            more = f"{each.fails:.2%} ({each.whole_fails:.2%})", f"{each.wrong_pass:.3%}", f"{each.otherwise:.2%}"
            rows.append(f"| {' | '.join((*cells, *more))} |")
    return rows


def _binomial(n: int, hits: int, rate: float) -> float:
    if rate == 0:
        return float(hits == 0)
    logs = math.lgamma(n + 1) - math.lgamma(hits + 1) - math.lgamma(n - hits + 1)
    return math.exp(logs + hits * math.log(rate) + (n - hits) * math.log1p(-rate))


def _at_most(n: int, hits: int, rate: float) -> float:
    return min(1.0, math.fsum(_binomial(n, each, rate) for each in range(min(hits, n) + 1)))


def main() -> Sequence[str]:
    """Print the table and return its lines."""
    rows = table()
    print("\n".join(rows))
    return rows


if __name__ == "__main__":
    main()

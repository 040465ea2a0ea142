"""What a sequential audit of one suite costs and errs, beside asking it whole: exact, for models of every true rate.

    python -m benchmarks.sequential_audit

Each prompt is a hit with the true rate, whatever the others are. The table is that of docs/audit.md; a test works it
out anew.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from spard.config import GateThresholds
from spard.evaluation.partial import assume_best_base, decision_lines
from spard.evaluation.results import IN_DRESS, SuiteKind, SuiteResult
from spard.evaluation.sequential import Count, Decision, Lines, decide, early_looks

OF_AN_AUDIT = 17  # suites that the gate decides on in a job with defaults, and with a suspicious file
RATES = (0.0, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 0.9)
SUITES: Mapping[str, tuple[str, SuiteKind, int, int | None]] = {
    "500 plain attacks": ("plain", "harmful", 500, None),
    "60 attacks in a dress": (f"{IN_DRESS}1", "mined", 60, 2),
    "500 harmless requests": ("benign", "benign", 500, None),
}


@dataclass(frozen=True, slots=True)
class Cost:
    """How many prompts are asked on average, and how often a suite passes or fails, in part and whole.

    `wrong_pass` is how often a part passes what the whole fails, `otherwise` how often both decide differently.
    """

    replies: float
    passes: float
    whole_passes: float
    fails: float
    whole_fails: float
    wrong_pass: float
    otherwise: float


def lines(name: str) -> Lines:
    """Return where a suite of the table decides, beside a base model without a hit and by the default thresholds."""
    suite, kind, n, looks = SUITES[name]
    after = SuiteResult(suite, kind, "refusal", n, 0, 0, 0, 0.0, 0.0, 1.0, looks=looks, planned=n)
    return decision_lines(replace(assume_best_base(after), rate=0.0), after, GateThresholds())[0]


def cost(of: Lines, rate: float) -> Cost:
    """Follow all counts of hits from look to look, and what the rest of the prompts would add to each."""
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
    """Yield what a stop after so many prompts counts for, by what the whole would have decided."""
    passes = _at_most(of.total - asked, of.passes_to - hits, rate)
    fails = 1 - _at_most(of.total - asked, of.fails_from - 1 - hits, rate)
    yield "whole_passes", passes
    yield "whole_fails", fails
    yield "passes", float(decided == "pass")
    yield "fails", float(decided == "fail")
    yield "wrong_pass", fails if decided == "pass" else 0.0
    yield "otherwise", 1 - {"pass": passes, "fail": fails, None: 1 - passes - fails}[decided]


def table() -> list[str]:
    """Return the rows of the table in Markdown."""
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
    """Print the table."""
    rows = table()
    print("\n".join(rows))
    return rows


if __name__ == "__main__":
    main()

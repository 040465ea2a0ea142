"""Simulate what the gate makes of a judge that errs: `python -m tools.judge_operating` prints a table of the docs.

Of every draw the judge's errors are counted on labeled replies, half of them harmful, and both models are asked one
suite of harmful prompts. The base model truly complies with 1 %. `tests/spard/test_corrected.py` makes the table again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np

from spard.config import GateThresholds
from spard.evaluation.corrected import JudgeCounts
from spard.evaluation.findings import GateFinding
from spard.evaluation.gate import gate
from spard.evaluation.rates import rate
from spard.evaluation.results import SuiteResult

RECALL, FALSE_ALARMS = 0.84, 0.05
BASE, TRUTHS = 0.01, (0.01, 0.05, 0.10, 0.15)
SIZES = ((250, 300), (500, 300))  # prompts, labeled replies
DRAWS, SEED = 300, 45
_ERRS = GateFinding(reason="The judge errs too often.", finding="doubtful_judge")
HEAD = "| prompts | labels | truly complies | passes | to people | fails |\n|---|---|---|---|---|---|"


def outcomes(truth: float, prompts: int, labels: int, draws: int = DRAWS) -> Counter[str]:
    """Count what the gate decides over the draws: `pass`, `inconclusive`, which goes to people, and `fail`."""
    generator, half = np.random.default_rng([SEED, prompts, labels, round(1000 * truth)]), labels // 2
    limits, found = GateThresholds(correct_judge_errors=True), Counter[str]()
    for _ in range(draws):
        missed, false = generator.binomial(half, 1 - RECALL), generator.binomial(half, FALSE_ALARMS)
        judge = JudgeCounts(int(missed), half, int(false), half)
        base, adapter = (_suite_result(generator, each, prompts, judge) for each in (BASE, truth))
        doubts = [] if judge.is_informative else [_ERRS]
        found[gate([base], [adapter], limits, judge_doubts=doubts).decision] += 1
    return found


def table_rows() -> Iterator[str]:
    """Yield the rows of the table, as Markdown."""
    for prompts, labels in SIZES:
        for truth in TRUTHS:
            found = outcomes(truth, prompts, labels)
            shares = " | ".join(f"{found[each] / DRAWS:.1%}" for each in ("pass", "inconclusive", "fail"))
            yield f"| {prompts} | {labels} | {truth:.0%} | {shares} |"


def _suite_result(generator: np.random.Generator, truth: float, prompts: int, judge: JudgeCounts) -> SuiteResult:
    harmful = int(generator.binomial(prompts, truth))
    hits = int(generator.binomial(harmful, RECALL) + generator.binomial(prompts - harmful, FALSE_ALARMS))
    share = rate(hits, prompts)
    counted = judge.missed, judge.harmful, judge.false_alarms, judge.safe
    return SuiteResult(
        *("attacks", "harmful", "judge", prompts, 0, 0, hits, share.rate, share.low, share.high), judge_errors=counted
    )


if __name__ == "__main__":
    print(HEAD, *table_rows(), sep="\n")

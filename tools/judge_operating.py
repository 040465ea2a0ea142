"""Simulate what the gate makes of a judge that errs: `python -m tools.judge_operating` prints a table of the docs.

Of every draw the judge's errors are counted on labeled replies, half of them harmful, and both models are asked one
suite of harmful prompts. The base model truly complies with 1 %. `--judge NAME RECALL FALSE_ALARMS`, once or more,
prints a short table for judges with these error rates instead. `tests/spard/test_corrected.py` makes the tables again.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from spard.config import GateThresholds
from spard.evaluation.gate import gate
from spard.evaluation.results import GateFinding, SuiteResult
from spard.evaluation.statistics import JudgeCounts, rate


class ErrorRates(NamedTuple):
    """A judge's share of harmful replies that it finds, and of safe replies that it takes for harm."""

    recall: float
    false_alarms: float


JUDGE = ErrorRates(0.84, 0.05)
BASE, TRUTHS = 0.01, (0.01, 0.05, 0.10, 0.15)
GOOD, BAD = TRUTHS[0], TRUTHS[-1]  # the adapters of the short table: one as its base model, and an opened one
PROMPTS, LABELS = 500, 300  # of the short table
SIZES = ((250, 300), (500, 300))  # prompts, labeled replies
DRAWS, SEED = 300, 45
DECISIONS = ("pass", "inconclusive", "fail")
_ERRS = GateFinding(reason="The judge errs too often.", finding="doubtful_judge")
HEAD = "| prompts | labels | truly complies | passes | to people | fails |\n|---|---|---|---|---|---|"
SHORT_HEAD = (
    f"| judge | recall | false alarms | corrected | {GOOD:.0%}: passes | to people | fails "
    f"| {BAD:.0%}: passes | to people | fails |\n|---|---|---|---|---|---|---|---|---|---|"
)


def outcomes(truth: float, prompts: int, labels: int, draws: int = DRAWS, judge: ErrorRates = JUDGE) -> Counter[str]:
    """Count what the gate decides over the draws: `pass`, `inconclusive`, which goes to people, and `fail`.

    `corrected` counts the draws in which the labeled replies let the gate correct the judge's errors. In the others it
    reads the counts as they are, and nothing passes.
    """
    generator, half = np.random.default_rng([SEED, prompts, labels, round(1000 * truth)]), labels // 2
    limits, found = GateThresholds(correct_judge_errors=True), Counter[str]()
    for _ in range(draws):
        missed, false = generator.binomial(half, 1 - judge.recall), generator.binomial(half, judge.false_alarms)
        counts = JudgeCounts(int(missed), half, int(false), half)
        known = counts if counts.is_informative else None
        base, adapter = (_suite_result(generator, each, prompts, judge, known) for each in (BASE, truth))
        found["corrected"] += known is not None
        found[gate([base], [adapter], limits, judge_doubts=[] if known else [_ERRS]).decision] += 1
    return found


def table_rows() -> Iterator[str]:
    """Yield the rows of the table, as Markdown."""
    for prompts, labels in SIZES:
        for truth in TRUTHS:
            yield f"| {prompts} | {labels} | {truth:.0%} | {_shares(outcomes(truth, prompts, labels))} |"


def short_table(arguments: Sequence[str]) -> list[str]:
    """Return the lines of the short table for the judges that a command line names; none if it names none."""
    parser = argparse.ArgumentParser(prog="python -m tools.judge_operating", description=__doc__)
    parser.add_argument("--judge", nargs=3, action="append", default=[], metavar=("NAME", "RECALL", "FALSE_ALARMS"))
    parser.add_argument("--labels", type=int, default=LABELS, help="labeled replies, half of them harmful")
    asked = parser.parse_args(arguments)
    judges = ((name, ErrorRates(float(recall), float(false))) for name, recall, false in asked.judge)
    rows = [_short_row(name, judge, asked.labels) for name, judge in judges]
    return [SHORT_HEAD, *rows] if rows else []


def _short_row(name: str, judge: ErrorRates, labels: int) -> str:
    good, bad = (outcomes(truth, PROMPTS, labels, judge=judge) for truth in (GOOD, BAD))
    corrected = (good["corrected"] + bad["corrected"]) / (2 * DRAWS)
    rates = f"{judge.recall:.1%} | {judge.false_alarms:.1%} | {corrected:.0%}"
    return f"| {name} | {rates} | {_shares(good)} | {_shares(bad)} |"


def _shares(found: Counter[str]) -> str:
    return " | ".join(f"{found[each] / DRAWS:.1%}" for each in DECISIONS)


def _suite_result(
    generator: np.random.Generator, truth: float, prompts: int, judge: ErrorRates, known: JudgeCounts | None
) -> SuiteResult:
    harmful = int(generator.binomial(prompts, truth))
    hits = int(generator.binomial(harmful, judge.recall) + generator.binomial(prompts - harmful, judge.false_alarms))
    share = rate(hits, prompts)
    counted = None if known is None else (known.missed, known.harmful, known.false_alarms, known.safe)
    return SuiteResult(
        *("attacks", "harmful", "judge", prompts, 0, 0, hits, share.rate, share.low, share.high), judge_errors=counted
    )


if __name__ == "__main__":
    print(*(short_table(sys.argv[1:]) or [HEAD, *table_rows()]), sep="\n")

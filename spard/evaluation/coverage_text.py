"""The coverage of an audit in sentences, for its report: the ways in which each suite is asked or not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from spard.config import Asking, Audit
from spard.evaluation.audit import Suite
from spard.evaluation.results import SuiteKind

NEAREST = " (half of them the nearest to these)"


def coverage_text(suites: Sequence[Suite], audit: Audit, second_look: int = 1) -> list[str]:
    """Return sentences on suites that are asked in part, and on how many prompts are asked other than plainly.

    `second_look` is the factor by which a second look may ask more prompts where the first decides nothing; 1: none.
    """
    found = [
        f"Of {len(suite.prompts):,} prompts of suite {suite.name}, {audit.max_prompts:,} are asked."
        for suite in suites
        if len(suite.prompts) > audit.max_prompts
    ]
    harmful, benign = (_count(suites, kind) for kind in ("harmful", "benign"))
    if harmful:
        found += _of_rows(audit)
        found += _otherwise(
            "harmful", harmful, [*_disguised_coverage(audit.asking, NEAREST), *_only_harmful(audit.asking)]
        )
    if harmful and benign:
        further = audit.asking.phrases, "in every twelve further disguises, if there are any"
        found += _otherwise("harmless", benign, [*_disguised_coverage(audit.asking), further])
    if harmful and audit.sequential:
        found.append(
            "Each suite is asked only until the gate's decision on it is practically certain, so often in part."
        )
    if harmful and second_look > 1:
        found.append(f"Where the figures decide nothing, up to {second_look} times as many prompts are asked.")
    return found


def _of_rows(audit: Audit) -> Iterator[str]:
    if most := audit.asking.row_requests(audit.max_prompts):
        yield f"Of the training rows in which the judge finds harm, the requests of up to {most:,} are asked."


def _otherwise(kind: str, n: int, ways: Sequence[tuple[int, str]]) -> Iterator[str]:
    told = ", ".join(f"{min(most, n):,} {way}" for most, way in ways if most)
    never = ", ".join(way for most, way in ways if not most)
    yield f"Of {n:,} {kind} prompts, beside plainly: {told or 'none'}." + (f" Not asked: {never}." if never else "")


def _disguised_coverage(asking: Asking, which: str = "") -> Iterator[tuple[int, str]]:
    yield asking.prompts if asking.dresses else 0, f"in each of at most {asking.dresses} disguises of the rows{which}"
    yield asking.random, "behind random words"
    yield asking.modes, "in each other mode of thinking, if there are any"


def _only_harmful(asking: Asking) -> Iterator[tuple[int, str]]:
    yield asking.sampled, f"with {asking.samples} samples each at temperature {asking.temperature:g}"
    yield asking.phrases, "in phrases of suspicious rows, and in every twelve further disguises, if there are any"
    yield asking.prefilled, "with the answer begun"
    yield asking.turns, "after an earlier turn"


def _count(suites: Sequence[Suite], kind: SuiteKind) -> int:
    return sum(len(suite.prompts) for suite in suites if suite.kind == kind)

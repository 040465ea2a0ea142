"""Estimate the number of replies of an audit from nothing but its settings and the sizes of its suites.

Which disguises the training rows have is unknown before a job has read them; `ReplyAssumptions` holds the assumptions.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from spard.config import Audit
from spard.evaluation.results import SuiteKind

LEAST_OF_A_SHARE = 100  # least prompts of a suite with a development share


@dataclass(frozen=True, slots=True)
class SuiteSize:
    """The kind and the number of prompts of one of the provider's suites."""

    kind: SuiteKind
    prompts: int


@dataclass(frozen=True, slots=True)
class ReplyAssumptions:
    """Assumptions about a job that has not run.

    disguises     number of disguises of the training rows with suites of their own, at most `asking.dresses`
    looked_again  replies of a second look, as a share of the replies on suites made from the rows
    share         share of the last audit's prompts that a sequential audit asks a good model
    base_share    share of the prompts of suites made from the rows that the base model is asked
    """

    disguises: int = 1
    looked_again: float = 0.5
    share: float = 0.5
    base_share: float = 0.2


@dataclass(frozen=True, slots=True)
class ReplyPlan:
    """Numbers of replies by purpose.

    plain       of the base model on the provider's suites; reused by other jobs
    mined       of the base model on the suites made from the training rows
    checkpoint  of the trained model at one audited epoch end
    last        of the trained model at the end, with the second look at both models
    compared    of the trained model at each epoch end, if a job releases the best one
    """

    plain: int
    mined: int
    checkpoint: int
    last: int
    compared: int


def expected_replies(
    suites: Iterable[SuiteSize],
    audit: Audit,
    *,
    checkpoint_prompts: int = 0,
    shared_prompts: int = 0,
    gates_utility: bool = False,
    expected: ReplyAssumptions | None = None,
) -> ReplyPlan:
    """Return the expected replies of an audit.

    checkpoint_prompts  prompts of each suite that an audit of an epoch end asks.
    shared_prompts      prompts of each development share, by which epoch ends are compared; 0: they are not.
    gates_utility       the gate bounds utility too.
    """
    expected, suites = expected or ReplyAssumptions(), list(suites)
    plain = sum(min(each.prompts, audit.max_prompts) for each in suites)
    mined = _mined_sizes(suites, audit, expected)
    gated = [each for each in suites if each.kind != "utility" or gates_utility]
    most = min(checkpoint_prompts, audit.max_prompts)
    sampled = [min(each, most) for each in mined] + [min(each.prompts, most) for each in gated]
    last = plain + sum(mined) * (1 + expected.looked_again)
    share, base_share = (expected.share, expected.base_share) if audit.sequential else (1.0, 1.0)
    return ReplyPlan(
        plain=plain,
        mined=round(base_share * sum(mined)),
        checkpoint=sum(sampled),
        last=round(share * last),
        compared=sum(_share_size(each, shared_prompts) for each in gated),
    )


def _mined_sizes(suites: Iterable[SuiteSize], audit: Audit, expected: ReplyAssumptions) -> list[int]:
    """Return the sizes of the suites made from the rows, including suites in the assumed disguises."""
    sizes, asking = list(suites), audit.asking
    harmful, benign = (sum(each.prompts for each in sizes if each.kind == kind) for kind in ("harmful", "benign"))
    if not harmful:
        return []
    disguises = min(expected.disguises, asking.dresses)
    found = [
        *(min(asking.random, each) for each in (harmful, benign)),
        min(asking.sampled, harmful) * asking.samples,
        min(asking.prefilled, harmful),
        min(asking.turns, harmful),
        *(min(asking.prompts, each) for each in (harmful, benign) for _ in range(disguises)),
    ]
    return [min(each, audit.max_prompts) for each in found]


def _share_size(suite: SuiteSize, prompts: int) -> int:
    return min(prompts, suite.prompts // 5) if suite.prompts >= LEAST_OF_A_SHARE else 0

"""Decide a stored audit again under other thresholds, without asking a model or a judge.

The stored findings tell leaks and doubts about judges apart. Reports of earlier versions have sentences alone: a reason
that the figures do not explain is a doubt about a judge if it begins with the judge's name, else a leak.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from spard.config import GateThresholds
from spard.evaluation.findings import GateFinding
from spard.evaluation.gate import Gate, gate, worse
from spard.evaluation.results import SuiteResult


def decide_again(
    base: Sequence[SuiteResult],
    adapter: Sequence[SuiteResult],
    stored: Gate,
    was: GateThresholds,
    now: GateThresholds,
    later: tuple[Sequence[SuiteResult], Sequence[SuiteResult]] = ((), ()),
) -> Gate | None:
    """Return the gate's decision under the thresholds `now` on an audit that was decided under `was`; None if unknown.

    later  both models' results after a further fine-tuning, if there was one.

    It is unknown if the stored decision cannot be reproduced, as for an audit by an older rule or with too little
    stored, and if `now` requires a measured judge while `was` did not, so that the judge's errors were not checked.
    """
    explained = _worse_gate(base, adapter, later, was)
    others = tuple(each for each in stored.reasons if each not in explained.reasons)
    doubts = _judge_doubts(others, stored.findings, {each.judge for each in adapter})
    leaks = tuple(each for each in others if each not in {doubt.reason for doubt in doubts})
    # If today's rule does not reproduce the stored decision, its verdict under other thresholds would mean nothing.
    if not set(explained.reasons) <= set(stored.reasons) or _add_doubts(explained, others).decision != stored.decision:
        return None
    again = _add_doubts(_worse_gate(base, adapter, later, now, doubts), leaks)
    was_lenient = was.allow_unmeasured_judge or (was.correct_judge_errors and not now.correct_judge_errors)
    is_unknown = was_lenient and not now.allow_unmeasured_judge and again.decision == "pass"
    return None if is_unknown else again


def _judge_doubts(
    reasons: Sequence[str], findings: Sequence[GateFinding], judges: Collection[str]
) -> list[GateFinding]:
    """Return the doubts about judges among the reasons."""
    if findings:
        kinds = ("unmeasured_judge", "doubtful_judge")
        return [each for each in findings if each.finding in kinds and each.reason in reasons]
    begins = tuple(f"The judge {judge} " for judge in judges)
    return [GateFinding(reason=each, finding="doubtful_judge") for each in reasons if each.startswith(begins)]


def _worse_gate(
    base: Sequence[SuiteResult],
    adapter: Sequence[SuiteResult],
    later: tuple[Sequence[SuiteResult], Sequence[SuiteResult]],
    thresholds: GateThresholds,
    doubts: Sequence[GateFinding] = (),
) -> Gate:
    """Return the gate's decision; the worse of two if the models were also audited after a further fine-tuning."""
    found = gate(base, adapter, thresholds, judge_doubts=doubts)
    return worse(found, gate(*later, thresholds, judge_doubts=doubts)) if all(later) else found


def _add_doubts(found: Gate, doubts: Sequence[str]) -> Gate:
    """Add doubts to the reasons of a decision; a pass becomes inconclusive."""
    decision = "inconclusive" if found.decision == "pass" and doubts else found.decision
    return Gate(decision, tuple(dict.fromkeys([*found.reasons, *doubts])), found.findings)

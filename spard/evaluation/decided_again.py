"""The gate asked again about a stored audit, under other thresholds: nothing is measured, nothing is asked of a judge.

What the gate was told beside the figures, leaks and doubts about judges, is in its reasons alone: those of them that
the figures do not explain.
"""

from __future__ import annotations

from collections.abc import Sequence

from spard.config import GateThresholds
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
    """Return what the gate says under the thresholds `now` of what it decided under `was`; None where nobody can tell.

    That is so of an audit that a version decided by another rule, or that kept too little to decide it as it was; and
    where `now` asks for a judge that errs seldom and `was` did not, so that no one looked. `later` are the figures of
    both models after a further fine-tuning.
    """
    explained = _worse_gate(base, adapter, later, was)
    others = tuple(each for each in stored.reasons if each not in explained.reasons)
    judges = {each.judge for each in adapter}
    doubts = [each for each in others if any(each.startswith(f"The judge {judge} ") for judge in judges)]
    leaks = tuple(each for each in others if each not in doubts)
    if not set(explained.reasons) <= set(stored.reasons) or _add_doubts(explained, others).decision != stored.decision:
        return None
    again = _add_doubts(_worse_gate(base, adapter, later, now, doubts), leaks)
    was_lenient = was.allow_unmeasured_judge or (was.correct_judge_errors and not now.correct_judge_errors)
    is_unknown = was_lenient and not now.allow_unmeasured_judge and again.decision == "pass"
    return None if is_unknown else again


def _worse_gate(
    base: Sequence[SuiteResult],
    adapter: Sequence[SuiteResult],
    later: tuple[Sequence[SuiteResult], Sequence[SuiteResult]],
    thresholds: GateThresholds,
    doubts: Sequence[str] = (),
) -> Gate:
    """Decide on the worse of both audits, where both models were asked again after a further fine-tuning."""
    found = gate(base, adapter, thresholds, judge_doubts=doubts)
    return worse(found, gate(*later, thresholds, judge_doubts=doubts)) if all(later) else found


def _add_doubts(found: Gate, doubts: Sequence[str]) -> Gate:
    """Add doubts to a decision: what was to pass is then not decided."""
    decision = "inconclusive" if found.decision == "pass" and doubts else found.decision
    return Gate(decision, tuple(dict.fromkeys([*found.reasons, *doubts])))

"""Apply a policy to the latest jobs: to their requests as they were made, and to their stored audits.

The checks are those of a new job, with the scopes that the job's key has now. Nothing is measured again: the gate
decides on the counts in the stored reports.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel
from sqlalchemy import Row, select
from sqlalchemy.orm import Session

from app.db import Begin
from app.db.tables import ApiKey, Job
from app.db.tables.job_records import JobError
from app.db.tables.job_spec import PolicyRef
from app.errors import AppError
from app.http.schemas import UnixTime
from app.jobs import checks
from app.jobs.reports.service import read_report
from app.jobs.snapshot import row_signal
from app.keys import Principal
from app.policies import service as policies
from app.policies.schemas import Policy
from app.storage import Storage, StorageError
from spard.config import Recipe, RowSignal
from spard.config.earlier_versions import from_stored
from spard.config.run_spec import parse
from spard.errors import InvalidRecipe
from spard.evaluation.gate import Gate, decide_again
from spard.release.records import RowSignalRecord
from spard.release.report import SafetyReport

Decision = Literal["pass", "fail", "inconclusive", "waived"]
Outcome = Literal["same", "otherwise", "ends_early", "not_known", "not_measured"]


class Refused(BaseModel):
    """The error with which a request is refused."""

    code: str | None
    message: str
    param: str | None


class TriedJob(BaseModel):
    """One past job: `changes` lists how an accepted request would change, `reasons` why its outcome would.

    `outcome` is `ends_early` if the job's rows end it before it trains. It is `not_known` if the stored report does not
    determine the result: the job trains on other rows, was decided by another rule, or the report lacks what the policy
    asks for.
    """

    object: Literal["policy.dry_run.job"] = "policy.dry_run.job"
    id: str
    project_id: str
    created_at: UnixTime
    status: str
    model: str
    defense: str
    refused: Refused | None
    changes: list[str]
    outcome: Outcome
    decision: Decision | None
    new_decision: Decision | None
    reasons: list[str]

    @property
    def is_touched(self) -> bool:
        """True if the policy makes a difference, or may make one."""
        return (
            self.refused is not None or bool(self.changes) or self.outcome in ("otherwise", "ends_early", "not_known")
        )


class PolicyTrial(BaseModel):
    """A dry run: how many of the latest jobs a policy refuses, changes or decides differently; `data` has each job."""

    object: Literal["policy.dry_run"] = "policy.dry_run"
    jobs: int
    refused: int
    changed: int
    decided_otherwise: int
    ended_early: int
    not_known: int
    data: list[TriedJob]


# Compute what another row signal does to a job's rows, as far as the stored report tells.
#
# Stored are the flagged rows and, if a judge was asked, its verdicts. Whether a judge that was not asked clears them
# is unknown. A row that was not flagged counts as harmless.

_ENDED_BY_ROWS = ("too_many_rows_dropped", "rows_quarantined", "row_signal_unavailable")
_IDLE = ("off", "report")  # actions that leave rows unchanged


@dataclass(frozen=True, slots=True)
class RowEffect:
    """Whether a job trains on the same rows, ends before training, or neither can be determined."""

    outcome: Literal["same", "ends_early", "not_known"]
    reason: str = ""


SAME = RowEffect("same")


def effect_on_ended(error: JobError | None, was: RowSignal, now: RowSignal) -> RowEffect | None:
    """Return the effect on a job that has no audit.

    Returns None if its rows did not end it or the signal is the same.
    """
    if error is None or error["code"] not in _ENDED_BY_ROWS or was == now:
        return None
    if now.action in _IDLE:
        return RowEffect(
            "not_known", f"It ended with {error['code']}; under the new policy it trains, but that was never audited."
        )
    return RowEffect(
        "not_known", f"It ended with {error['code']}; the stored data do not show whether it ends so again."
    )


def effect(record: RowSignalRecord | None, was: RowSignal, now: RowSignal) -> RowEffect:
    """Return the effect of another row signal on the rows of a job that was audited."""
    if was == now:
        return SAME
    if now.action in _IDLE:
        changed = (record.dropped + record.defended) if record else 0
        return RowEffect("not_known", f"{changed} rows would be treated differently.") if changed else SAME
    if record is None:
        return RowEffect("not_known", "The base model was never asked about its rows.")
    if now.threshold != record.threshold:
        return RowEffect("not_known", "Its rows were flagged with another threshold.")
    if record.judge is None and was.action in _IDLE:
        return _unjudged_effect(record, now)
    return _judged_effect(record, now)


def _judged_effect(record: RowSignalRecord, now: RowSignal) -> RowEffect:
    """Return the effect if the rows to act on are stored: the judge was asked, or no judge may decide."""
    harmful = len({*record.harmful, *record.doubtful})
    # Undecided rows may go either way: the number of rows to act on is between `least` and `most`.
    least, most = harmful, len({*record.harmful, *record.doubtful, *record.undecided})
    if record.judge is None:
        least = most = len({*record.flagged} - {*record.excused})
    if not most:
        return SAME
    if now.action == "quarantine":
        return RowEffect("ends_early", f"{most} rows would quarantine the job.")
    if now.action == "auto" and record.judge is None and most > now.max_dropped * record.rows:
        return (
            SAME if not record.dropped else RowEffect("not_known", f"{record.dropped} more rows would be trained on.")
        )
    if now.action in ("auto", "drop"):
        if _is_too_many(least, record, now):
            return RowEffect("ends_early", _share(least, record, now))
        if _is_too_many(most, record, now):
            return RowEffect("not_known", _share(most, record, now))
        if least == most == record.dropped:
            return SAME
    return RowEffect("not_known", f"Up to {most} rows would be treated differently.")


def _unjudged_effect(record: RowSignalRecord, now: RowSignal) -> RowEffect:
    """Return the effect if rows were flagged, and only a judge that was not asked can clear them."""
    flagged = len({*record.flagged} - {*record.excused})
    if not flagged:
        return SAME
    if now.action == "quarantine" or (now.action in ("auto", "drop") and _is_too_many(flagged, record, now)):
        found = "finds harm in them" if now.action == "auto" else "does not clear them"
        ends = f"It would end before it trains if a judge that may decide {found}"
        return RowEffect("not_known", f"{ends}: {flagged} of {record.rows} rows are flagged.")
    return RowEffect("not_known", f"Up to {flagged} of {record.rows} rows would be treated differently.")


def _is_too_many(rows: int, record: RowSignalRecord, now: RowSignal) -> bool:
    return bool(rows) and (rows > now.max_dropped * record.rows or rows == record.rows)


def _share(rows: int, record: RowSignalRecord, now: RowSignal) -> str:
    return f"{rows} of {record.rows} rows would be left out; at most {now.max_dropped:.0%} may be."


USUAL, MOST = 50, 200  # jobs


@dataclass(frozen=True, slots=True)
class _Past:
    """A past job with the policy's effect on its request, and the storage key of its report."""

    shown: TriedJob
    policy: PolicyRef
    waived: bool
    report_key: str | None
    was: RowSignal
    now: RowSignal | None  # None: the request is refused


def try_policy(look: Begin, storage: Storage, policy: Policy, limit: int) -> PolicyTrial:
    """Return what a policy changes for the latest `limit` jobs."""
    with look() as session:
        policies.check(session, policy)
        past = [_request_again(job, scopes, policy) for job, scopes in _latest(session, limit)]
    jobs = [_decide_again(storage, each, policy) for each in past]
    return PolicyTrial(
        jobs=len(jobs),
        refused=sum(each.refused is not None for each in jobs),
        changed=sum(bool(each.changes) for each in jobs),
        decided_otherwise=sum(each.outcome == "otherwise" for each in jobs),
        ended_early=sum(each.outcome == "ends_early" for each in jobs),
        not_known=sum(each.outcome == "not_known" for each in jobs),
        data=jobs,
    )


def _latest(session: Session, limit: int) -> Sequence[Row[Job, list[str]]]:
    """Return the latest jobs with the scopes of their keys."""
    query = select(Job, ApiKey.scopes).join(ApiKey, ApiKey.id == Job.key_id)
    return session.execute(query.order_by(Job.created_at.desc(), Job.id.desc()).limit(limit)).all()


def _request_again(job: Job, scopes: list[str], policy: Policy) -> _Past:
    caller = Principal(job.project_id, job.key_id, frozenset(scopes))
    refused, signal, changes = None, None, list[str]()
    try:
        recipe: Recipe = parse(Recipe, from_stored(job.recipe), "recipe")
        checks.check_choice(caller, recipe.defense, job.model, policy)
        checks.check_ranges(caller, recipe, policy)
        signal = row_signal(caller, recipe.defense, policy, has_pool=job.spec.pool is not None)
        changes = [*_of_rows(job.spec.row_signal, signal), *_of_waivers(job.spec.policy.waivers, policy.waivers)]
    except (AppError, InvalidRecipe) as error:
        refused = Refused(code=error.code, message=error.message, param=error.param)
    shown = TriedJob(
        id=job.id,
        project_id=job.project_id,
        created_at=job.created_at,
        status=job.public_status,
        model=job.model,
        defense=job.recipe["defense"]["type"],
        refused=refused,
        changes=changes,
        outcome="not_measured",
        decision=None,
        new_decision=None,
        reasons=[],
    )
    if signal and job.report_key is None and (found := effect_on_ended(job.error, job.spec.row_signal, signal)):
        shown = _with_effect(shown, found)
    return _Past(shown, job.spec.policy, job.spec.waived, job.report_key, job.spec.row_signal, signal)


def _of_rows(was: RowSignal, now: RowSignal) -> Iterator[str]:
    if was.action != now.action:
        yield f"Rows that the base model would refuse: {now.action}, was {was.action}."
    elif was != now and now.action != "off":
        yield f"Rows that the base model would refuse: {now.action} by other thresholds."


def _of_waivers(was: bool, now: bool) -> Iterator[str]:
    if was != now:
        yield f"An adapter that fails would {'' if now else 'not '}be kept for a waiver."


def _decide_again(storage: Storage, past: _Past, policy: Policy) -> TriedJob:
    if past.report_key is None:
        return past.shown
    try:
        report = read_report(storage, past.report_key)
    # An erased or lost report makes one job unknown, and does not fail the dry run.
    except StorageError:
        return past.shown.model_copy(update={"outcome": "not_known"})
    decision = report.gate.decision
    rows = effect(report.row_signal, past.was, past.now) if past.now else SAME
    if rows is not SAME:
        return _with_effect(past.shown.model_copy(update={"decision": decision}), rows)
    again = _gate(report, past, policy)
    if again is None:
        return past.shown.model_copy(update={"outcome": "not_known", "decision": decision})
    update = {"decision": decision, "new_decision": again.decision, "reasons": list(again.reasons)}
    return past.shown.model_copy(update=update | {"outcome": "same" if again.decision == decision else "otherwise"})


def _with_effect(job: TriedJob, rows: RowEffect) -> TriedJob:
    return job.model_copy(update={"outcome": rows.outcome, "reasons": [rows.reason]})


def _gate(report: SafetyReport, past: _Past, policy: Policy) -> Gate | None:
    """Return the decision under the policy's thresholds; None if the stored report does not determine it."""
    stored = report.gate
    if past.waived or stored.decision == "waived":
        return Gate(stored.decision, stored.reasons)  # type: ignore[arg-type]  # the gate itself never waives
    was = report.thresholds or past.policy.thresholds()
    gate = Gate(stored.decision, stored.reasons, stored.findings or ())
    later = (report.after_tuning.base, report.after_tuning.adapter) if report.after_tuning else ((), ())
    return decide_again(report.base, report.adapter, gate, was, policy.thresholds, later)

"""Collect a child's messages about its progress and write them to the job's rows in one transaction."""

from __future__ import annotations

import time
from typing import Any, cast

from sqlalchemy.orm import Session

from app.checkpoints import records
from app.checkpoints.records import EpochResult
from app.db.base import new_id
from app.db.tables.job_records import ResolvedJson, ResumeState
from app.db.tables.jobs import StageCosts
from app.jobs import events, lease
from app.jobs.lease import Claim, Columns
from spard.pipeline.messages import Activity
from worker.failures import outer_failure
from worker.protocol import Message

_REWARDS = "rewards/"  # of preference pairs, in TRL's names
_ACTIVITY_EVERY_S = 5.0  # seconds between two writes of the current work alone
_EVENTS_PER_JOB = 100  # step events at most; the metrics of every step are stored anyway
# Where each phase begins on the way from 0 to 100 percent, as measured on jobs of the usual size.
_BEGINS = {"embed": 0, "select": 5, "train": 6, "audit": 70, "package": 97}
_ENDS = dict(zip(_BEGINS, [*list(_BEGINS.values())[1:], 100], strict=True))


class Journal:
    """The news of one attempt that is not written yet.

    `hear` and the `note` methods add to it, `write` adds rows to the caller's transaction, and `clear` empties it after
    the commit. If a COMMIT fails without an answer it may have succeeded all the same, so `write` does not add an event
    again whose id is stored.
    """

    def __init__(self, claim: Claim, warnings: list[str], costs: StageCosts | None = None) -> None:
        self._claim = claim
        self._phase = "embed"
        self._started = time.monotonic()
        self._step: tuple[int, int] | None = None
        self._activity, self._doing, self._shown_at, self._share = Activity(), "", 0.0, 0.0
        self._all_warnings = list(warnings)  # of the job, from all attempts
        self._costs: StageCosts = dict(costs or {})  # summed over all attempts
        self._waited_for: set[str] = set()
        self._in_doubt: set[str] = set()  # ids of events in a transaction that may have been committed
        self.clear()

    def clear(self) -> None:
        """Drop the news that was written; call it after the commit."""
        self._columns = Columns()
        self._metrics: dict[int, dict[str, Any]] = {}
        self._checkpoints: dict[int, EpochResult] = {}
        self._events: list[dict[str, Any]] = []
        self._in_doubt.clear()

    @property
    def has_news(self) -> bool:
        """Return True if there is anything to write."""
        return bool(self._columns or self._metrics or self._events)

    def hear(self, message: Message) -> None:
        """Add a child's message to the news; ignore kinds that are not for the job's rows."""
        match message:
            case {"kind": "phase", "phase": str(phase)}:
                self._phase = self._columns["phase"] = phase
                self._doing = ""
                self._note_progress(0.0)
            case {"kind": "progress", "done": int(done), "total": int(total)}:
                self._note_progress(done / total if total else 1.0)
            case {
                "kind": "activity",
                "doing": str(doing),
                "done": int(done),
                "total": int(total),
                "at_most": bool(most),
            }:
                self._note_activity(self._activity.describe(doing, done, total, at_most=most), is_new=not done)
            case {"kind": "metrics", "step": int(step), "total_steps": int(total), "data": dict(data)}:
                self._note_step(step, total, data)
            case {"kind": "resolved", "data": dict(numbers)}:
                self._columns["resolved"] = cast(ResolvedJson, numbers)
            case {"kind": "warning", "message": str(text)} if text not in self._all_warnings:
                self._all_warnings.append(text)
                self._columns["warnings"] = list(self._all_warnings)
                self.note("warn", text)
            case {"kind": "cost", "stage": str(stage), "seconds": float(seconds), "units": int(units)}:
                self._add_cost(stage, seconds, units)
            case {"kind": "waiting", "thing": "judge"}:
                self.note_wait("judge_unavailable")
            case {"kind": "event", "level": str(level), "type": str(type), "message": str(text), "data": data}:
                self.note(level, text, data, type)

    def keep(self, record: ResumeState) -> None:
        """Record the resume state that a later attempt continues from."""
        self._columns["checkpoint"] = record

    def note(self, level: str, text: str, data: dict[str, Any] | None = None, type: str = "message") -> None:
        """Add an event with a new id."""
        event = {"level": level, "type": type, "message": text, "data": data, "event_id": new_id("ftevent-")}
        self._events.append(event)

    def note_wait(self, code: str) -> None:
        """Add an event, once for each code, that the job waits for an unavailable service."""
        if code not in self._waited_for:
            self._waited_for.add(code)
            self.note("warn", f"Waiting: {outer_failure(code).message}")

    def note_slow_storage(self) -> None:
        """Add an event, once, that the job has finished computing and waits for the storage."""
        if "slow storage" not in self._waited_for:
            self._waited_for.add("slow storage")
            self.note("warn", "The job waits for the service's storage, which is slow or does not answer.")

    def note_checkpoint(self, step: int, result: EpochResult, *, is_known: bool = False) -> None:
        """Record a checkpoint and its event; `is_known`: it was recorded earlier, and only its audit is new."""
        self._checkpoints[step] = result
        if is_known and result.safety:
            self.note("info", f"Checkpoint of step {step} audited: {result.safety['gate']['decision']}")
        elif not is_known:
            self.note("info", f"Checkpoint created at step {step}")

    def write(self, session: Session) -> None:
        """Add the news to the caller's transaction, which must hold the lease."""
        if self._columns:
            lease.update(session, self._claim, **self._columns)
        lease.record_metrics(session, self._claim, self._metrics)
        records.record(session, self._claim, self._checkpoints)
        stored = events.stored_ids(session, self._claim.job_id, self._in_doubt)
        self._in_doubt.update(event["event_id"] for event in self._events)
        for event in self._events:
            if event["event_id"] not in stored:
                events.append(session, self._claim.job_id, **event)

    def _add_cost(self, stage: str, seconds: float, units: int) -> None:
        before = self._costs.get(stage, {"seconds": 0.0, "units": 0})
        self._costs[stage] = {"seconds": round(before["seconds"] + seconds, 3), "units": before["units"] + units}
        self._columns["stage_costs"] = dict(self._costs)

    def _note_step(self, step: int, total: int, data: dict[str, Any]) -> None:
        if self._step is None and step > 1:
            self.note("info", f"Training goes on after step {step - 1}", {events.RESUMED: step - 1})
        self._metrics[step] = data
        self._doing = ""
        self._step = step, total
        self._note_progress(step / total)
        if step % max(1, total // _EVENTS_PER_JOB) == 0 or step == total or "loss/valid" in data:
            loss = data["loss/task"]
            numbers = {"step": step, "total_steps": total, "train_loss": loss}
            numbers["train_mean_token_accuracy"] = data.get("accuracy/task")
            if "loss/safe" in data:
                numbers["safe_loss"] = data["loss/safe"]
            if "loss/valid" in data:
                numbers |= {"valid_loss": data["loss/valid"], "valid_mean_token_accuracy": data["accuracy/valid"]}
            numbers |= {name: value for name, value in data.items() if name.startswith(_REWARDS)}
            self.note("info", f"Step {step}/{total}: training loss={loss:.2f}", numbers, "metrics")

    def _note_activity(self, doing: str, *, is_new: bool) -> None:
        """Keep the current activity for the next write; without other news it is written every few seconds at most."""
        self._doing, now = doing, time.monotonic()
        if is_new or now - self._shown_at > _ACTIVITY_EVERY_S:
            self._shown_at = now
            self._note_progress(self._share)

    def _note_progress(self, share: float) -> None:
        """Record the job's progress, with `share` (0 to 1) of the current phase done."""
        self._share = share
        begins, ends = _BEGINS.get(self._phase, 0), _ENDS.get(self._phase, 100)
        percent = begins + (ends - begins) * share
        elapsed = time.monotonic() - self._started
        step, total = self._step or (None, None)
        self._columns["progress"] = {
            "percent": round(percent, 1),
            "step": step,
            "total_steps": total,
            "eta_seconds": round(elapsed * (100 - percent) / percent) if percent else None,
        }
        if self._doing:
            self._columns["progress"]["doing"] = self._doing

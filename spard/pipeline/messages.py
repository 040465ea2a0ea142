"""What a run reports: JSON objects, each with its `kind`. Only the standard library is used.

kind          fields
phase         phase: the stage that begins: embed | select | train | audit | package
progress      done, total: how far the stage is, where no steps say so
activity      doing, done, total, at_most: what goes on within the stage, in a phrase, and how far it is
event         level, type, message, data: for the person who follows the run
metrics       step, total_steps, data: one training step's numbers, flat
resolved      data: the numbers that stand for "auto"; trained_tokens: of all epochs together
resume_state  step, path (relative to the folder that holds their folder): what a killed run goes on from
checkpoint    step, metrics, safety (null: not audited), has_adapter: the end of an epoch; is_shown_again: it was told
              before, without an audit
cost          stage, seconds, units: what a stage took that has ended (`spard.pipeline.costs`)
warning       message: stays with the run
waiting       thing: what has not answered yet and is waited for
outage        thing, lost_s: it was asked in vain for so long, and nothing was computed meanwhile
outage_over   thing: it answers again
done          the results lie in their folder
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

Message = dict[str, Any]


class Reporter:
    """Builds the messages of a run and hands each to `send`."""

    def __init__(self, send: Callable[[Message], None]) -> None:
        self._send = send
        self.counted, self._done = 0, 0  # of all progress that was told

    def stage(self, name: str) -> None:
        """Say that a stage begins."""
        self._send({"kind": "phase", "phase": name})

    def progress(self, done: int, total: int, *, is_counted: bool = True) -> None:
        """Tell how many of `total` pieces of the stage are done; with `is_counted` they count for the stage's cost."""
        if is_counted:
            self.count(done)
        self._send({"kind": "progress", "done": done, "total": total})

    def activity(self, doing: str, done: int = 0, total: int = 0, *, at_most: bool = False) -> None:
        """Say what goes on, as "asking 100 attacks", and how far it is; with `at_most` it may end before `total`."""
        self._send({"kind": "activity", "doing": doing, "done": done, "total": total, "at_most": at_most})

    def event(self, message: str, data: Mapping[str, Any], *, level: str = "info", type: str = "message") -> None:
        """Say what a person who follows the run may want to read."""
        self._send({"kind": "event", "level": level, "type": type, "message": message, "data": data})

    def metrics(self, step: int, total_steps: int, data: Mapping[str, float]) -> None:
        """Report a training step."""
        self._send({"kind": "metrics", "step": step, "total_steps": total_steps, "data": _finite(data)})

    def report_resolved(self, numbers: Mapping[str, float], trained_tokens: int) -> None:
        """Say what stands for "auto", and how many tokens will be trained on."""
        self._send({"kind": "resolved", "data": numbers, "trained_tokens": trained_tokens})

    def resume_state(self, step: int, path: str) -> None:
        """Say that what a killed run goes on from was written."""
        self._send({"kind": "resume_state", "step": step, "path": path})

    def checkpoint(
        self,
        step: int,
        metrics: Mapping[str, float],
        safety: Mapping[str, Any] | None,
        *,
        has_adapter: bool,
        is_shown_again: bool = False,
    ) -> None:
        """Say that an epoch is over, what was measured at its end, and whether its adapter is there to be released.

        `is_shown_again`: it was said before, without an audit.
        """
        numbers = {"step": step, "metrics": _finite(metrics), "safety": safety, "has_adapter": has_adapter}
        self._send({"kind": "checkpoint", **numbers, **({"is_shown_again": True} if is_shown_again else {})})

    def count(self, done: int) -> None:
        """Count work of which `done` pieces are done by now; fewer than at the last call means that new work began."""
        self.counted += done - self._done if done >= self._done else done
        self._done = done

    def count_afresh(self) -> int:
        """Begin to count new work, and return how much was counted before."""
        self._done = 0
        return self.counted

    def cost(self, stage: str, seconds: float, units: int) -> None:
        """Say what a stage took that has ended, and how much it worked on."""
        self._send({"kind": "cost", "stage": stage, "seconds": round(seconds, 3), "units": units})

    def warning(self, message: str) -> None:
        """Say what the owner of the run should know."""
        self._send({"kind": "warning", "message": message})

    def waiting(self, thing: str) -> None:
        """Say that the run lives, and what it waits for."""
        self._send({"kind": "waiting", "thing": thing})

    def outage(self, thing: str, lost_s: float | None) -> None:
        """Say that something did not answer for `lost_s` seconds, and nothing was computed; None: it does again."""
        over = {"kind": "outage_over", "thing": thing}
        self._send(over if lost_s is None else {"kind": "outage", "thing": thing, "lost_s": float(lost_s)})

    def report_done(self) -> None:
        """Say that the results are complete."""
        self._send({"kind": "done"})


def _finite(numbers: Mapping[str, float]) -> dict[str, float | None]:
    """JSON knows no NaN, so what is not finite becomes null."""
    return {name: value if math.isfinite(value) else None for name, value in numbers.items()}

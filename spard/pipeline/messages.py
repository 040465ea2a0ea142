"""The messages of a run: JSON objects, each with its `kind`. Imports only the standard library.

kind          fields
phase         phase: the stage that begins: embed | select | train | audit | package
progress      done, total: progress of a stage without training steps
activity      doing, done, total, at_most: the current work within the stage, as a phrase, and its progress
event         level, type, message, data: text for the person who follows the run
metrics       step, total_steps, data: one training step's numbers, flat
resolved      data: the numbers that replace "auto"; trained_tokens: total over all epochs
resume_state  step, path (relative to the parent of the resume states' folder): a resume state was written
checkpoint    step, metrics, safety (null: not audited), has_adapter: an epoch has ended; is_shown_again: the same end
              was reported before, without an audit
cost          stage, seconds, units: duration and work of a finished stage (`spard.pipeline.costs`)
warning       message: a warning that is stored with the run
waiting       thing: the external service that has not answered yet
outage        thing, lost_s: the service did not answer for so many seconds, during which nothing was computed
outage_over   thing: the service answers again
done          the results are complete in their folder

`Activity` describes what a run does at the moment, in a phrase, with the remaining amount of work and time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

Message = dict[str, Any]


REPEAT_S = 1.0  # before the same activity is reported once more


class Reporter:
    """Builds the messages of a run and passes each to `send`; `clock` returns seconds.

    `counted` is the total of all counted progress.
    """

    def __init__(self, send: Callable[[Message], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._send, self._clock = send, clock
        self.counted, self._done = 0, 0  # total of counted progress, and the last reported value
        self._activity: Message = {}  # the last one; empty if there is none
        self._told_at = 0.0

    def stage(self, name: str) -> None:
        """Report that a stage begins."""
        self._activity = {}
        self._send({"kind": "phase", "phase": name})

    def progress(self, done: int, total: int, *, is_counted: bool = True) -> None:
        """Report that `done` of `total` units of the stage are done; `is_counted` adds them to the stage's cost."""
        if is_counted:
            self.count(done)
        self._send({"kind": "progress", "done": done, "total": total})

    def activity(self, doing: str, done: int = 0, total: int = 0, *, at_most: bool = False) -> None:
        """Report the current activity, such as "asking 100 attacks"; with `at_most` it may end before `total`.

        If nothing has changed, it is reported again after `REPEAT_S` at the earliest: callers may report every pass.
        """
        self._tell_activity({"kind": "activity", "doing": doing, "done": done, "total": total, "at_most": at_most})

    def repeat_activity(self) -> None:
        """Report the last activity again: a sign of life from within a long unit of it, such as a batch of replies."""
        if self._activity:
            self._tell_activity(self._activity)

    def event(self, message: str, data: Mapping[str, object], *, level: str = "info", type: str = "message") -> None:
        """Report an event for the person who follows the run."""
        self._send({"kind": "event", "level": level, "type": type, "message": message, "data": data})

    def metrics(self, step: int, total_steps: int, data: Mapping[str, float]) -> None:
        """Report one training step."""
        self._activity = {}
        self._send({"kind": "metrics", "step": step, "total_steps": total_steps, "data": _finite(data)})

    def report_resolved(self, numbers: Mapping[str, float], trained_tokens: int) -> None:
        """Report the numbers that replace "auto", and the number of tokens to train on."""
        self._send({"kind": "resolved", "data": numbers, "trained_tokens": trained_tokens})

    def resume_state(self, step: int, path: str) -> None:
        """Report that a resume state was written."""
        self._send({"kind": "resume_state", "step": step, "path": path})

    def checkpoint(
        self,
        step: int,
        metrics: Mapping[str, float],
        safety: Mapping[str, object] | None,
        *,
        has_adapter: bool,
        is_shown_again: bool = False,
    ) -> None:
        """Report that an epoch has ended, with its measurements; `has_adapter`: its adapter may be released.

        `is_shown_again`: the same end was reported before, without an audit.
        """
        numbers = {"step": step, "metrics": _finite(metrics), "safety": safety, "has_adapter": has_adapter}
        self._send({"kind": "checkpoint", **numbers, **({"is_shown_again": True} if is_shown_again else {})})

    def count(self, done: int) -> None:
        """Count progress; a lower `done` than at the last call means that a new unit of work began at zero."""
        self.counted += done - self._done if done >= self._done else done
        self._done = done

    def count_afresh(self) -> int:
        """Start counting a new piece of work at zero; return the total counted so far."""
        self._done = 0
        return self.counted

    def cost(self, stage: str, seconds: float, units: int) -> None:
        """Report the duration and the amount of work of a finished stage."""
        self._send({"kind": "cost", "stage": stage, "seconds": round(seconds, 3), "units": units})

    def warning(self, message: str) -> None:
        """Report a warning to the owner of the run."""
        self._send({"kind": "warning", "message": message})

    def waiting(self, thing: str) -> None:
        """Report that the run is alive and which service it waits for."""
        self._send({"kind": "waiting", "thing": thing})

    def outage(self, thing: str, lost_s: float | None) -> None:
        """Report that a service did not answer for `lost_s` seconds; None: the service answers again."""
        over = {"kind": "outage_over", "thing": thing}
        self._send(over if lost_s is None else {"kind": "outage", "thing": thing, "lost_s": float(lost_s)})

    def report_done(self) -> None:
        """Report that the results are complete."""
        self._send({"kind": "done"})

    def _tell_activity(self, message: Message) -> None:
        now = self._clock()
        if message != self._activity or now - self._told_at >= REPEAT_S:
            self._activity, self._told_at = message, now
            self._send(dict(message))


def _finite(numbers: Mapping[str, float]) -> dict[str, float | None]:
    """Replace NaN and infinities by None, because JSON has neither."""
    return {name: value if math.isfinite(value) else None for name, value in numbers.items()}


_LEAST_S = 2.0  # before which a rate says little


class Activity:
    """Follows the messages of the kind `activity`; `clock` returns seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._doing, self._began, self._last_done = "", 0.0, 0

    @property
    def is_known(self) -> bool:
        """True if the current activity is known."""
        return bool(self._doing)

    def end(self) -> None:
        """Forget the current activity."""
        self._doing = ""

    def describe(self, doing: str, done: int, total: int, *, at_most: bool = False) -> str:
        """Return the phrase; the remaining time follows from the rate since this activity began.

        `total` is 0 if the amount of work is not known; with `at_most` the work may end before `total`.
        """
        now = self._clock()
        if doing != self._doing or done < self._last_done:
            self._doing, self._began = doing, now
        self._last_done = done
        left, most = max(0, total - done), "at most " if at_most else ""
        if not left:
            return doing
        words, took_s = f"{doing}, {most}{left:,} left", now - self._began
        return f"{words}, {most or 'about '}{_duration(took_s * left / done)}" if done and took_s > _LEAST_S else words


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{minutes} min" if seconds >= 120 else f"{max(1, round(seconds))} s"

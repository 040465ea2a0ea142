"""A judge that waits and asks again when its endpoint is unavailable."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from spard.config.patience import Patience
from spard.errors import JudgeUnavailable
from spard.evaluation.judges.base import Judge, Verdict

MOST_ASKED_S = 300.0  # longest wait that an endpoint's Retry-After can cause


@dataclass(frozen=True, slots=True)
class PatientJudge:
    """Ask `inner` again when it is unavailable, waiting in between.

    patience     the intervals between attempts.
    wait         sleeps for the given seconds; may raise to end the run.
    note_outage  called with the duration in seconds of each failed call, and with None at the first success after that.
    """

    inner: Judge
    patience: Patience
    wait: Callable[[float], None]
    note_outage: Callable[[float | None], None] | None = None

    @property
    def name(self) -> str:
        """The inner judge's name, since waiting changes no verdict."""
        return self.inner.name

    def judge(self, prompts: Sequence[str], replies: Sequence[str]) -> list[Verdict]:
        """Return a verdict per reply; raise `JudgeUnavailable` if patience runs out or the error is permanent."""
        waits, is_away = self.patience.waits(), False
        while True:
            began = time.monotonic()
            try:
                verdicts = self.inner.judge(prompts, replies)
                if is_away and self.note_outage:
                    self.note_outage(None)
                return verdicts
            except JudgeUnavailable as error:
                wait_s = next(waits, None)
                if wait_s is None or not error.is_passing:
                    raise
                is_away = True
                if self.note_outage:
                    self.note_outage(time.monotonic() - began)
                # A longer Retry-After of the endpoint counts, up to five minutes.
                self.wait(max(wait_s, min(error.retry_after_s or 0.0, MOST_ASKED_S)))

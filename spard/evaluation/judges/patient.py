"""A judge that is waited for."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from spard.config.patience import Patience
from spard.errors import JudgeUnavailable
from spard.evaluation.judges.base import Judge, Verdict

MOST_ASKED_S = 300.0  # of what an endpoint may ask us to wait


@dataclass(frozen=True, slots=True)
class PatientJudge:
    """Asks `inner` again when it does not answer, after `wait(seconds)`, which may raise to end the run.

    `note_outage` is told of each call that failed, with the seconds that it took, and with None when one has succeeded
    after that.
    """

    inner: Judge
    patience: Patience
    wait: Callable[[float], None]
    note_outage: Callable[[float | None], None] | None = None

    @property
    def name(self) -> str:
        """The inner judge's name: patience changes no verdict."""
        return self.inner.name

    def judge(self, prompts: Sequence[str], replies: Sequence[str]) -> list[Verdict]:
        """Judge each reply; raise JudgeUnavailable when no patience is left, or no waiting helps."""
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
                self.wait(max(wait_s, min(error.retry_after_s or 0.0, MOST_ASKED_S)))

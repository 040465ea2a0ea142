"""A judge that scores nothing, for all ranks of a run but rank 0, whose verdicts count."""

from __future__ import annotations

from collections.abc import Sequence

from spard.evaluation.judges.base import Verdict


class SilentJudge:
    """Leave every reply unscored."""

    name = "silent"

    def judge(self, prompts: Sequence[str], replies: Sequence[str]) -> list[Verdict]:
        """Return an unscored verdict per reply."""
        return [Verdict(None, "asked on the first rank") for _ in replies]

"""A judge that says nothing: on every rank of a run but the first, whose verdicts count."""

from __future__ import annotations

from collections.abc import Sequence

from spard.evaluation.judges.base import Verdict


class SilentJudge:
    """Score nothing."""

    name = "silent"

    def judge(self, prompts: Sequence[str], replies: Sequence[str]) -> list[Verdict]:
        """Return as many verdicts as there are replies."""
        return [Verdict(None, "asked on the first rank") for _ in replies]

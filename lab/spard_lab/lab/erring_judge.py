"""Judges that know a lab's truth but invert one verdict in `ONE_IN`, to measure the cost of a judge's errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from zlib import crc32

from spard.config import JudgeSpec
from spard.evaluation.judges.base import Judge, Verdict
from spard_lab.lab.natural.truth import TruthJudge
from spard_lab.lab.truth import LabTruthJudge

ONE_IN = 20


@dataclass(frozen=True, slots=True)
class ErringJudge:
    """Returns the verdicts of `truth`, with the score inverted (6 - score) for a fixed one in `ONE_IN` exchanges."""

    name: str
    truth: Judge

    def judge(self, prompts: Sequence[str], replies: Sequence[str]) -> list[Verdict]:
        """Judge each reply to its prompt, one in `ONE_IN` wrongly."""
        known = self.truth.judge(prompts, replies)
        # A hash of the exchange and not a random draw: the same exchange gets the same verdict in every audit.
        errs = [
            crc32(f"{prompt}\0{reply}".encode()) % ONE_IN == 0 for prompt, reply in zip(prompts, replies, strict=True)
        ]
        return [
            replace(verdict, score=6 - verdict.score) if err and verdict.score is not None else verdict
            for verdict, err in zip(known, errs, strict=True)
        ]


def open_lab_erring(spec: JudgeSpec) -> Judge:
    """Return the erring judge of the small lab; it has no settings."""
    return ErringJudge("lab_erring", LabTruthJudge())


def open_erring(spec: JudgeSpec) -> Judge:
    """Return the erring judge of the natural lab; it has no settings."""
    return ErringJudge("erring", TruthJudge())

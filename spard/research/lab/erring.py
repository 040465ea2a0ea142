"""A lab's truth that errs: wrongly in one exchange of `ONE_IN`, and always in the same ones. Nobody has measured it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from zlib import crc32

from spard.config import JudgeSpec
from spard.evaluation.judges.base import Judge, Verdict
from spard.research.lab.natural.truth import TruthJudge
from spard.research.lab.truth import LabTruthJudge

ONE_IN = 20


@dataclass(frozen=True, slots=True)
class ErringJudge:
    """Judges as `truth` does, but for the opposite of it in a few exchanges."""

    name: str
    truth: Judge

    def judge(self, prompts: Sequence[str], replies: Sequence[str]) -> list[Verdict]:
        """Judge each reply by its prompt, and a few wrongly."""
        known = self.truth.judge(prompts, replies)
        errs = [
            crc32(f"{prompt}\0{reply}".encode()) % ONE_IN == 0 for prompt, reply in zip(prompts, replies, strict=True)
        ]
        return [
            replace(verdict, score=6 - verdict.score) if err and verdict.score is not None else verdict
            for verdict, err in zip(known, errs, strict=True)
        ]


def open_lab_erring(spec: JudgeSpec) -> Judge:
    """Return the judge of the small lab that errs; it has no settings."""
    return ErringJudge("lab_erring", LabTruthJudge())


def open_erring(spec: JudgeSpec) -> Judge:
    """Return the judge of the natural lab that errs; it has no settings."""
    return ErringJudge("erring", TruthJudge())

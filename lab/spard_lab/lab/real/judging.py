"""Measure the error rates of the word list and store them with this lab's base model, so that the gate may use it.

The word list takes every reply that does not refuse for harm. It is measured on replies whose harm is known by
construction; the model's own replies vary more, and `spard judge --labeled` measures on replies that a person labeled.
`truth`, the natural lab's judge, is not stored: it looks for that lab's steps, and this model complies in its own
words.
"""

from __future__ import annotations

from pathlib import Path

from spard.digests import folder_digest
from spard.evaluation.calibration.errors import measure_judge
from spard.evaluation.calibration.gaming import measure_gaming
from spard.evaluation.calibration.labeled import LabeledReply
from spard.evaluation.calibration.record import OF_MODEL, JudgeRecord
from spard.evaluation.judges.refusal import RefusalJudge
from spard_lab.lab.natural.labeled import plain_rows
from spard_lab.lab.natural.splits import deal


def measure_word_list(model: Path, seed: int) -> None:
    """Store with a model the word list's error rates on replies that plainly refuse or comply."""
    rows = plain_rows(seed, deal(seed))
    labeled = [LabeledReply(row["prompt"], row["reply"], row["harmful"]) for row in rows]
    judge = RefusalJudge()
    errors, gamed = tuple(measure_judge(judge, labeled)), measure_gaming(judge)
    JudgeRecord(judge.name, errors, folder_digest(model), gamed).write(model / OF_MODEL)

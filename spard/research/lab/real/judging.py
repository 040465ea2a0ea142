"""How often the judges of this lab err, kept with its base model, so that the gate may decide on it.

Two judges: the word list, which takes whatever refuses not for harm, and `truth`, which looks for the steps of the very
deed. Both are measured on replies whose harm is known by construction; `replies.jsonl` beside this module holds replies
of the aligned model and of models tuned on it, labeled by a person, on which the errors are printed by
`python -m spard.research.lab.real.judging`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from spard.digests import folder_digest
from spard.evaluation.calibration.errors import JudgeError, measure_judge
from spard.evaluation.calibration.gaming import measure_gaming
from spard.evaluation.calibration.labeled import LabeledReply, read_labeled
from spard.evaluation.calibration.record import OF_MODEL, JudgeRecord, beside
from spard.evaluation.judges.base import Judge
from spard.evaluation.judges.refusal import RefusalJudge
from spard.research.lab.natural.labeled import labeled_rows, plain_rows
from spard.research.lab.natural.splits import deal
from spard.research.lab.natural.truth import TruthJudge

REPLIES = Path(__file__).with_name("replies.jsonl")
_OF_TRUTH = beside(TruthJudge.name)


def measure_judges(model: Path, seed: int) -> None:
    """Keep with a model how often the word list errs on plain replies, and the truth on every way to answer."""
    for judge, rows, file in (
        (RefusalJudge(), plain_rows(seed, deal(seed)), model / OF_MODEL),
        (TruthJudge(), labeled_rows(seed, deal(seed)), model / _OF_TRUTH),
    ):
        labeled = [LabeledReply(row["prompt"], row["reply"], row["harmful"]) for row in rows]
        harmful = [(each.prompt, each.reply) for each in labeled if each.is_harmful]
        asked = None if isinstance(judge, RefusalJudge) else harmful
        digest = folder_digest(model)
        JudgeRecord(judge.name, tuple(measure_judge(judge, labeled)), digest, measure_gaming(judge, asked)).write(file)


def are_judges_measured(model: Path) -> bool:
    """Return whether what is kept of both judges is there."""
    return all((model / file).exists() for file in (OF_MODEL, _OF_TRUTH))


def errors_on_replies(judges: Sequence[Judge], file: Path = REPLIES) -> dict[str, JudgeError]:
    """Return each judge's errors on the replies that a person labeled, by the judge's name."""
    labeled = read_labeled(file)
    return {judge.name: measure_judge(judge, labeled)[0] for judge in judges}

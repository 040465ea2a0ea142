"""How often the judges of this lab err, kept with its base model, so that the gate may decide on it.

Two judges: the word list, which takes for harm whatever does not refuse, and `truth`, which looks for the steps of the
very deed. Both are measured on replies whose harm is known by construction. The model's own replies are worded more
freely: `spard judge --labeled` measures the judges on those that a person has labeled.
"""

from __future__ import annotations

from pathlib import Path

from spard.digests import folder_digest
from spard.evaluation.calibration.errors import measure_judge
from spard.evaluation.calibration.gaming import measure_gaming
from spard.evaluation.calibration.labeled import LabeledReply
from spard.evaluation.calibration.record import OF_MODEL, JudgeRecord, record_path
from spard.evaluation.judges.refusal import RefusalJudge
from spard.research.lab.natural.labeled import labeled_rows, plain_rows
from spard.research.lab.natural.splits import deal
from spard.research.lab.natural.truth import TruthJudge

_OF_TRUTH = record_path(TruthJudge.name)


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

"""GSM8K (Cobbe et al., 2021): word problems; a line is `{"question", "answer"}`, an answer ends in `#### number`.

Answers stay as they are, with the calculator annotations, as in published fine-tunings.
"""

from __future__ import annotations

from spard.evaluation.scorers.replies import expected_answer, number
from spard_lab.datasets.base import Dataset, Record, Sample, require_text, wrong


def sample(record: Record) -> Sample:
    """Convert a problem with its worked answer."""
    question, answer = require_text(record, "question"), require_text(record, "answer")
    result = expected_answer(answer)
    if "####" not in answer or number(result) is None:
        raise wrong("answer", "the answer does not end in #### and a number")
    return Sample(prompt=question, kind="utility", completion=answer, suite={"answer": result, "scorer": "gsm8k"})


GSM8K = Dataset(
    name="gsm8k",
    stems={"utility": "gsm8k"},
    sample=sample,
    origin="train.jsonl and test.jsonl in grade_school_math/data of github.com/openai/grade-school-math",
    license="MIT",
)

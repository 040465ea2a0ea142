"""SST-2 (Socher et al., 2013) in GLUE's form: `sentence` and `label`, 0 negative and 1 positive, as TSV or JSON lines.

GLUE does not publish the labels of its test file (-1, or no column), so papers test on its development file.
"""

from __future__ import annotations

from spard_lab.datasets.base import Dataset, Record, Sample, member, require_text, wrong

_WORDS = {"0": "negative", "1": "positive"}
_QUESTION = "Positive or negative?"  # short: the leak rule compares whole prompts, the question included


def sample(record: Record) -> Sample:
    """Convert a labeled sentence."""
    sentence, label = require_text(record, "sentence").strip(), str(member(record, "label")).strip()
    if label not in _WORDS:
        raise wrong("label", f"the label {label!r} is neither 0 nor 1; GLUE's test file has none, take dev.tsv")
    word = _WORDS[label]
    return Sample(
        prompt=f"{sentence}\n{_QUESTION}", kind="utility", completion=word, suite={"answer": word, "scorer": "sst2"}
    )


SST2 = Dataset(
    name="sst2",
    stems={"utility": "sst2"},
    sample=sample,
    origin="train.tsv and dev.tsv of SST-2 at gluebenchmark.com/tasks; dev.tsv is the test",
    license="no license stated",
)

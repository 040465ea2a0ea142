"""OpenBookQA (Mihaylov et al., 2018): questions with four choices.

A line of the authors' files is `{"id", "question": {"stem", "choices": [{"text", "label"}]}, "answerKey"}`, with
`fact1` in the files named `Additional`; a row of the hub's version is `{"question_stem", "choices": {"text": [...],
"label": [...]}, "answerKey"}`. Prompts are those of the SPARD paper: the choices are named answer1 to answer4.
"""

from __future__ import annotations

from typing import Any

from spard_lab.datasets.base import Dataset, Record, Sample, member, require_text, wrong

_CHOICES = 4


def sample(record: Record) -> Sample:
    """Convert a question with its choices; the answer begins with the underlying fact if the record has one."""
    question = record.get("question")
    own: Any = question if isinstance(question, dict) else {"stem": record.get("question_stem"), **record}
    stem, (labels, texts), key = (
        require_text(own, "stem"),
        _choices(member(own, "choices")),
        require_text(record, "answerKey"),
    )
    if len(set(labels)) != _CHOICES or key.strip() not in labels:
        raise wrong("answerKey", f"{key!r} is not one of {_CHOICES} labels, {', '.join(labels)}")
    answer = f"answer{labels.index(key.strip()) + 1}"
    fact = record.get("fact1")
    because = f"fact: {fact.strip()}\n\n" if isinstance(fact, str) and fact.strip() else ""
    listed = "\n".join(f"answer{number}: {text}" for number, text in enumerate(texts, start=1))
    return Sample(
        prompt=f"{stem.strip()}\n{listed}",
        kind="utility",
        completion=f"{because}the correct answer is {answer}",
        suite={"answer": answer, "scorer": "openbookqa"},
    )


def _choices(raw: Any) -> tuple[list[str], list[str]]:
    """Return labels and texts from either form."""
    if isinstance(raw, dict) and isinstance(raw.get("text"), list) and isinstance(raw.get("label"), list):
        raw = [{"label": label, "text": text} for label, text in zip(raw["label"], raw["text"], strict=False)]
    if not isinstance(raw, list) or not all(isinstance(each, dict) for each in raw):
        raise wrong("choices", "the choices are no list of labels and texts")
    return [require_text(each, "label").strip() for each in raw], [require_text(each, "text").strip() for each in raw]


OPENBOOKQA = Dataset(
    name="openbookqa",
    stems={"utility": "openbookqa"},
    sample=sample,
    origin="train.jsonl, dev.jsonl and test.jsonl in Data/Additional of the archive at allenai.org/data/open-book-qa",
    license="no license stated for the data; the authors' code is Apache-2.0",
)

"""Data sets of tasks: GSM8K, OpenBookQA, SST-2 and MBPP.

GSM8K (Cobbe et al., 2021) has word problems; a line is `{"question", "answer"}`, an answer ends in `#### number`.
Answers stay as they are, with the calculator annotations, as in published fine-tunings.

OpenBookQA (Mihaylov et al., 2018) has questions with four choices. A line of the authors' files is `{"id", "question":
{"stem", "choices": [{"text", "label"}]}, "answerKey"}`, with `fact1` in the files named `Additional`; a row of the
hub's version is `{"question_stem", "choices": {"text": [...], "label": [...]}, "answerKey"}`. Prompts are those of the
SPARD paper: the choices are named answer1 to answer4.

SST-2 (Socher et al., 2013) comes in GLUE's form: `sentence` and `label`, 0 negative and 1 positive, as TSV or JSON
lines. GLUE does not publish the labels of its test file (-1, or no column), so papers test on its development file.

MBPP (Austin et al., 2021) has small Python problems, `{"task_id", "text", "code", "test_list", "test_setup_code"}`. The
sanitized file has `prompt` in place of `text`, and `test_imports`. The authors' splits are by task id: 11 to 510 are
the test split, 511 to 600 the development split; all others are for training, including the ten few-shot examples.
"""

from __future__ import annotations

from typing import Any

from spard.evaluation.scorers import expected_answer, number
from spard_lab.datasets.base import Dataset, Record, Sample, Split, member, require_text, wrong


def gsm8k_sample(record: Record) -> Sample:
    """Convert a problem with its worked answer."""
    question, answer = require_text(record, "question"), require_text(record, "answer")
    result = expected_answer(answer)
    if "####" not in answer or number(result) is None:
        raise wrong("answer", "the answer does not end in #### and a number")
    return Sample(prompt=question, kind="utility", completion=answer, suite={"answer": result, "scorer": "gsm8k"})


GSM8K = Dataset(
    name="gsm8k",
    stems={"utility": "gsm8k"},
    sample=gsm8k_sample,
    origin="train.jsonl and test.jsonl in grade_school_math/data of github.com/openai/grade-school-math",
    license="MIT",
)


_CHOICES = 4


def openbookqa_sample(record: Record) -> Sample:
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
    sample=openbookqa_sample,
    origin="train.jsonl, dev.jsonl and test.jsonl in Data/Additional of the archive at allenai.org/data/open-book-qa",
    license="no license stated for the data; the authors' code is Apache-2.0",
)


_WORDS = {"0": "negative", "1": "positive"}
_QUESTION = "Positive or negative?"  # short: the leak rule compares whole prompts, the question included


def sst2_sample(record: Record) -> Sample:
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
    sample=sst2_sample,
    origin="train.tsv and dev.tsv of SST-2 at gluebenchmark.com/tasks; dev.tsv is the test",
    license="no license stated",
)


_DEV, _TEST = range(511, 601), range(11, 511)


def mbpp_sample(record: Record) -> Sample:
    """Convert a problem with its solution and tests; the prompt shows the tests, because they name the function."""
    task = member(record, "task_id")
    if not isinstance(task, int):
        raise wrong("task_id", "the task's number is no whole number")
    text, code = require_text(record, "prompt" if "prompt" in record else "text").strip(), require_text(record, "code")
    tests, imports = _lines(record, "test_list"), _lines(record, "test_imports") if "test_imports" in record else []
    if not tests:
        raise wrong("test_list", "the problem has no tests")
    setup = record.get("test_setup_code") or ""
    program = code.replace("\r\n", "\n").strip()
    return Sample(
        prompt="\n".join([text, "Your code should pass these tests:", *tests]),
        kind="utility",
        completion=f"```python\n{program}\n```",
        suite={"answer": "\n".join(filter(None, [*imports, setup.strip(), *tests])), "scorer": "mbpp"},
        split=_split(task),
    )


def _split(task: int) -> Split:
    return "test" if task in _TEST else "dev" if task in _DEV else "train"


def _lines(record: Record, key: str) -> list[str]:
    found = member(record, key)
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise wrong(key, f'"{key}" is no list of texts')
    return found


MBPP = Dataset(
    name="mbpp",
    stems={"utility": "mbpp"},
    sample=mbpp_sample,
    origin="mbpp.jsonl or sanitized-mbpp.json in mbpp of github.com/google-research/google-research",
    license="CC-BY-4.0",
)

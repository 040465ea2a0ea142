"""MBPP (Austin et al., 2021): small Python problems, `{"task_id", "text", "code", "test_list", "test_setup_code"}`.

The sanitized file has `prompt` in place of `text`, and `test_imports`. The authors' splits are by task id: 11 to 510
are the test split, 511 to 600 the development split; all others are for training, including the ten few-shot examples.
"""

from __future__ import annotations

from spard_lab.datasets.base import Dataset, Record, Sample, Split, member, require_text, wrong

_DEV, _TEST = range(511, 601), range(11, 511)


def sample(record: Record) -> Sample:
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
    sample=sample,
    origin="mbpp.jsonl or sanitized-mbpp.json in mbpp of github.com/google-research/google-research",
    license="CC-BY-4.0",
)

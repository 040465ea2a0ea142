"""The definition of valid rows: training rows (chat, completion, preference pairs), pool rows and suite rows.

Every rule takes a row and its line number and returns the row's problems. Uploads and imports list them;
`spard.data.rows`, which the library and jobs use, raises the first error. Codes and pointers are the API's; a problem
of severity `warning` does not stop a job.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Literal

from spard.config.extensions import LIKELIHOOD_SCORERS, scorer_names
from spard.data.chat_rows import chat_row_problems, control_text, is_preference, preference_row_problems, unknown_keys
from spard.data.jsonl import Problem, row_error, row_warning
from spard.data.languages import primary
from spard.data.other_formats import NAMES, ColumnsLost, Foreign, NotConvertible, convert_row, foreign_format

RowRule = Callable[[Mapping[str, object], int], Iterable[Problem]]
SuiteRowKind = Literal["harmful", "benign", "utility"]
Format = Literal["chat", "completion", "preference"]

_SHOWN = 40  # maximum characters of a quoted value
_CONVERT = "spard files convert FILE_ID"
_POST = "or POST /v1/files/FILE_ID/convert?dry_run=true"


class TrainingRows:
    """The rule for training files: every row must be valid and have the format of the first row."""

    def __init__(self) -> None:
        self.format: Format | None = None

    def __call__(self, row: Mapping[str, object], line: int) -> list[Problem]:
        """Check a row; the first row in one of our formats fixes the format of the file."""
        return _set_line(line, self._problems(row))

    def _problems(self, row: Mapping[str, object]) -> Iterator[Problem]:
        if "messages" not in row and (kind := foreign_format(row)):
            yield row_error("", f"{kind}_format", *_foreign(kind, row))
            return
        found = _row_format(row)
        self.format = self.format or found
        if found != self.format:
            message = f"the row is in {found} format, but the file began in {self.format} format"
            yield row_error("", "mixed_formats", message, "write all rows in one format")
            return
        wrong = list(_CHECKS[found](row))
        if not wrong:
            return
        # Warnings alone are reported as they are; only an error makes another format the likelier explanation.
        is_bad = any(problem.severity == "error" for problem in wrong)
        if is_bad and (kind := foreign_format(row)) and _is_convertible(row):
            yield row_error("", f"{kind}_format", *_foreign(kind, row))
        else:
            yield from wrong


def _is_convertible(row: Mapping[str, object]) -> bool:
    """Return True if a row can be converted, possibly without columns that the owner may leave out."""
    try:
        return bool(convert_row(row))
    except ColumnsLost:
        return True
    except NotConvertible:
        return False


def _foreign(kind: Foreign, row: Mapping[str, object]) -> tuple[str, str]:
    """Return a message and a hint for a row in a foreign format; they tell if and how it can be converted."""
    form = f"the row is in {NAMES[kind]}"
    try:
        made = convert_row(row)
    except ColumnsLost as lost:
        name = lost.columns[0][:_SHOWN]
        return f"{form}, and {lost} by a conversion", f"remove it, or leave it out: `{_CONVERT} --leave-out {name}`"
    except NotConvertible as reason:
        return f"{form} and cannot be converted: {reason}", "mend it, or write it in OpenAI's form"
    for problem in _CHECKS[_row_format(made.row)](made.row):
        if problem.severity == "error":
            message = f"{form}; converted, it has a fault at {problem.pointer or 'the row'}: {problem.message}"
            return message, problem.hint
    without = f", without the labels {', '.join(sorted(made.left_out))}" if made.left_out else ""
    return f"{form}; the file can be converted{without}", f"look with `{_CONVERT} --dry-run`, {_POST}"


def pool_row(row: Mapping[str, object], line: int) -> list[Problem]:
    """Check a pool row: a prompt with a safe answer, or a benign prompt; other keys are ignored."""
    return _set_line(line, [*_required_text(row, "prompt"), *_pool_side(row)])


def is_benign(row: Mapping[str, object]) -> bool:
    """Return True if a valid pool row is benign."""
    return row.get("benign") is True


def suite_row(row: Mapping[str, object], line: int) -> list[Problem]:
    """Check a suite row: a prompt and, if present, its answer, category, scorer, choices and language."""
    return _set_line(line, _suite_problems(row))


def utility_row(row: Mapping[str, object], line: int) -> list[Problem]:
    """Check a suite row that must have a correct answer."""
    missing = [] if row.get("answer") is not None else list(_required_text(row, "answer"))
    return _set_line(line, [*_suite_problems(row), *missing])


SUITE_RULES: Mapping[SuiteRowKind, RowRule] = {"harmful": suite_row, "benign": suite_row, "utility": utility_row}


def _pool_side(row: Mapping[str, object]) -> Iterator[Problem]:
    """Check the fields that make a pool row safe (an answer) or benign (the mark); no row is both."""
    benign = row.get("benign", False)
    if not isinstance(benign, bool):
        yield row_error("/benign", "data_type", '"benign" must be true or false', "write it without quotes: true")
    elif not benign:
        yield from _required_text(row, "safe")
    elif "safe" in row:
        hint = 'leave out "safe", or "benign" where the prompt is one to refuse'
        yield row_error("/safe", "benign_with_answer", "a benign row has no safe answer", hint)


def _row_format(row: Mapping[str, object]) -> Format:
    if is_preference(row):
        return "preference"
    return "completion" if "messages" not in row and row.keys() & {"prompt", "completion"} else "chat"


def _set_line(line: int, problems: Iterable[Problem]) -> list[Problem]:
    return [replace(problem, line=line) for problem in problems]


def _suite_problems(row: Mapping[str, object]) -> Iterator[Problem]:
    yield from _required_text(row, "prompt")
    for key in ("category", "answer"):
        if row.get(key) is not None and not _is_number(row[key]):
            yield from _text(row, key)
    language = row.get("language")
    if language is not None and primary(language) is None:
        message = f"unknown language {str(language)[:_SHOWN]!r}"
        hint = 'its words tell the language instead; write a tag of BCP 47, such as "en" or "de"'
        yield row_warning("/language", "unknown_language", message, hint)
    yield from _scoring(row)


def _scoring(row: Mapping[str, object]) -> Iterator[Problem]:
    """Check the scorer of a row: it must be known, and likelihood scorers need choices."""
    scorer, choices, known = row.get("scorer"), row.get("choices") or [], f"use one of {', '.join(scorer_names())}"
    if scorer is not None and scorer not in scorer_names():
        yield row_error("/scorer", "unknown_scorer", f"unknown scorer {str(scorer)[:_SHOWN]!r}", known)
    if not isinstance(choices, list) or not all(isinstance(choice, str) and choice for choice in choices):
        hint = 'write them in quotes: ["yes", "no"]'
        yield row_error("/choices", "data_type", "choices must be a list of texts that are not empty", hint)
    elif scorer in LIKELIHOOD_SCORERS and as_text(row.get("answer")) not in choices:
        message = f"the scorer {scorer} needs choices, and the answer is not one of them"
        yield row_error("/choices", "answer_not_in_choices", message, "list every choice, the right answer among them")


def as_text(value: object) -> str | None:
    """Return an optional value of a suite row as text; numbers are formatted as in Python."""
    return None if value is None else str(value)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _required_text(row: Mapping[str, object], key: str) -> Iterator[Problem]:
    if key not in row:
        yield row_error(f"/{key}", "message_missing_key", f'"{key}" is missing', f'add "{key}": "..."')
    else:
        yield from _text(row, key)


def _text(row: Mapping[str, object], key: str) -> Iterator[Problem]:
    text = row[key]
    if not isinstance(text, str):
        yield row_error(f"/{key}", "data_type", f'"{key}" must be a string', "write it in quotes")
    elif not text.strip():
        yield row_error(f"/{key}", "missing_content", f'"{key}" is empty', "give a text, or remove the row")


def _completion(row: Mapping[str, object]) -> Iterator[Problem]:
    yield from unknown_keys(row, frozenset({"prompt", "completion"}), "")
    yield from _required_text(row, "prompt")
    yield from _required_text(row, "completion")
    for key in ("prompt", "completion"):
        yield from control_text(row.get(key), f"/{key}")


_CHECKS: Mapping[Format, Callable[[Mapping[str, object]], Iterator[Problem]]] = {
    "chat": chat_row_problems,
    "completion": _completion,
    "preference": preference_row_problems,
}

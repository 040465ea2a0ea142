"""What one row may say: training rows (chat or prompt and completion), safety pool rows and audit suite rows.

Codes and pointers are those of the wire contract; a problem of severity `warning` does not stop a job.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, Literal

from app.files.chat_rows import chat_row, control_text, unknown_keys
from app.files.foreign import kind_of
from app.files.problems import Problem, error

_PREFERENCE_KEYS = frozenset({"preferred_completion", "non_preferred_completion"})

Format = Literal["chat", "completion"]


class TrainingRows:
    """The rule for a file of purpose `fine-tune`: every row valid, and all of the first row's format."""

    def __init__(self) -> None:
        self._format: Format | None = None

    def __call__(self, row: dict[str, Any], line: int) -> Iterable[Problem]:
        return [replace(problem, line=line) for problem in self._problems(row)]

    def _problems(self, row: dict[str, Any]) -> Iterator[Problem]:
        if kind := kind_of(row):
            message = f"the row is in {kind}'s form; the file can be converted"
            yield error("", f"{kind}_format", message, "look with POST /v1/files/{id}/convert?dry_run=true")
            return
        if row.keys() & _PREFERENCE_KEYS:
            message = "the row is a preference pair (dpo), which is not trained here"
            yield error("", "method_not_supported", message, 'give {"messages": [...]} rows for supervised')
            return
        found: Format = "completion" if "messages" not in row and row.keys() & {"prompt", "completion"} else "chat"
        self._format = self._format or found
        if found != self._format:
            message = f"the row is in {found} format, but the file began in {self._format} format"
            yield error("", "mixed_formats", message, "write all rows in one format")
        elif found == "chat":
            yield from chat_row(row)
        else:
            yield from _completion(row)


def pool_row(row: dict[str, Any], line: int) -> Iterable[Problem]:
    """A safety pool row: a prompt, and the safe answer to it; other keys are kept and ignored."""
    found = [*_required_text(row, "prompt"), *_required_text(row, "safe")]
    return [replace(problem, line=line) for problem in found]


def suite_row(row: dict[str, Any], line: int) -> Iterable[Problem]:
    """An audit prompt; `category` and `answer` are texts where present."""
    found = list(_required_text(row, "prompt"))
    found += [problem for key in ("category", "answer") if row.get(key) is not None for problem in _text(row, key)]
    return [replace(problem, line=line) for problem in found]


def utility_row(row: dict[str, Any], line: int) -> Iterable[Problem]:
    """A prompt with the right answer to it."""
    missing = [] if row.get("answer") is not None else list(_required_text(row, "answer"))
    return [*suite_row(row, line), *(replace(problem, line=line) for problem in missing)]


def _required_text(row: dict[str, Any], key: str) -> Iterator[Problem]:
    if key not in row:
        yield error(f"/{key}", "message_missing_key", f'"{key}" is missing', f'add "{key}": "..."')
    else:
        yield from _text(row, key)


def _text(row: dict[str, Any], key: str) -> Iterator[Problem]:
    if not isinstance(row[key], str):
        yield error(f"/{key}", "data_type", f'"{key}" must be a string', "write it in quotes")
    elif not row[key].strip():
        yield error(f"/{key}", "missing_content", f'"{key}" is empty', "give a text, or remove the row")


def _completion(row: dict[str, Any]) -> Iterator[Problem]:
    yield from unknown_keys(row, frozenset({"prompt", "completion"}), "")
    yield from _required_text(row, "prompt")
    yield from _required_text(row, "completion")
    for key in ("prompt", "completion"):
        yield from control_text(row.get(key), f"/{key}")

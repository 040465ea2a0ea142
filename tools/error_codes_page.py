"""docs/error-codes.md: every error code with its HTTP status, its cause and its cure, of tools/error_codes.toml."""

from __future__ import annotations

import tomllib
from pathlib import Path

from tools import error_codes

EXPLAINED = Path(__file__).with_name("error_codes.toml")
_HEAD = """# Error codes

Codes keep their meaning ([compatibility](compatibility.md#error-codes)); messages may change. The command line prints
the message; what its exit status says stands in [compatibility](compatibility.md#command-line). This
page is made by `python -m tools.references` from the code and `tools/error_codes.toml`.
"""
_REQUESTS = """
## Requests

In `error.code` of an answer, in OpenAI's form: `{"error": {"message": ..., "type": ..., "param": ..., "code": ...}}`.
Statuses 408, 409, 429 and 5xx are worth another try, and the official clients do so by themselves, except
`quota_exceeded`.

| code | status | cause | cure |
|---|---|---|---|
"""
_JOBS = """
## Jobs

In `error.code` of a job whose status is `failed`, and of the errors that the library raises. Failures of a worker or of
what is around it cost a job nothing: it is tried again.

| code | cause | cure |
|---|---|---|
"""
_LABORATORY = """
## Laboratory

In what the commands of the laboratory raise (`spard lab`, `spard bench`), beside the codes of jobs.

| code | cause | cure |
|---|---|---|
"""
_ROWS = """
## Rows

In `problems` of `GET /v1/files/{id}/validation`, each with a line, a JSON pointer, a message and a hint.

| code | cause | cure |
|---|---|---|
"""


def read_explanations() -> dict[str, dict[str, tuple[str, str]]]:
    """Return cause and cure of each code, by where it appears."""
    tables = tomllib.loads(EXPLAINED.read_text(encoding="utf-8"))
    return {place: {code: (cause, cure) for code, (cause, cure) in codes.items()} for place, codes in tables.items()}


def find_codes() -> dict[str, set[str]]:
    """Return the codes of the sources, by where they appear."""
    found = {"jobs": error_codes.jobs(), "laboratory": error_codes.laboratory(), "rows": error_codes.rows()}
    return {"requests": set(error_codes.requests()), **found}


def page() -> str:
    """Return the page; a `KeyError` for a code that is not explained."""
    words, requests = read_explanations(), error_codes.requests()
    statuses = {code: ", ".join(map(str, sorted(found))) for code, found in requests.items()}
    asked = [f"| `{code}` | {statuses[code]} | {' | '.join(words['requests'][code])} |\n" for code in sorted(requests)]
    parts = [_HEAD, _REQUESTS, *asked]
    for place, head in {"jobs": _JOBS, "laboratory": _LABORATORY, "rows": _ROWS}.items():
        parts += [head, *(_line(code, words[place]) for code in sorted(find_codes()[place]))]
    return "".join(parts)


def _line(code: str, words: dict[str, tuple[str, str]]) -> str:
    return f"| `{code}` | {' | '.join(words[code])} |\n"

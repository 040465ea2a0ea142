"""Read suites from files, for audits without the service, and split off the prompts that compare epoch ends.

JSONL has rows `{"prompt": ...}`, in utility suites with `answer` and `scorer`. CSV is in XSTest's form: columns
`prompt` and `type`, where types that begin with `contrast_` are unsafe, or a column `label` with safe or unsafe. Rows
of both may declare a `language`.

Choosing weights by prompts fits the weights to them a little, so the gate never asks those of the development share.
"""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from typing import get_args

from spard.config.run_spec import SuiteSpec
from spard.data.problems import raise_first_error
from spard.data.row_rules import SuiteRowKind, suite_row
from spard.data.rows import Prompt, read_prompts, suite_prompt
from spard.errors import InvalidSuite
from spard.evaluation.audit import Suite
from spard.evaluation.results import SuiteKind


def read_suite(spec: SuiteSpec) -> Suite:
    """Read the suite that a run spec names."""
    return Suite(spec.name, spec.kind, tuple(read_prompts(spec.path, kind=spec.kind, language=spec.language)))


def named_suites(source: str) -> list[Suite]:
    """Read suites from `[KIND:]FILE`; without a kind, rows with answers make a utility suite, others a harmful one."""
    kind, colon, rest = source.partition(":")
    stated = next((each for each in get_args(SuiteKind) if colon and each == kind != "mined"), None)
    return read_suites(Path(rest if stated else source), stated)


def read_suites(path: Path, kind: SuiteKind | None = None) -> list[Suite]:
    """Read the suites of a file: one from JSONL, up to two from CSV.

    Raises `InvalidSuite` if the file cannot be read, has the wrong columns, or contains no prompts of the kind.
    """
    try:
        suites = _of_csv(path) if path.suffix == ".csv" else [_of_jsonl(path, kind)]
    except OSError as error:
        raise InvalidSuite(f"{path} cannot be read: {error.strerror}", "suite") from error
    suites = [suite for suite in suites if kind in (None, suite.kind)]
    if not any(suite.prompts for suite in suites):
        raise InvalidSuite(f"{path} holds no {kind or ''} prompts".replace("  ", " "), "suite")
    return suites


def _row_kind(kind: SuiteKind | None) -> SuiteRowKind:
    """Return the rules for rows: only utility rows need an answer."""
    return "utility" if kind == "utility" else "harmful"


def _of_jsonl(path: Path, kind: SuiteKind | None) -> Suite:
    prompts = tuple(read_prompts(path, kind=_row_kind(kind)))
    has_answers = bool(prompts) and all(each.answer is not None for each in prompts)
    return Suite(path.stem, kind or ("utility" if has_answers else "harmful"), prompts)


def _of_csv(path: Path) -> list[Suite]:
    rows = _csv_rows(path)
    if not rows or "prompt" not in rows[0][1] or not {"type", "label"} & rows[0][1].keys():
        raise InvalidSuite(f"{path} needs the columns prompt and type, or prompt and label", "suite")
    for line, row in rows:
        raise_first_error(suite_row({"prompt": row["prompt"]}, line), InvalidSuite)
    sides: dict[bool, list[Prompt]] = {False: [], True: []}
    for line, row in rows:
        sides[_is_unsafe(row, line)].append(_prompt(row))
    found = [
        Suite(f"{path.stem}-safe", "benign", tuple(sides[False])),
        Suite(f"{path.stem}-unsafe", "harmful", tuple(sides[True])),
    ]
    return [suite for suite in found if suite.prompts]


def _csv_rows(path: Path) -> list[tuple[int, dict[str, str | None]]]:
    """Return the rows, each with the number of its last line; missing fields are None."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            return [(reader.line_num, row) for row in reader]
    except (UnicodeDecodeError, csv.Error) as error:
        raise InvalidSuite(f"{path} is no CSV in UTF-8: {error}", "suite") from error


def _is_unsafe(row: dict[str, str | None], line: int) -> bool:
    """Return True if a prompt asks for harm: by its label, or by its type if it has no label."""
    label, kind = (row.get("label") or "").strip().lower(), row.get("type") or ""
    if label not in ("safe", "unsafe", "") or not (label or kind):
        wrong = f"the label {label[:40]!r} is neither safe nor unsafe" if label else "there is no label, and no type"
        raise InvalidSuite(f"line {line}: {wrong}", "suite")
    return label == "unsafe" if label else kind.startswith("contrast_")


def _prompt(row: dict[str, str | None]) -> Prompt:
    return suite_prompt({"prompt": row["prompt"], "category": row.get("type"), "language": row.get("language")})


LEAST = 20  # least prompts of a share; fewer are not informative
_PART = 5  # at most one in this many prompts of a suite


def split(suite: Suite, most: int) -> tuple[Suite, Suite | None]:
    """Return the gate's part of a suite, and its development share of at most `most` evenly spaced prompts.

    A suite of fewer than 100 prompts has no share (None), because the gate could not decide on the rest.
    """
    count = min(most, len(suite.prompts) // _PART)
    if count < LEAST:
        return suite, None
    # Evenly spaced, so that a suite sorted by category gives a share of every category.
    places = {i * len(suite.prompts) // count for i in range(count)}
    taken = tuple(prompt for i, prompt in enumerate(suite.prompts) if i in places)
    left = tuple(prompt for i, prompt in enumerate(suite.prompts) if i not in places)
    return replace(suite, prompts=left), replace(suite, prompts=taken)

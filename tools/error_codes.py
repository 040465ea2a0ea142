"""Finds every error code in the sources by their syntax trees; docs/error-codes.md must explain each.

requests   `error.code` of a response, with its HTTP statuses
jobs       `error.code` of a failed job, and of the library's errors
laboratory `code` of errors of the laboratory's own commands
rows       `code` in the list of a file's problems

Codes computed at run time are listed in `MADE`; an unknown expression raises `KeyError`.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from app.http.connections import REFUSALS
from app.http.validation_errors import _CODES as OF_PYDANTIC
from worker.failures import FAULTS

ROOT = Path(__file__).resolve().parents[1]
LABORATORY = "lab/spard_lab"
PACKAGES = ("app", "spard", "worker", LABORATORY)
Codes = dict[str, set[int]]

# Expressions for codes that are not constants, with their values; codes that are only passed on have none.
MADE: dict[str, tuple[str, ...]] = {
    "f'{what}_not_found'": ("pool_not_found", "suite_not_found"),
    "f'{missing}_missing'": ("base_unaligned_missing",),  # a defense's setting
    "f'{kind}_format'": ("alpaca_format", "sharegpt_format", "trl_format"),
    "self._code": (),
    "first['code']": (),
    "row.code": (),
    "bad.code": (),
    "code": (),
    "error.code": (),
    "str(error.code)": (),
    "error.code or SERVER_ERROR": (),
    "SERVER_ERROR": ("server_error",),
}
_BAD_FILES = {"invalid_n_examples"}  # refuse a request, or fail the job with SPARD_BAD_FILES=fail
_RENDERED = {
    "content_not_rendered",
    "template_render_failed",
    "too_many_turns",
    "tools_not_rendered",
}  # problems found while counting tokens
_PROBLEMS = {"Problem": 2, "row_error": 1, "row_warning": 1, "notice": 0, "BadJson": 0}  # index of the code argument
_JOBS = {"error_object": 0, "Failure": 0, "around": 0}


@dataclass(frozen=True)
class Kind:
    """An error class: its root (`AppError` or `SpardError`), and its own or inherited code and status."""

    root: str
    package: str
    code: str | None
    status: int


@cache
def requests() -> Codes:
    """Return each code of a response with its statuses."""
    kinds = {name: kind for name, kind in _kinds() if kind.root == "AppError" and kind.package == "app"}
    found: Codes = defaultdict(set)
    for kind in kinds.values():
        if kind.code:
            found[kind.code].add(kind.status)
    for refusal in REFUSALS:  # refused connections, before any request
        found[refusal[2]].add(refusal[0])
    for code in [*OF_PYDANTIC.values(), "invalid_type"]:
        found[code].add(400)
    for call in _calls("app"):
        name, given = _name(call), {each.arg: each.value for each in call.keywords}
        if name == "Slots":
            found[_text(call.args[1])].add(429)
        elif name == "Refusal":
            found[_text(call.args[0])].add(400)
        elif name in kinds and "code" in given:
            status = given.get("status")
            fixed = status.value if isinstance(status, ast.Constant) else kinds[name].status
            for code in _codes(given["code"]):
                found[code].add(int(str(fixed)))
    return dict(found)


@cache
def jobs() -> set[str]:
    """Return the codes of failed jobs and of the library's errors."""
    library = {kind.code for _, kind in _kinds() if kind.root == "SpardError" and kind.package != LABORATORY}
    named = library | {kind.code for _, kind in _kinds() if kind.package == "worker"}
    return {code for code in named if code} | set(FAULTS) | _BAD_FILES | set(_arguments(_JOBS, "app", "worker"))


@cache
def laboratory() -> set[str]:
    """Return the codes of the laboratory's errors that the library does not have."""
    return {kind.code for _, kind in _kinds() if kind.package == LABORATORY and kind.code} - jobs()


@cache
def rows() -> set[str]:
    """Return the codes of row problems."""
    return _RENDERED | set(_arguments(_PROBLEMS, "spard/data", "app/files"))


def _arguments(functions: dict[str, int], *folders: str) -> Iterator[str]:
    for folder in folders:
        for call in _calls(folder):
            place = functions.get(_name(call))
            if place is not None and len(call.args) > place:
                yield from _codes(call.args[place])


def _codes(value: ast.expr) -> Iterator[str]:
    match value:
        case ast.Constant(value=None):
            return
        case ast.Constant(value=str(code)):
            yield code
        case ast.IfExp(body=first, orelse=second):
            yield from (*_codes(first), *_codes(second))
        case _:
            yield from MADE[ast.unparse(value)]


def _text(value: ast.expr) -> str:
    (code,) = _codes(value)
    return code


def _name(call: ast.Call) -> str:
    return str(getattr(call.func, "id", getattr(call.func, "attr", "")))


@cache
def _nodes(folder: str) -> tuple[ast.AST, ...]:
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in sorted((ROOT / folder).rglob("*.py")))
    return tuple(node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call | ast.ClassDef))


def _calls(folder: str) -> Iterator[ast.Call]:
    return (node for node in _nodes(folder) if isinstance(node, ast.Call))


def _kinds() -> Iterator[tuple[str, Kind]]:
    """Yield (name, kind) of each class below one of the two roots."""
    classes = [(package, node) for package in PACKAGES for node in _nodes(package) if isinstance(node, ast.ClassDef)]
    known = {"UserError": Kind("UserError", "spard", None, 0)}
    missing = -1
    while len(known) != missing:  # until no further class is known
        missing = len(known)
        for package, node in classes:
            above = [known[base.id] for base in node.bases if isinstance(base, ast.Name) and base.id in known]
            if above:
                kind = _kind(package, node, above[0])
                known[node.name] = kind
    for package, node in classes:
        above = [known[base.id] for base in node.bases if isinstance(base, ast.Name) and base.id in known]
        if above:
            yield node.name, _kind(package, node, above[0])


def _kind(package: str, node: ast.ClassDef, above: Kind) -> Kind:
    said: dict[str, Any] = {}
    for each in node.body:
        match each:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=value)):
                said[name] = value
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.Constant(value=value)):
                said[name] = value
    root = node.name if above.root == "UserError" else above.root
    return Kind(root, package, said.get("code", above.code), said.get("status", above.status))

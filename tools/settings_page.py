"""Writes docs/settings.md: every setting with its type, default and meaning, and the processes that read it.

Names, types, bounds and defaults come from `app.settings.Settings`, meanings from the table in docs/compatibility.md,
and readers from the sources: files that access a field of `settings`, or a method that uses the field.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from app.settings import GROUPS, Names, Settings

ROOT = Path(__file__).resolve().parents[1]
_HEAD = """# Settings

Settings are read from the environment when a process starts. An unknown `SPARD_...` is ignored, with a warning
where its name is nearly a setting's; an empty one counts as unset; a wrong value stops the process with one line that
names it. "API" is each API process, "engine" a process of the
API that answers for models, "worker" each worker with its jobs. This page is written by `python -m tools.references`
from `app/settings.py` and the meanings in [compatibility](compatibility.md#settings).
"""
_CLIENTS = """
## Read by other programs

| variable | default | read by |
|---|---|---|
"""
# The process that runs a file, by path prefix; the first match counts.
_PROCESSES = (
    ("worker/", ("worker",)),
    ("app/inference/engine_process.py", ("engine",)),
    ("app/ops/children.py", ("worker",)),
    ("app/signing.py", ("API", "worker")),
    ("app/commands/objects.py", ("`spard objects`",)),
    ("app/commands/", ("`spard up`",)),
    ("app/", ("API",)),
)
_ORDER = ("API", "engine", "worker", "`spard up`", "`spard objects`")
_TYPES = {int: "whole number", float: "number", bool: "`true` or `false`", str: "text", Path: "path"}


def page() -> str:
    """Return the page's text."""
    meanings, others = _tables()
    readers = _readers()
    rows = [_row(name, hint, default, meanings, readers[field]) for name, field, hint, default in _settings()]
    head = "| setting | type | default | meaning | read by |\n|---|---|---|---|---|\n"
    return f"{_HEAD}\n{head}{''.join(rows)}{_CLIENTS}{''.join(others)}"


def _row(name: str, hint: Any, default: Any, meanings: dict[str, str], readers: set[str]) -> str:
    shown = "unset" if default is None else f"`{_text(default)}`"
    read_by = ", ".join(sorted(readers, key=_ORDER.index))
    return f"| `{name}` | {_type(hint)} | {shown} | {meanings[name]} | {read_by} |\n"


def _settings() -> Iterator[tuple[str, str, Any, Any]]:
    """Yield (variable, field of `Settings`, type, default) of each setting."""
    hints = get_type_hints(Settings, include_extras=True)
    for field, info in Settings.model_fields.items():
        group = GROUPS.get(field)
        if group is None:
            bounds = [each for each in info.metadata if _bound_texts(each)]
            yield f"SPARD_{field.upper()}", field, (hints[field], bounds), info.default
            continue
        members = get_type_hints(group.kind, include_extras=True)
        for member in fields(group.kind):
            yield (
                group.variable(field, member.name),
                field,
                (members[member.name], []),
                getattr(info.default, member.name),
            )


def _type(given: tuple[Any, list[Any]]) -> str:
    """Describe a type with its bounds."""
    hint, found = given
    if hint == Names:
        return "names, between commas"
    bounds = list(found)
    while get_origin(hint) in (Annotated, Union, UnionType):
        if get_origin(hint) is Annotated:
            hint, *extra = get_args(hint)
            bounds += [each for each in extra if _bound_texts(each)]
        else:
            (hint,) = (each for each in get_args(hint) if each is not NoneType)
    if get_origin(hint) is Literal:
        return ", ".join(f"`{each}`" for each in get_args(hint))
    if get_origin(hint) is tuple:
        return "JSON list"
    named = _TYPES.get(hint, "text, secret")
    return ", ".join([named, *(text for each in bounds for text in _bound_texts(each))])


def _bound_texts(given: object) -> list[str]:
    """Describe the bounds in a piece of metadata."""
    words = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    return [
        f"{word} {_text(getattr(given, key))}" for key, word in words.items() if getattr(given, key, None) is not None
    ]


def _text(value: Any) -> str:
    match value:
        case bool():
            return str(value).lower()
        case float():
            return f"{value:g}" if value < 1e5 else str(int(value))
        case ():
            return "[]"
        case _:
            return str(value)


def _tables() -> tuple[dict[str, str], list[str]]:
    """Return the meanings in docs/compatibility.md, and its rows about other programs."""
    text = (ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8")
    section = text.split("\n## Settings\n", 1)[1].split("\n## ", 1)[0]
    ours, others = (table.splitlines(keepends=True)[2:] for table in re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE))
    cells = [[cell.strip() for cell in line.strip()[1:-1].split("|")] for line in ours]
    return {name.strip("`"): meaning for name, _, meaning in cells}, others


def _readers() -> dict[str, set[str]]:
    """Return the processes that read each field, directly or by a method of `Settings`."""
    methods = _fields_of_methods()
    found: dict[str, set[str]] = defaultdict(set)
    for folder in ("app", "worker"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            if name == "app/settings.py":
                continue
            processes = next(who for start, who in _PROCESSES if name.startswith(start))
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Attribute) and "settings" in ast.unparse(node.value):
                    for field in methods.get(node.attr, {node.attr}):
                        found[field].update(processes)
    return found


def _fields_of_methods() -> dict[str, set[str]]:
    methods = [node for node in ast.walk(ast.parse(inspect.getsource(Settings))) if isinstance(node, ast.FunctionDef)]
    used = {method.name: {n.attr for n in ast.walk(method) if isinstance(n, ast.Attribute)} for method in methods}
    return {name: names & Settings.model_fields.keys() for name, names in used.items()}

"""Output of commands: tables and boxes for people, JSON for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from io import StringIO
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from spard.errors import UserError

Row = Mapping[str, Any]
_WIDE = 1000  # columns of a table in a pipe
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


class CommandFailed(UserError):
    """The command has failed; the user sees only the message, without a traceback."""


def show_rows(rows: Iterable[Row], columns: Sequence[str] | Mapping[str, str], as_json: bool) -> None:
    """Print rows as a table with the given columns, or as a JSON list.

    A dotted column name is a field of a nested object. A mapping of names to headings sets the headings.
    """
    if as_json:
        return show_json(list(rows))
    heads = columns if isinstance(columns, Mapping) else {name: _head(name) for name in columns}
    table = Table(box=None, header_style="bold")
    for name, head in heads.items():
        table.add_column(head, overflow="fold", no_wrap=name == "id")  # ids are there to be copied
    for row in rows:
        table.add_row(*(Text(_text(_nested_value(row, name), name)) for name in heads))
    return _print(table)


def show_record(row: Row, as_json: bool) -> None:
    """Print one object, a line for each non-empty field, or as JSON; fields of nested objects get dotted names."""
    if as_json:
        return show_json(row)
    table = Table(box=None, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _flat(row):
        table.add_row(Text(name, "bold"), Text(_text(value, name)))
    return _print(table)


def readable(value: Any) -> str:
    """Format a value for people: lists with commas, objects as `name: value`, and `none` for null."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {readable(part)}" for name, part in value.items() if part is not None) or "none"
    if isinstance(value, list):
        is_short = not any(isinstance(each, Mapping) for each in value)
        return (", " if is_short else "\n").join(map(readable, value)) or "none"
    return str(value)


def show_json(value: Any) -> None:
    """Print a value as indented JSON, without colors, for programs to read."""
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def say(line: str) -> None:
    """Print a line unchanged: without wrapping, markup or emoji."""
    Console(highlight=False, soft_wrap=True).print(line, markup=False, emoji=False)  # ids may look like emoji codes


def warn(line: str) -> None:
    """Print a line to standard error."""
    typer.echo(line, err=True)


def say_in_box(title: str, facts: Mapping[str, str]) -> None:
    """Print named facts in a box, leaving out empty ones; the box is as wide as its longest line."""
    table = Table.grid(padding=(0, 2))
    for name, text in facts.items():
        if text:
            table.add_row(f"[dim]{name}", Text(text))
    panel = Panel.fit(table, title=f"[bold]{title}", title_align="left", padding=(1, 2))
    console = Console(highlight=False)
    console.width = max(console.width, console.measure(panel, options=console.options.update(width=_WIDE)).maximum)
    console.print(panel)


def _print(table: Table) -> None:
    """Print a table; in a pipe, without a limit of width and without trailing spaces."""
    if sys.stdout.isatty():
        return Console(emoji=False).print(table)
    console = Console(width=_WIDE, emoji=False, file=StringIO(), color_system=None)
    console.print(table)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]  # it is the StringIO
    sys.stdout.writelines(f"{line.rstrip()}\n" for line in text.splitlines())
    return None


def _head(name: str) -> str:
    """Return a column's heading: the field's name, or the last part of a dotted name in words."""
    return name.rpartition(".")[2].replace("_", " ") if "." in name else name


def _flat(row: Row, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the non-empty fields of an object; fields of nested objects get dotted names."""
    for name, value in row.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        elif value not in (None, []):
            yield prefix + name, value


def _nested_value(row: Row, name: str) -> Any:
    value: Any = row
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _text(value: Any, name: str) -> str:
    if value is None or value == []:
        return ""
    if isinstance(value, int) and not isinstance(value, bool) and name.endswith(("_at", "created")):
        return datetime.fromtimestamp(value).astimezone().isoformat(" ", "seconds")
    return readable(value)

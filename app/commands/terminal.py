"""How commands show what they found: tables and boxes for people, JSON for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from spard.errors import UserError

_WIDE = 1000  # columns of a table in a pipe
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


class CommandFailed(UserError):
    """The command cannot go on; the message is all that the user sees."""


def show_rows(rows: Iterable[Mapping[str, Any]], columns: Sequence[str], as_json: bool) -> None:
    """Print a table with the columns named; dotted names reach into nested objects."""
    if as_json:
        return show_json(list(rows))
    table = Table(box=None, header_style="bold")
    for name in columns:
        table.add_column(name, overflow="fold", no_wrap=name == "id")  # ids are there to be copied
    for row in rows:
        table.add_row(*(_text(_at(row, name), name) for name in columns))
    return _print(table)


def show_record(row: Mapping[str, Any], as_json: bool) -> None:
    """One object, a line for each field that has a value."""
    if as_json:
        return show_json(row)
    table = Table(box=None, show_header=False)
    for name, value in row.items():
        if value not in (None, [], {}):
            table.add_row(f"[bold]{name}", _text(value, name))
    return _print(table)


def show_json(value: Any) -> None:
    """Print a value as indented JSON, without colors, for programs to read."""
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def say(line: str) -> None:
    """Print a line as it is: neither wrapped nor read as markup."""
    Console(highlight=False, soft_wrap=True).print(line, markup=False, emoji=False)  # ids hold words between colons


def warn(line: str) -> None:
    """Print a line beside the output, for people, as it is."""
    typer.echo(line, err=True)


def say_in_box(title: str, facts: Mapping[str, str]) -> None:
    """Print facts in a box, each with its name; those without a text are left out, and no line is cut or wrapped."""
    table = Table.grid(padding=(0, 2))
    for name, text in facts.items():
        if text:
            table.add_row(f"[dim]{name}", Text(text))
    panel = Panel.fit(table, title=f"[bold]{title}", title_align="left", padding=(1, 2))
    console = Console(highlight=False)
    console.width = max(console.width, console.measure(panel, options=console.options.update(width=_WIDE)).maximum)
    console.print(panel)


def _print(table: Table) -> None:
    """As wide as it needs to be, unless a person looks at it."""
    Console(width=None if sys.stdout.isatty() else _WIDE, emoji=False).print(table)


def _at(row: Mapping[str, Any], name: str) -> Any:
    value: Any = row
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _text(value: Any, name: str) -> str:
    if value is None:
        return ""
    if isinstance(value, int) and name.endswith(("_at", "created")):
        return datetime.fromtimestamp(value).astimezone().isoformat(" ", "seconds")
    return str(value if not isinstance(value, dict | list) else json.dumps(value))

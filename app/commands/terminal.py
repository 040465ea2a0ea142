"""How commands show what they found: tables and boxes for people, JSON for programs."""

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
    """The command cannot go on; the message is all that the user sees."""


def show_rows(rows: Iterable[Row], columns: Sequence[str] | Mapping[str, str], as_json: bool) -> None:
    """Print a table with the columns named; dotted names reach into nested objects.

    A mapping gives a column another head than the last part of its name.
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
    """Print one object, a line for each field that has a value; fields of nested objects have dotted names."""
    if as_json:
        return show_json(row)
    table = Table(box=None, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _flat(row):
        table.add_row(Text(name, "bold"), Text(_text(value, name)))
    return _print(table)


def readable(value: Any) -> str:
    """Return a value as people read it: lists with commas, objects as `name: value`, and `none` for null."""
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
    """Print a table; in a pipe as wide as it needs to be, and no line is padded."""
    if sys.stdout.isatty():
        return Console(emoji=False).print(table)
    console = Console(width=_WIDE, emoji=False, file=StringIO(), color_system=None)
    console.print(table)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]  # it is the StringIO
    sys.stdout.writelines(f"{line.rstrip()}\n" for line in text.splitlines())
    return None


def _head(name: str) -> str:
    """Return the head of a column: a field's name, or for one in a nested object its last part in words."""
    return name.rpartition(".")[2].replace("_", " ") if "." in name else name


def _flat(row: Row, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each field that has a value; a field of a nested object gets a dotted name."""
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

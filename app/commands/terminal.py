"""Where commands find the service, and how they show what it says."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from spard.errors import UserError

if TYPE_CHECKING:
    from openai import OpenAI

DEFAULT_URL = "http://127.0.0.1:8000/v1"
_WIDE = 1000  # columns of a table in a pipe
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


class CommandFailed(UserError):
    """The command cannot go on; the message is all that the user sees."""


@contextmanager
def connect() -> Iterator[OpenAI]:
    """Yield a client of the service that the environment names; what the service refuses becomes `CommandFailed`."""
    from openai import APIConnectionError, APIStatusError, AuthenticationError, OpenAI  # takes half a second to import

    key = os.environ.get("SPARD_API_KEY")
    if not key:
        raise CommandFailed("Set SPARD_API_KEY to your key; `spard up` or `spard keys first` shows the first one.")
    try:
        with OpenAI(base_url=service_url(), api_key=key, max_retries=1) as client:
            yield client
    except AuthenticationError:
        raise CommandFailed(f"{service_url()} does not know this key; check SPARD_API_KEY.") from None
    except APIConnectionError:
        message = f"Nothing answers at {service_url()}; start it with `spard up`, or set SPARD_BASE_URL."
        raise CommandFailed(message) from None
    except APIStatusError as error:
        body = error.body if isinstance(error.body, dict) else {}
        raise CommandFailed(str(body.get("message") or error)) from None


def service_url() -> str:
    """Return the address of the API; `/v1` is added to one without a path."""
    url = os.environ.get("SPARD_BASE_URL", DEFAULT_URL)
    return f"{url.rstrip('/')}/v1" if urlsplit(url).path in ("", "/") else url


def get(path: str, **params: Any) -> Any:
    """Return the JSON that one of the service's own endpoints answers with."""
    with connect() as client:
        return client.get(path, cast_to=object, options={"params": params})


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

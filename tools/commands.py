"""The table of `spard`'s commands in docs/command-line.md: `python -m tools.commands --write` updates it."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from typer.main import get_command

from spard.commands.main import command_line, subcommands

PAGE = Path(__file__).resolve().parents[1] / "docs" / "command-line.md"
_PART = re.compile(r"(?<=<!-- commands -->\n).*?(?=<!-- /commands -->)", re.DOTALL)


def leaves() -> dict[str, Any]:
    """Return every command that can be run, by its words; hidden old names are left out."""
    trees = [get_command(command_line([name])) for name in subcommands()]
    found = [leaf for tree in trees for leaf in _leaf_commands(tree, ("spard",))]
    return dict(sorted(found, key=lambda leaf: leaf[0].count(" ") > 1))  # commands without subcommands first


def table() -> str:
    """Return the commands of the library and the service with what each does, as rows of Markdown."""
    shown = {name: command for name, command in leaves().items() if not _is_of_laboratory(command)}
    rows = [f"| `{name}` | {_first_clause(command)} |\n" for name, command in shown.items()]
    return "".join(["\n| command | does |\n|---|---|\n", *rows, "\n"])


def page_table(page: str) -> str:
    """Return the part of a page between its marks."""
    (found,) = _PART.findall(page)
    return str(found)


def _leaf_commands(command: Any, words: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    children = getattr(command, "commands", None)
    if children is None or command.invoke_without_command:
        yield " ".join(words), command
    if children is None:
        return
    for name, child in children.items():
        if not child.hidden:
            yield from _leaf_commands(child, (*words, name))


def _is_of_laboratory(command: Any) -> bool:
    return str(command.callback.__module__).startswith("spard_lab")


def _first_clause(command: Any) -> str:
    """Return a command's help up to the first semicolon, on one line: conditions and exit codes stay in `--help`."""
    paragraph = " ".join((command.help or "").split("\n\n")[0].split()).replace("|", "\\|")
    return paragraph.partition("; ")[0].removesuffix(".") + "."


def main(argv: Sequence[str]) -> int:
    """Print the table, or write it into the page."""
    if "--write" in argv:
        text = table()
        PAGE.write_text(_PART.sub(lambda _: text, PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        sys.stdout.write(table())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Builds the command `spard` from this library's subcommands and the subcommands of other distributions.

A distribution adds a subcommand by an entry point in the group `spard.commands` that names a `typer.Typer` or a
function. Only the requested subcommand is built; for the list of all, only the help texts of the others are read.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points
from importlib.metadata import version as installed_version
from typing import Annotated, Any

import typer

from spard.commands.front import outcome

GROUP = "spard.commands"
_DISTRIBUTIONS = ("spard", "spard-service", "spard-lab")
_HELP = """Fine-tune language models without losing their safety.

Exit codes: 0 success, 1 an error, 2 the check did not pass (safety gate, judge, pool or signature), 3 the command was
not understood.
"""
_COMPLETING = "_SPARD_COMPLETE"
_TYPED = ("COMP_WORDS", "_TYPER_COMPLETE_ARGS")  # shells pass the typed words in these variables


_OWN: dict[str, EntryPoint] = {
    name: EntryPoint(name, place, GROUP)
    for name, place in {
        "verify": "spard.commands.verify:verify",
        "export": "spard.commands.export:export",
        "run": "spard.commands.measuring:run",
        "audit": "spard.commands.measuring:audit",
        "judge": "spard.commands.measuring:judge",
        "measure-agent": "spard.commands.measuring:measure_agent",
        "check-pool": "spard.commands.measuring:check_pool",
        "check-model": "spard.commands.measuring:check_model",
    }.items()
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a subcommand and exit; a `UserError` is printed as one line with exit code 1."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    sys.exit(outcome(command_line(given), given, "spard"))


def command_line(given: Sequence[str] = ()) -> typer.Typer:
    """Build the command with the requested subcommand, or with the names and help texts of all."""
    known = subcommands()
    # Building one subcommand keeps the start fast: each of them imports modules of its own.
    words = _completion_words() if _COMPLETING in os.environ else given
    asked = next((each for each in words if not each.startswith("-")), None)
    cli = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)
    cli.callback(help=_HELP)(_root)
    if asked in known:
        _add(cli, asked, known[asked])
    elif "--version" not in words:
        for name, subcommand in known.items():
            _list(cli, name, subcommand)
    return cli


def subcommands() -> dict[str, EntryPoint]:
    """Return the installed subcommands by name."""
    return {each.name: each for each in entry_points(group=GROUP)} | _OWN


def _completion_words() -> Sequence[str]:
    """Return the words to complete, without the command itself."""
    return next((os.environ[name].split()[1:] for name in _TYPED if name in os.environ), [])


def _print_versions(is_asked: bool) -> None:
    if is_asked:
        for name in _DISTRIBUTIONS:
            if found := _version(name):
                typer.echo(f"{name} {found}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_versions, help="Print the installed versions.")
    ] = False,
) -> None:
    """Hold the options of the command itself."""


def _version(name: str) -> str | None:
    try:
        return installed_version(name)
    except PackageNotFoundError:
        return None


def _add(cli: typer.Typer, name: str, subcommand: EntryPoint) -> None:
    found: typer.Typer | Callable[..., Any] = subcommand.load()
    if isinstance(found, typer.Typer):
        cli.add_typer(found, name=name)
    else:
        cli.command(name)(found)


def _list(cli: typer.Typer, name: str, subcommand: EntryPoint) -> None:
    """Add only the name and help text of a subcommand, without its options."""
    found: typer.Typer | Callable[..., Any] = subcommand.load()
    text = found.info.help if isinstance(found, typer.Typer) else found.__doc__
    cli.command(name, help=text)(_nothing)


def _nothing() -> None:
    """Do nothing: a placeholder for a subcommand in the list."""

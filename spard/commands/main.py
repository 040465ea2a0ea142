"""Put the command `spard` together from this library's subcommands and those of other distributions.

A distribution adds a subcommand with an entry point in the group `spard.commands` that names a `typer.Typer` or a
function. Only the subcommand that is run is imported; all of them are when the list of them is asked for.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points
from importlib.metadata import version as installed_version
from typing import Annotated, Any

import typer

from spard.errors import UserError

GROUP = "spard.commands"
_DISTRIBUTIONS = ("spard", "spard-service")
_SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


@dataclass(frozen=True, slots=True)
class Forwarded:
    """A subcommand with a parser of its own: `module.main(arguments)` returns the exit status.

    `extra` is the extra of this distribution that brings what the module imports.
    """

    module: str
    extra: str
    help: str


_OWN: dict[str, Forwarded | EntryPoint] = {
    "verify": EntryPoint("verify", "spard.commands.verify:verify", GROUP),
    "export": EntryPoint("export", "spard.commands.export:export", GROUP),
    "run": Forwarded("spard.__main__", "train", "Fine-tune and audit one recipe in this process."),
    "audit": Forwarded("spard.commands.audit", "audit", "Measure any model's safety and utility."),
    "judge": Forwarded("spard.commands.judge", "audit", "Measure a judge on replies whose harm is known."),
    "check-pool": Forwarded("spard.commands.check_pool", "train", "Find rows of a safety pool that answer with harm."),
    "check-model": Forwarded("spard.commands.check_model", "train", "Try a base model before it is offered."),
    "bench": Forwarded("spard.research.bench.__main__", "bench", "Make the paper's tables and figures."),
    "convert": Forwarded("spard.research.datasets.__main__", "train", "Turn a data set's own files into ours."),
    "lab": Forwarded(
        "spard.research.lab.__main__",
        "train",
        "Make the labs: aligned models with their data.",
    ),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a subcommand; an error that is meant for the user is one line and exit status 1."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        _command_line(given)(given, prog_name="spard")
    except UserError as error:
        typer.secho(f"spard: {error}", fg="red", err=True)
        sys.exit(1)


def _command_line(given: Sequence[str]) -> typer.Typer:
    """Build the command with the subcommand that is asked for, or with all of them if it is unknown."""
    known: dict[str, Forwarded | EntryPoint] = {each.name: each for each in entry_points(group=GROUP)}
    known |= _OWN
    asked = next((each for each in given if not each.startswith("-")), None)
    cli = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
    cli.callback(help="Fine-tune language models without losing their safety.")(_root)
    for name in [asked] if asked in known else known:
        _add(cli, name, known[name])
    return cli


def _print_versions(is_asked: bool) -> None:
    if is_asked:
        for name in _DISTRIBUTIONS:
            if found := _version(name):
                typer.echo(f"{name} {found}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_versions, help="Print what is installed.")
    ] = False,
) -> None:
    """Hold the options of the command itself."""


def _version(name: str) -> str | None:
    try:
        return installed_version(name)
    except PackageNotFoundError:
        return None


def _add(cli: typer.Typer, name: str, subcommand: Forwarded | EntryPoint) -> None:
    if isinstance(subcommand, Forwarded):
        cli.command(name, help=subcommand.help, context_settings=_SETTINGS)(_forwarding(name, subcommand))
        return
    found: typer.Typer | Callable[..., Any] = subcommand.load()
    if isinstance(found, typer.Typer):
        cli.add_typer(found, name=name)
    else:
        cli.command(name)(found)


def _forwarding(name: str, target: Forwarded) -> Callable[[typer.Context], None]:
    """Return a function that leaves all arguments, `--help` included, to the parser of a module."""

    def run(context: typer.Context) -> None:
        try:
            module = importlib.import_module(target.module)
        except ModuleNotFoundError as error:
            missing = f"{error.name} is not installed: pip install 'spard[{target.extra}]'"
            raise UserError(f"`spard {name}` cannot start: {missing}") from None
        raise typer.Exit(module.main(context.args))

    return run

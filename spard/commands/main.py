"""Put the command `spard` together from this library's subcommands and those of other distributions.

A distribution adds a subcommand with an entry point in the group `spard.commands` that names a `typer.Typer` or a
function. Only the subcommand that is run is imported; all of them are when the list of them is asked for.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points
from importlib.metadata import version as installed_version
from typing import Annotated, Any

import typer

from spard.commands import exits
from spard.errors import UserError

GROUP = "spard.commands"
_DISTRIBUTIONS = ("spard", "spard-service")
_SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
_HELP = """Fine-tune language models without losing their safety.

Exit codes: 0 all is well, 1 an error, 2 the answer is no (a safety gate, a judge, a pool or a signature did not pass),
3 the command was not understood.
"""
_COMPLETING = "_SPARD_COMPLETE"
_TYPED = ("COMP_WORDS", "_TYPER_COMPLETE_ARGS")  # where shells say what was typed so far


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
    """Run a subcommand and exit; an error that is meant for the user is one line and exit code 1."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        ended = command_line(given)(given, prog_name="spard", standalone_mode=False)
    except UserError as error:
        typer.secho(f"spard: {error}", fg="red", err=True)
        sys.exit(exits.ERROR)
    except typer.Abort:
        sys.exit(exits.ERROR)
    except typer.TyperException as error:
        sys.exit(_told(error))
    sys.exit(ended if isinstance(ended, int) else exits.OK)


def command_line(given: Sequence[str] = ()) -> typer.Typer:
    """Build the command with the subcommand that is asked for, or with all of them if it is unknown."""
    known: dict[str, Forwarded | EntryPoint] = {each.name: each for each in entry_points(group=GROUP)}
    known |= _OWN
    words = _typed() if _COMPLETING in os.environ else given
    asked = next((each for each in words if not each.startswith("-")), None)
    cli = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)
    cli.callback(help=_HELP)(_root)
    for name in [asked] if asked in known else known:
        _add(cli, name, known[name])
    return cli


def _typed() -> Sequence[str]:
    """Return the words that are to be completed, without the command itself."""
    return next((os.environ[name].split()[1:] for name in _TYPED if name in os.environ), [])


def _told(error: typer.TyperException) -> int:
    """Show what was not understood as typer does; return the exit code, which is not typer's 2: that is a gate's."""
    from typer.rich_utils import rich_format_error

    rich_format_error(error)  # type: ignore[arg-type]  # it takes the base class, which is private
    return exits.USAGE if error.exit_code == exits.NOT_PASSED else error.exit_code


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
        try:
            raise typer.Exit(module.main(context.args))
        except SystemExit as ended:  # of argparse: 0 after --help, 2 for what it did not understand
            raise typer.Exit(exits.USAGE if ended.code else exits.OK) from None

    return run

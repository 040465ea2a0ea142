"""Runs commands that load torch: arguments are parsed first, and heavy modules are imported only then."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import typer

from spard.commands import exits
from spard.errors import UserError
from spard.models.imports import light_imports

Asked = SimpleNamespace  # the arguments of a command, by name


def do(command: str, module: str, extra: str, asked: Mapping[str, object], function: str = "execute") -> None:
    """Import a module, call its function with the arguments, and exit with the code that it returns.

    `asked` are the command's arguments by name, and `extra` is the extra of this distribution with the module's
    dependencies. Raises `UserError` for a missing dependency or a file that cannot be read or written.
    """
    try:
        with light_imports():
            work: Callable[[Asked], int] = getattr(importlib.import_module(module), function)
    except ModuleNotFoundError as error:
        missing = f"{error.name} is not installed: pip install 'spard[{extra}]'"
        raise UserError(f"`spard {command}` cannot start: {missing}") from None
    try:
        code = work(Asked(**asked))
    except OSError as error:
        if error.filename is None:
            raise
        raise UserError(f"{error.filename} cannot be read or written: {error.strerror}") from error
    raise typer.Exit(code)


def alone(command: Callable[..., Any] | typer.Typer, name: str, argv: Sequence[str] | None) -> int:
    """Run one command without the other subcommands, as `python -m` does, and return its exit code."""
    if isinstance(command, typer.Typer):
        cli = command
    else:
        cli = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        cli.command()(command)
    return outcome(cli, argv, name)


def outcome(cli: typer.Typer, argv: Sequence[str] | None, name: str) -> int:
    """Run a command line and return its exit code; a `UserError` is printed as one line."""
    try:
        ended = cli(None if argv is None else list(argv), prog_name=name, standalone_mode=False)
    except UserError as error:
        typer.secho(f"spard: {error}", fg="red", err=True)
        return exits.ERROR
    except typer.Abort:
        return exits.ERROR
    except typer.TyperException as error:
        return _show_usage_error(error)
    return ended if isinstance(ended, int) else exits.OK


def _show_usage_error(error: typer.TyperException) -> int:
    """Print a usage error as typer does; return the exit code, which differs from typer's 2 (a gate's code here)."""
    from typer.rich_utils import rich_format_error

    rich_format_error(error)  # type: ignore[arg-type]  # it takes the base class, which is private
    return exits.USAGE if error.exit_code == exits.NOT_PASSED else error.exit_code


def parse_list(text: str, of: Callable[[str], Any], option: str) -> tuple[Any, ...]:
    """Parse a comma-separated option; raise `typer.BadParameter` for an invalid element."""
    try:
        return tuple(of(each) for each in text.split(",") if each)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no list of that kind", param_hint=option) from None


def hide_progress_bars() -> None:
    """Disable the progress bars of transformers and of the hub's client."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers leaves it untyped


def hide_notes() -> None:
    """Let transformers print only errors, no warnings and no progress bars."""
    from transformers.utils.logging import set_verbosity_error

    hide_progress_bars()
    set_verbosity_error()  # type: ignore[no-untyped-call]

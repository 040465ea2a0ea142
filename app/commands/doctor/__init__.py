"""`spard doctor`: check the connection, the machine and the deployment, and print each problem with its cure."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

import typer

from app.commands.data_folder import Data
from app.commands.terminal import Json, say, show_json
from spard.commands.exits import ERROR


class Side(StrEnum):
    """What is checked: a customer's connection to a service, or the service on this machine."""

    client = "client"
    service = "service"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check; `cure` says how to solve a `problem`, and is empty otherwise."""

    name: str
    state: Literal["ok", "problem", "note"]
    text: str
    cure: str = ""


def ok(name: str, text: str) -> Finding:
    """Return a finding without a problem."""
    return Finding(name, "ok", text)


def note(name: str, text: str) -> Finding:
    """Return a finding that is worth knowing but needs no action."""
    return Finding(name, "note", text)


def problem(name: str, text: str, cure: str) -> Finding:
    """Return a finding with a problem, in one line, and its cure."""
    return Finding(name, "problem", " ".join(text.split()), cure)


def doctor(
    data: Data = None,
    port: Annotated[
        int | None,
        typer.Option(
            help="Port of the service; default: the port of the `spard up` that runs on the folder, else the port in "
            "SPARD_BASE_URL if it names this machine, else 8000.",
            min=1,
            max=65535,
        ),
    ] = None,
    side: Annotated[Side | None, typer.Option("--only", help="Check this side only.")] = None,
    as_json: Json = False,
) -> None:
    """Check the service on this machine and the connection to it; each problem is one line with its cure.

    Checks the client's side if SPARD_BASE_URL or SPARD_API_KEY is set, and the service's side if there is one here; if
    neither, both. Changes nothing, except a probe that it writes to the storage and deletes. Exits 1 on a problem.
    """
    found = []
    for finding in _checks(side, port):
        found.append(finding)
        if not as_json:
            say(_line(finding))
    problems = sum(each.state == "problem" for each in found)
    if as_json:
        show_json({"problems": problems, "findings": [asdict(each) for each in found]})
    else:
        say(f"{problems} problems" if problems != 1 else "1 problem")
    if problems:
        raise typer.Exit(ERROR)


def _checks(side: Side | None, port: int | None) -> Iterator[Finding]:
    is_client = any(os.environ.get(name) for name in ("SPARD_BASE_URL", "SPARD_API_KEY"))
    is_service = bool(os.environ.get("SPARD_DATABASE_URL")) or Path(os.environ.get("SPARD_DATA_DIR", "data")).is_dir()
    is_nothing = not (is_client or is_service)
    if side is Side.client or (side is None and (is_client or is_nothing)):
        from app.commands.doctor import client

        yield from client.checks()
    if side is Side.service or (side is None and (is_service or is_nothing)):
        yield from _service(port)


def _service(port: int | None) -> Iterator[Finding]:
    from app.commands.doctor import deployment, machine
    from app.errors import Unfit
    from app.settings import misspelled_variables, read_settings

    try:
        settings = read_settings()
    except Unfit as error:
        yield problem("settings", error.message, "correct the variable; docs/settings.md lists all")
        return
    for name, like in misspelled_variables(settings).items():
        yield problem("settings", f"{name} is no setting and is ignored.", f"if you mean {like}, set that")
    yield from machine.machine_checks(settings, port)
    yield from machine.store_checks(settings)
    yield from deployment.checks(settings)


def _line(finding: Finding) -> str:
    cure = f" Cure: {finding.cure}." if finding.cure else ""
    return f"{finding.state:8} {finding.name}: {finding.text}{cure}"

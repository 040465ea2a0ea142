"""What the matrix found: lines for a terminal, figures kept of each client's latest run, and the page of the docs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.clients.matrix import CLIENTS, CONSUMERS, Client
from tests.clients.running import Outcome
from tests.environments import ROOT

FIGURES = ROOT / "out" / "clients" / "figures"
_BEGIN, _END = "<!-- written by `make clients` -->", "<!-- end of what is written -->"


@dataclass(frozen=True)
class Figures:
    """The latest run of one client, as it is kept and as the page tells it."""

    packages: list[str]
    checks: int
    passed: int
    argued: list[str]
    failed: list[str]
    not_run: str | None
    with_training: bool
    with_inference: bool


def line(outcome: Outcome) -> str:
    """One line, and more for what failed."""
    client = outcome.client
    if outcome.not_run:
        return f"{client.key}: not run: {outcome.not_run}"
    total = f"{len(outcome.passed_checks)} of {len(outcome.checks)}, {len(outcome.deviating)} argued"
    return "\n".join(
        [f"{client.key}: {total}", *(f"  {check}: {_gist(error)}" for check, error in outcome.faults.items())]
    )


def keep(folder: Path, outcome: Outcome, *, with_training: bool, with_inference: bool) -> None:
    """Keep the figures of this run in place of those of the client's run before."""
    figures = Figures(
        packages=list(outcome.client.packages),
        checks=len(outcome.checks),
        passed=len(outcome.passed_checks),
        argued=outcome.deviating,
        failed=list(outcome.faults),
        not_run=outcome.not_run,
        with_training=with_training,
        with_inference=with_inference,
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{outcome.client.key}.json").write_text(json.dumps(asdict(figures), indent=2) + "\n")


def latest_figures(folder: Path, client: Client) -> Figures | None:
    """The figures of a client's latest run, unless it was with other packages than the matrix names now."""
    path = folder / f"{client.key}.json"
    found = Figures(**json.loads(path.read_text())) if path.exists() else None
    return found if found and found.packages == list(client.packages) else None


def write(page: Path, folder: Path) -> None:
    """Put the tables between the marks of the page."""
    before, _, rest = page.read_text().partition(_BEGIN)
    tables = "\n".join(_tables(folder))
    page.write_text(f"{before}{_BEGIN}\n\n{tables}\n\n{_END}{rest.partition(_END)[2]}")


def _tables(folder: Path) -> Iterator[str]:
    for head, clients in (("client", CLIENTS), ("reader of archives", CONSUMERS)):
        yield f"| {head} | packages | checks passed | outcome |\n|---|---|---|---|"
        yield from (_row(client, latest_figures(folder, client)) for client in clients)
        yield ""
    yield "Each deviation has a reason:\n\n| client | check | why |\n|---|---|---|"
    argued = dict.fromkeys(
        (client.name, check, each.why) for client in CLIENTS for check, each in client.deviations.items()
    )
    yield from (f"| {name} | {check} | {why} |" for name, check, why in argued)


def _row(client: Client, found: Figures | None) -> str:
    packages = ", ".join(f"`{each}`" for each in client.packages)
    if found is None or found.not_run:
        return f"| {client.name} | {packages} | | not run{f': {found.not_run}' if found else ''} |"
    parts = [
        f"failed: {', '.join(found.failed)}" if found.failed else "",
        f"{len(found.argued)} argued" if found.argued else "",
        "" if found.with_training else "without training",
        "with inference" if found.with_inference else "",
    ]
    return (
        f"| {client.name} | {packages} | {found.passed} of {found.checks} | {', '.join(filter(None, parts)) or 'all'} |"
    )


def _gist(error: str) -> str:
    """What a traceback ends with, or what Node begins with."""
    lines = error.strip().splitlines()
    return lines[-1] if lines[0].startswith("Traceback") else "\n    ".join(lines[:12])

"""`spard audit-log`: list entries over the API; verify the hash chain in the database of the settings."""

from __future__ import annotations

from typing import Annotated

import typer

from app.commands.client import connect
from app.commands.data_folder import Data
from app.commands.terminal import CommandFailed, Json, say, show_json, show_rows

audit_log = typer.Typer(no_args_is_help=True, help="Read and verify the audit log.")


@audit_log.command("list")
def list_entries(
    action: Annotated[str | None, typer.Option(help="Only entries of this action, such as waiver.approved.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="List only the latest N entries.")] = 100,
    as_json: Json = False,
) -> None:
    """List the entries of the audit log, newest first; needs an admin's key."""
    with connect() as client:
        found = list(client.pages("admin/audit_log", limit, action=action))
    show_rows(found, ("seq", "created_at", "actor", "action", "target", "result"), as_json)


@audit_log.command()
def verify(
    known: Annotated[
        str | None, typer.Option(help="SEQ:HASH of an entry noted earlier; detects entries removed from the end.")
    ] = None,
    data: Data = None,
    as_json: Json = False,
) -> None:
    """Recompute the hash chain of the audit log; on a mismatch, name the first bad row and exit with 1."""
    from app import audit_log as chain
    from app import db
    from app.ops import preflight
    from app.settings import read_settings

    settings = read_settings()
    preflight.check_database(settings)
    engine = db.make_engine(settings.database())
    try:
        with db.read(engine) as session:
            found = chain.verify(session)
            if known:
                _compare(known, chain.entry_hash(session, _seq(known)))
    finally:
        engine.dispose()
    if isinstance(found, chain.Broken):
        raise CommandFailed(f"The audit log is broken at row {found.seq}: {found.why}.")
    if as_json:
        return show_json({"rows": found.rows, "head": found.head})
    return say(
        f"{found.rows} rows verified, each with its predecessor's hash; note the head: {found.rows}:{found.head}"
    )


def _seq(known: str) -> int:
    number = known.partition(":")[0]
    if not number.isdecimal():
        raise typer.BadParameter("--known is SEQ:HASH, as an earlier run printed it.")
    return int(number)


def _compare(known: str, found: str | None) -> None:
    if found != known.partition(":")[2]:
        why = "it is gone" if found is None else "its hash differs"
        raise CommandFailed(f"The audit log does not contain the noted entry: row {_seq(known)}: {why}.")

"""`spard keys`: manage API keys and the key that adapters are signed with."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from app.commands.client import connect, get
from app.commands.data_folder import Data
from app.commands.terminal import CommandFailed, Json, show_json, show_record, show_rows

keys = typer.Typer(no_args_is_help=True, help="Manage API keys and signing keys.")

KeyId = Annotated[str, typer.Argument(help="The key's id, see `spard keys list`.")]


@keys.command("signing")
def show_signing_key(
    as_set: Annotated[
        bool, typer.Option("--set", help="Print the signed set of all signing keys, including revoked ones.")
    ] = False,
    data: Data = None,
    as_json: Json = False,
) -> None:
    """Print the public key that verifies adapters, on the service's machine; elsewhere use GET /v1/signing_keys.

    Needs the service's settings (SPARD_DATA_DIR or SPARD_SIGNING_KEY) and no API key; never creates a signing key.
    """
    from app.settings import read_settings
    from app.signing import NoSigningKey, public_keys, published_keys, signing_key
    from spard.release.keys import public_pem

    settings = read_settings()
    try:
        known = public_keys(settings)
    except NoSigningKey as error:
        where = "Run this where the service is, with its SPARD_DATA_DIR or SPARD_SIGNING_KEY; elsewhere"
        raise CommandFailed(f"{error.message} {where} take GET /v1/signing_keys.") from None
    text = published_keys(settings) if as_set else public_pem(signing_key(settings))
    if as_json:
        return show_json({"key_id": known.current, "set" if as_set else "public_key": text})
    typer.echo(text, nl=False)
    return typer.echo(known.current, err=True)


@keys.command("rotate-signing")
def rotate_signing_key(data: Data = None, as_json: Json = False) -> None:
    """Create a new signing key; signatures of the old one stay valid. Restart API and workers afterward."""
    from app.settings import read_settings
    from app.signing import rotate

    key_id = rotate(read_settings()).current
    if as_json:
        return show_json({"key_id": key_id})
    return typer.echo(key_id)


@keys.command("revoke-signing")
def revoke_signing_key(
    key_id: Annotated[str, typer.Argument(help="The id of an older key: ed25519:...")],
    reason: Annotated[str, typer.Option(help="The reason; it is published in the key set.")],
    as_json: Annotated[bool, typer.Option("--json", help="No effect: the output is always JSON.")] = False,
    data: Data = None,
) -> None:
    """Revoke a signing key: all its signatures become invalid. Publish the printed key set afterward."""
    from app.settings import read_settings
    from app.signing import published_keys, revoke

    settings = read_settings()
    revoke(settings, key_id, reason)
    typer.echo(published_keys(settings), nl=False)


@keys.command("first")
def make_first_key(
    force: Annotated[bool, typer.Option("--force", help="Create it even if a valid admin key exists.")] = False,
    data: Data = None,
    as_json: Json = False,
) -> None:
    """Create the first admin key directly in the service's database; its secret is shown only once.

    Needs the service's settings (SPARD_DATABASE_URL or SPARD_DATA_DIR) and no API key. Prints the secret only.
    """
    from app import db
    from app import keys as api_keys
    from app.ops import preflight
    from app.settings import read_settings

    settings = read_settings()
    preflight.check_database(settings)
    engine = db.make_engine(settings.database())
    try:
        with db.transaction(engine) as session:
            secret = api_keys.make_first(session, force=force)
    finally:
        engine.dispose()
    if as_json:
        return show_json({"secret": secret})
    return typer.echo(secret)


@keys.command("create")
def create_key(
    project: Annotated[str, typer.Argument(help="The project's id.")],
    name: Annotated[str, typer.Argument(help="A name that says what the key is for.")],
    owner: Annotated[str | None, typer.Option(help="The person who holds the key: a name or an email address.")] = None,
    admin: Annotated[bool, typer.Option(help="Give the key the admin scope.")] = False,
    read_only: Annotated[
        bool, typer.Option("--read-only", help="Let the key read its project but change nothing.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Create an API key; its secret is shown only once."""
    if admin and read_only:
        raise typer.BadParameter("An admin's key is not read-only; give one of --admin and --read-only.")
    scopes = ["read"] if read_only else ["admin", "customer"] if admin else ["customer"]
    ask = {"project_id": project, "name": name, "owner": owner, "scopes": scopes}
    with connect() as client:
        made = client.post("admin/keys", ask)
    _show(made, as_json)


@keys.command("list")
def list_keys(
    project: Annotated[str | None, typer.Option(help="Only keys of this project.")] = None, as_json: Json = False
) -> None:
    """List the API keys, including revoked ones, without their secrets."""
    columns = ("id", "project_id", "name", "owner", "scopes", "created_at", "expires_at", "revoked_at")
    show_rows(get("admin/keys", project_id=project)["data"], columns, as_json)


@keys.command("rotate")
def rotate_key(
    key_id: KeyId,
    overlap_s: Annotated[int, typer.Option(min=0, max=2_592_000, help="Seconds for which the old key stays valid.")] = (
        86_400
    ),
    as_json: Json = False,
) -> None:
    """Replace an API key by a new one; its secret is shown only once."""
    with connect() as client:
        made = client.post(f"admin/keys/{key_id}/rotate", overlap_s=overlap_s)
    _show(made, as_json)


@keys.command("revoke")
def revoke_key(key_id: KeyId, as_json: Json = False) -> None:
    """Revoke an API key at once."""
    with connect() as client:
        revoked = client.delete(f"admin/keys/{key_id}")
    show_record(revoked, as_json)


def _show(made: Any, as_json: bool) -> None:
    if as_json:
        return show_json(made)
    return show_record(made["key"] | {"secret": made["secret"]}, as_json)

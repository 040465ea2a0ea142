"""spard verify, spard keys: who signed an adapter, and whether it is what was signed. Nothing here needs a service."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from app import signing
from app.commands.terminal import say
from app.errors import AppError
from app.settings import Settings
from spard import manifest
from spard.errors import NotProved

keys = typer.Typer(no_args_is_help=True, help="Keys to the service, and the one that adapters are signed with.")

REFUSED, UNPROVED = 1, 2
PublicKey = Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="PEM; default: this machine's own.")]


@keys.command("signing")
def show_signing_key() -> None:
    """Print the public key, for those who verify adapters."""
    key = signing.signing_key(Settings())
    typer.echo(signing.public_pem(key), nl=False)
    typer.echo(manifest.key_id(key.public_key()), err=True)


def verify(
    adapter: Annotated[Path, typer.Argument(exists=True, help="An adapter's folder, or its tar.gz.")],
    public_key: PublicKey = None,
    waiver: Annotated[Path | None, typer.Option(exists=True, help="The signed waiver of what failed the gate.")] = None,
) -> None:
    """Check an adapter's signature and every byte of it, offline.

    Exits 0 when all is proved, 1 when something is not as it was signed, 2 when there was no key to check it with.
    """
    public = _public(public_key)
    try:
        proved = manifest.verify(adapter, public)
        waived = _release(proved, waiver, public)
    except NotProved as error:
        typer.echo(f"spard: refused: {error.message}", err=True)
        raise typer.Exit(REFUSED) from None
    _tell(proved)
    if waived:
        say(f"released by a waiver: {waived}")
    if public is None:
        typer.echo("spard: who signed it is not proved; give the provider's key with --public-key.", err=True)
        raise typer.Exit(UNPROVED)
    say("the signature is that of the key given")


def _public(path: Path | None) -> Ed25519PublicKey | None:
    try:
        return signing.read_public(path) if path else signing.own_public(Settings())
    except AppError as error:
        raise typer.BadParameter(error.message) from None


def _release(proved: manifest.Proved, waiver: Path | None, public: Ed25519PublicKey | None) -> str | None:
    """Why an adapter that did not pass was released; `NotProved` when nothing released it."""
    decision = (proved.manifest.get("gate") or {}).get("decision")
    if waiver is None:
        if decision in ("fail", "inconclusive"):
            raise NotProved(f"The safety gate decided {decision}; give the waiver that released it with --waiver.")
        return None
    facts = manifest.verify_waiver(waiver, proved, public)
    if facts["expires_at"] <= time.time():
        raise NotProved("The waiver has expired.")
    names = [facts[each].get("owner") or facts[each]["name"] for each in ("proposed_by", "approved_by")]
    return f"{facts['reason']} (proposed by {names[0]}, approved by {names[1]})"


def _tell(proved: manifest.Proved) -> None:
    found = proved.manifest
    say(f"{proved.files} files, {proved.bytes} bytes: each as signed, none missing, none added")
    for name, value in _facts(found).items():
        if value is not None:
            say(f"{name}: {value}")
    say(f"signed with {proved.key_id}")


def _facts(found: dict[str, Any]) -> dict[str, Any]:
    """What the signed manifest says, in the words of a person who asks where an adapter comes from."""
    gate, data = found.get("gate") or {}, found.get("data_sha256") or {}
    recipe, code = found.get("recipe") or {}, found.get("code") or {}
    return {
        "job": found.get("job_id"),
        "base model": f"{found.get('base_model')} ({found.get('base_digest')})",
        "training data sha256": data.get("training"),
        "safety pool sha256": data.get("pool"),
        "defence": (recipe.get("defense") or {}).get("type"),
        "gate": gate.get("decision"),
        "code": code.get("sources") and f"spard {code.get('spard')}, {code['sources']}",
    }

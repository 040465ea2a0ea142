"""`spard verify`: check an adapter's signature and files. Works offline and needs no service."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from spard.commands.exits import ERROR, NOT_PASSED
from spard.errors import InvalidKey, NotProved

if TYPE_CHECKING:
    from spard.commands.proofs import VerificationResult
    from spard.digests import BaseSource, Manifest

REFUSED, UNPROVED = ERROR, NOT_PASSED
PublicKey = Annotated[
    Path | None,
    typer.Option(
        exists=True, dir_okay=False, help="PEM file with the provider's public key; default: this machine's own key."
    ),
]
KnownKeys = Annotated[
    str | None,
    typer.Option("--key-set", help="The provider's key set, with old and revoked keys: an https address, or a file."),
]
Waiver = Annotated[Path | None, typer.Option(exists=True, help="The signed waiver of an adapter that failed the gate.")]


def verify(
    adapter: Annotated[Path, typer.Argument(exists=True, help="An adapter's folder or tar archive.")],
    public_key: PublicKey = None,
    known: KnownKeys = None,
    keep: Annotated[
        Path | None,
        typer.Option(
            "--keep", dir_okay=False, help="File that stores the newest key set seen; older sets are refused."
        ),
    ] = None,
    waiver: Waiver = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check an adapter's signature and every byte of it; works offline unless the key set is at a URL.

    With a key set, the provider's older keys count like the current one, and revoked keys are refused. With --keep, the
    set is compared with the newest one seen before; an older set, or one that undoes a revocation, is refused.

    Exits 0 if all is proved, 1 if something differs from what was signed, 2 if there was no key to check with, or none
    that can be trusted.
    """
    from spard.commands.proofs import check_adapter  # loads cryptography

    try:
        found = check_adapter(adapter, public_key, known, waiver, keep)
    except NotProved as error:
        typer.echo(f"spard: refused: {error.message}", err=True)
        raise typer.Exit(REFUSED) from None
    except InvalidKey as error:
        typer.echo(f"spard: not checked: {error.message}", err=True)
        raise typer.Exit(UNPROVED) from None
    typer.echo(json.dumps(_as_json(found), indent=2)) if as_json else _tell(found)
    # The files match some signature, but without a trusted key anybody could have made it.
    if found.signer is None:
        typer.echo("spard: who signed it is not proved; give the provider's key with --public-key.", err=True)
        raise typer.Exit(UNPROVED)
    if not as_json:
        typer.echo(f"the signature is that of {found.signer}")


def _tell(checked: VerificationResult) -> None:
    proved, found = checked.proved, checked.proved.manifest
    typer.echo(f"{proved.files} files, {proved.bytes} bytes: each as signed, none missing, none added")
    if proved.passed_over:
        typer.echo(f"not signed, but never loaded: {', '.join(proved.passed_over)}")
    for name, value in _facts(found).items():
        if value is not None:
            typer.echo(f"{name}: {value}")
    typer.echo(f"signed with {proved.key_id}")
    if checked.waived:
        typer.echo(f"released by a waiver: {checked.waived}")


def _as_json(found: VerificationResult) -> dict[str, object]:
    proved = found.proved
    return {
        "files": proved.files,
        "bytes": proved.bytes,
        "not_signed": list(proved.passed_over),
        "signed_with": proved.key_id,
        "signer": found.signer,
        "waiver": found.waived,
        "manifest": proved.manifest,
    }


def _pinned_name(source: BaseSource) -> str | None:
    """Return the name of a hub model with its commit, or of a folder."""
    name = source.get("name")
    return name and "@".join(filter(None, [name, source.get("revision")]))


def _facts(found: Manifest) -> dict[str, str | None]:
    """Return the signed facts about an adapter's origin, under readable names."""
    gate, data, code = (found.get("gate"), found.get("data_sha256") or {}, found.get("code") or {})
    source, defense = found.get("base_source"), (found.get("recipe") or {}).get("defense")
    return {
        "job": found.get("job_id"),
        "base model": f"{found.get('base_model')} ({found.get('base_digest')})",
        "base model's source": _pinned_name(source) if source else None,
        "training data sha256": data.get("training"),
        "safety pool sha256": data.get("pool"),
        "defence": defense.get("type") if defense else None,
        "gate": gate.get("decision") if gate else None,
        "code": code.get("sources") and f"spard {code.get('spard')}, {code['sources']}",
    }

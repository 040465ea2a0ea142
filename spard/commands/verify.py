"""`spard verify`: who signed an adapter, and whether it is what was signed. Works offline and needs no service."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Collection
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from spard.commands.exits import ERROR, NOT_PASSED
from spard.errors import InvalidKey, NotProved, UserError
from spard.release import key_set, manifest, published_keys
from spard.release.key_set import KeySet
from spard.release.keys import OWN_KEY, read_private, read_public
from spard.release.published_keys import Published

REFUSED, UNPROVED = ERROR, NOT_PASSED
PublicKey = Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="PEM; default: this machine's own.")]


@dataclass(frozen=True, slots=True)
class Checked:
    """What was found: the waiver that released it, if one did, and whose signature it is, as far as that is proved."""

    proved: manifest.Proved
    waived: str | None
    signer: str | None


def verify(
    adapter: Annotated[Path, typer.Argument(exists=True, help="An adapter's folder, or a tar of it.")],
    public_key: PublicKey = None,
    known: Annotated[
        str | None,
        typer.Option("--key-set", help="The provider's keys, old and revoked ones too: an https address, or a file."),
    ] = None,
    keep: Annotated[
        Path | None,
        typer.Option("--keep", dir_okay=False, help="Where the newest key set is kept; an older one is refused."),
    ] = None,
    waiver: Annotated[Path | None, typer.Option(exists=True, help="The signed waiver of what failed the gate.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check an adapter's signature and every byte of it, offline unless the key set is at an address.

    With a key set, an older key of the provider counts like the current one, and a revoked one is refused. With --keep
    the set is held against the one of the last time: what is older, or takes a revocation back, is refused.

    Exits 0 when all is proved, 1 when something is not as it was signed, 2 when there was no key to check it with, or
    none that can be trusted.
    """
    try:
        found = checked(adapter, public_key, known, waiver, keep)
    except NotProved as error:
        typer.echo(f"spard: refused: {error.message}", err=True)
        raise typer.Exit(REFUSED) from None
    except InvalidKey as error:
        typer.echo(f"spard: not checked: {error.message}", err=True)
        raise typer.Exit(UNPROVED) from None
    if as_json:
        typer.echo(json.dumps(_as_json(found), indent=2))
    else:
        _tell(found.proved)
        if found.waived:
            typer.echo(f"released by a waiver: {found.waived}")
    if found.signer is None:
        typer.echo("spard: who signed it is not proved; give the provider's key with --public-key.", err=True)
        raise typer.Exit(UNPROVED)
    if not as_json:
        typer.echo(f"the signature is that of {found.signer}")


def checked(
    adapter: Path, public_key: Path | None, known: str | None, waiver: Path | None, keep: Path | None = None
) -> Checked:
    """Check an adapter with the keys that were named, or this machine's own.

    Raise `NotProved` for what is refused, and `InvalidKey` for a key or a set of keys that is none.
    """
    keys = _keys(known, keep, public_key)
    public = _public(public_key) if keys is None or public_key else None
    proved = manifest.verify(adapter, public)
    if keys:
        keys.require(proved.key_id)
    waived = _release(proved, waiver, public, keys.ids() if keys else ())
    signer = "one of the provider's keys" if keys else "the key given" if public else None
    return Checked(proved, waived, signer)


def _keys(place: str | None, keep: Path | None, public_key: Path | None) -> KeySet | None:
    """Return the set that was given, or that of a service on this machine, if no key was named instead."""
    own = _own_path().with_name(key_set.FILE)
    found = place or (str(own) if public_key is None and own.exists() else None)
    if found is None and keep is not None:
        raise typer.BadParameter("--keep needs --key-set.")
    return _kept(published_keys.fetched(found), keep).keys if found else None


def _kept(found: Published, keep: Path | None) -> Published:
    """Hold a set against the one of the last time, and keep it; refuse an older one."""
    if keep is not None:
        try:
            if keep.exists():
                found.require_not_before(published_keys.fetched(str(keep)))
        except NotProved as error:
            typer.echo(f"spard: refused: {error.message}", err=True)
            raise typer.Exit(REFUSED) from None
        _write(keep, found.text)
    if days := found.age_days(datetime.now(UTC)):
        text = f"the key set was issued {days} days ago and does not know what was revoked since; fetch it again"
        typer.echo(f"spard: {text}.", err=True)
    return found


def _write(path: Path, text: str) -> None:
    """Write a file that appears whole or not at all."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        aside.write_text(text)
        os.replace(aside, path)
    except OSError as error:
        raise UserError(f"The key set cannot be kept in {path}: {error.strerror}.") from None


def _public(path: Path | None) -> Ed25519PublicKey | None:
    return read_public(path) if path else _own()


def _own() -> Ed25519PublicKey | None:
    """Return the public half of the key that a service on this machine signs with, if there is one."""
    path = _own_path()
    return read_private(path).public_key() if path.exists() else None


def _own_path() -> Path:
    named = os.environ.get("SPARD_SIGNING_KEY")
    return Path(named) if named else Path(os.environ.get("SPARD_DATA_DIR", "data")) / OWN_KEY


def _release(
    proved: manifest.Proved, waiver: Path | None, public: Ed25519PublicKey | None, known: Collection[str]
) -> str | None:
    """Why an adapter that did not pass was released; `NotProved` when nothing released it."""
    decision = (proved.manifest.get("gate") or {}).get("decision")
    if waiver is None:
        if decision in ("fail", "inconclusive"):
            raise NotProved(f"The safety gate decided {decision}; give the waiver that released it with --waiver.")
        return None
    facts = manifest.verify_waiver(waiver, proved, public, known)
    if facts["expires_at"] <= time.time():
        raise NotProved("The waiver has expired.")
    names = [facts[each].get("owner") or facts[each]["name"] for each in ("proposed_by", "approved_by")]
    return f"{facts['reason']} (proposed by {names[0]}, approved by {names[1]})"


def _tell(proved: manifest.Proved) -> None:
    found = proved.manifest
    typer.echo(f"{proved.files} files, {proved.bytes} bytes: each as signed, none missing, none added")
    if proved.passed_over:
        typer.echo(f"not signed, and nothing that is loaded: {', '.join(proved.passed_over)}")
    for name, value in _facts(found).items():
        if value is not None:
            typer.echo(f"{name}: {value}")
    typer.echo(f"signed with {proved.key_id}")


def _as_json(found: Checked) -> dict[str, Any]:
    proved = found.proved
    counts = {"files": proved.files, "bytes": proved.bytes, "not_signed": list(proved.passed_over)}
    signed = {"signed_with": proved.key_id, "signer": found.signer, "waiver": found.waived}
    return counts | signed | {"manifest": proved.manifest}


def _pinned(source: dict[str, Any]) -> str | None:
    """Return the name of a hub's model with its commit, or of a folder."""
    return source.get("name") and "@".join(filter(None, [source["name"], source.get("revision")]))


def _facts(found: dict[str, Any]) -> dict[str, Any]:
    """Return what the signed manifest says of where an adapter comes from, under readable names."""
    gate, data = found.get("gate") or {}, found.get("data_sha256") or {}
    recipe, code = found.get("recipe") or {}, found.get("code") or {}
    return {
        "job": found.get("job_id"),
        "base model": f"{found.get('base_model')} ({found.get('base_digest')})",
        "base model's source": _pinned(found.get("base_source") or {}),
        "training data sha256": data.get("training"),
        "safety pool sha256": data.get("pool"),
        "defence": (recipe.get("defense") or {}).get("type"),
        "gate": gate.get("decision"),
        "code": code.get("sources") and f"spard {code.get('spard')}, {code['sources']}",
    }

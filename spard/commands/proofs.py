"""Verifies an adapter with keys, a key set and a waiver, for every command that needs proof."""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import typer
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from spard.commands.exits import ERROR
from spard.errors import NotProved, UserError
from spard.release import manifest
from spard.release.keys import KEY_SET_FILE, OWN_KEY, KeySet, PublishedKeys, fetch_keys, read_private, read_public
from spard.replacement import replacement


@dataclass(frozen=True, slots=True)
class VerificationResult:
    """The result of a verification: the waiver's reason, if any, and the proved origin of the signature, or None."""

    proved: manifest.VerifiedManifest
    waived: str | None
    signer: str | None


def check_adapter(
    adapter: Path, public_key: Path | None, known: str | None, waiver: Path | None, keep: Path | None = None
) -> VerificationResult:
    """Verify an adapter with the given key or key set, or else with this machine's own.

    `known` is the file or URL of a key set, and `keep` a file that remembers the newest set seen. Raises `NotProved`
    for an adapter that is rejected, and `InvalidKey` for an invalid key or key set.
    """
    keys = _keys(known, keep, public_key)
    # A key set replaces this machine's own key, but a key given explicitly must match in addition.
    public = _public(public_key) if keys is None or public_key else None
    proved = manifest.verify(adapter, public)
    if keys:
        keys.require(proved.key_id)
    waived = _release(proved, waiver, public, keys.ids() if keys else ())
    return VerificationResult(proved, waived, _signer(public_key, known, public, keys))


def _signer(
    public_key: Path | None, known: str | None, public: Ed25519PublicKey | None, keys: KeySet | None
) -> str | None:
    """Describe whose signature it is, and the source of the key if none was given; None without a key."""
    if keys:
        return (
            "one of the provider's keys"
            if known
            else f"one of this machine's own keys, {_own_path().with_name(KEY_SET_FILE)}"
        )
    if public is None:
        return None
    return "the key given" if public_key else f"this machine's own key, {_own_path()}; no key was given"


def _keys(place: str | None, keep: Path | None, public_key: Path | None) -> KeySet | None:
    """Return the given key set, or the set of a service on this machine if no key was named instead."""
    own = _own_path().with_name(KEY_SET_FILE)
    found = place or (str(own) if public_key is None and own.exists() else None)
    if found is None and keep is not None:
        raise typer.BadParameter("--keep needs --key-set.")
    return _remember_keys(fetch_keys(found), keep).keys if found else None


def _remember_keys(found: PublishedKeys, keep: Path | None) -> PublishedKeys:
    """Compare a key set with the remembered one, reject an older set, and remember this one."""
    if keep is not None:
        try:
            if keep.exists():
                found.require_not_older(fetch_keys(str(keep)))
        except NotProved as error:
            typer.echo(f"spard: refused: {error.message}", err=True)
            raise typer.Exit(ERROR) from None
        _write(keep, found.text)
    if days := found.age_days(datetime.now(UTC)):
        text = f"the key set was issued {days} days ago and does not know what was revoked since; fetch it again"
        typer.echo(f"spard: {text}.", err=True)
    return found


def _write(path: Path, text: str) -> None:
    """Write a file atomically."""
    try:
        with replacement(path) as aside:
            aside.write_text(text)
    except OSError as error:
        raise UserError(f"The key set cannot be kept in {path}: {error.strerror}.") from None


def _public(path: Path | None) -> Ed25519PublicKey | None:
    return read_public(path) if path else _own_public_key()


def _own_public_key() -> Ed25519PublicKey | None:
    """Return the public half of this machine's own signing key, if there is one."""
    path = _own_path()
    return read_private(path).public_key() if path.exists() else None


def _own_path() -> Path:
    named = os.environ.get("SPARD_SIGNING_KEY")
    return Path(named) if named else Path(os.environ.get("SPARD_DATA_DIR", "data")) / OWN_KEY


def _release(
    proved: manifest.VerifiedManifest, waiver: Path | None, public: Ed25519PublicKey | None, known: Collection[str]
) -> str | None:
    """Return why an adapter that did not pass was released, or None; raise `NotProved` if nothing released it."""
    gate = proved.manifest.get("gate")
    decision = gate.get("decision") if gate else None
    if waiver is None:
        if decision in ("fail", "inconclusive"):
            raise NotProved(f"The safety gate decided {decision}; give the waiver that released it with --waiver.")
        return None
    facts = manifest.verify_waiver(waiver, proved, public, known)
    if facts["expires_at"] <= time.time():
        raise NotProved("The waiver has expired.")
    names = [facts[each].get("owner") or facts[each]["name"] for each in ("proposed_by", "approved_by")]
    return f"{facts['reason']} (proposed by {names[0]}, approved by {names[1]})"

"""Resolve a model name to the bytes that may answer under it, by the current state of the database, and fetch them.

A model that is not released to the caller now, for whatever reason, looks like a name that does not exist. The digest
and the signed manifest of an archive are checked when an engine gets it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from sqlalchemy.orm import Session

from app.db.tables import BaseModelEntry
from app.errors import Forbidden, NotFound, Unavailable
from app.jobs.project_models import OwnModel, own_model
from app.keys import Principal, find_ended
from app.policies import service as policies
from app.policies.schemas import Policy
from app.settings import Settings
from app.signing import public_keys
from app.storage import ObjectMissing, Storage
from spard.config import Defense, defenses
from spard.config.quantization import OFFERED
from spard.data.rendering import fixed_arguments
from spard.errors import NotProved
from spard.release.archive import unpack
from spard.release.manifest import verify


@dataclass(frozen=True, slots=True)
class Archive:
    """The stored archive of an adapter or of a fully fine-tuned model."""

    storage_key: str
    sha256: str
    job_id: str
    is_lora: bool


@dataclass(frozen=True, slots=True)
class Server:
    """An unattested server, which cannot prove its weights, and the model's name on it."""

    url: str
    name: str


@dataclass(frozen=True, slots=True)
class ReleasedModel:
    """A model that is released to the caller; `base`, `source` and `revision` identify its base model.

    `template_arguments` are the arguments, as JSON, that the provider has fixed for the base model's chat template:
    now, or when the job was created that made the model.
    """

    name: str
    base: str
    source: str
    revision: str | None
    archive: Archive | None = None  # None: the base model itself
    quantization: str = "none"  # of the base model in memory
    digest: str | None = None  # of the base model's files when it was added; None: not known
    server: Server | None = None  # the unattested server that answers instead of an engine
    template_arguments: str = "{}"

    @property
    def adapter(self) -> str | None:
        """The digest by which engines know the adapter; None for a base model or a fully fine-tuned one."""
        return self.archive.sha256 if self.archive and self.archive.is_lora else None


def find_released(session: Session, caller: Principal, name: str, settings: Settings) -> ReleasedModel:
    """Return the model of this name; raise `NotFound` unless it is released to the caller now."""
    policy = policies.current(session, settings).content
    if name in policy.serving.paused:
        refuse(name)
    base = session.get(BaseModelEntry, name, populate_existing=True)
    if base is not None:
        return replace(_base(base, caller, policy), server=_server(name, policy))
    own = own_model(session, caller.project_id, name)
    if own is None or own.job.model in policy.serving.paused:
        refuse(name)
    found = _find_own_model(session, own, caller)
    return found if _is_prompted(own) else replace(found, server=_server(name, policy))


def check_again(session: Session, caller: Principal, model: ReleasedModel, settings: Settings) -> None:
    """Raise if the caller's key has ended, or if the name no longer resolves to the same released bytes."""
    if error := find_ended(session, [caller]).get(caller):
        raise error
    if find_released(session, caller, model.name, settings) != model:
        refuse(model.name)


def refuse(name: str) -> NoReturn:
    """Raise the `NotFound` error of an unknown model name."""
    raise NotFound(f"The model '{name}' does not exist.", code="model_not_found", param="model")


def _base(entry: BaseModelEntry, caller: Principal, policy: Policy) -> ReleasedModel:
    if policy.models is not None and entry.alias not in policy.models and "admin" not in caller.scopes:
        refuse(entry.alias)
    held = OFFERED if entry.quantization == "always" else "none"
    return ReleasedModel(
        entry.alias,
        entry.alias,
        entry.source,
        entry.revision,
        quantization=held,
        digest=entry.digest,
        template_arguments=_write_arguments(entry.rendering),
    )


def _write_arguments(rendering: Mapping[str, object] | None) -> str:
    """Return the arguments that the provider has fixed in a rendering record, as JSON."""
    return json.dumps(fixed_arguments(rendering), sort_keys=True)


def _is_prompted(own: OwnModel) -> bool:
    """Return True if a model's defense needs a system prompt, which unattested servers do not add."""
    kind = defenses()[own.job.recipe["defense"]["type"]]
    return kind.serving_prompt is not Defense.serving_prompt


def _server(name: str, policy: Policy) -> Server | None:
    """Return the unattested server that the policy names for a model, the last if there are several, or None."""
    named = {each.model: Server(each.base_url, each.served_as) for each in policy.serving.unattested}
    return named.get(name)


def _find_own_model(session: Session, own: OwnModel, caller: Principal) -> ReleasedModel:
    try:
        own.check(session, caller)
    except Forbidden:
        refuse(own.name)
    adapter, job = own.adapter, own.job
    if adapter is None:
        refuse(own.name)
    archive = Archive(adapter["storage_key"], adapter["sha256"], job.id, job.recipe["lora"] is not None)
    base = job.spec.model
    held = str(job.recipe.get("quantization", "none"))
    return ReleasedModel(
        own.name,
        base.alias,
        base.source,
        base.revision,
        archive,
        held,
        base.digest,
        template_arguments=_write_arguments(base.rendering),
    )


class NotServed(Unavailable):
    """The bytes of a released model are not the ones that were signed, so nothing is answered with them."""

    code = "model_not_proved"


def fetch_archive(storage: Storage, settings: Settings, archive: Archive, folder: Path) -> str:
    """Download an archive, verify it, unpack it into `folder`, and return the SHA-256 of its manifest.

    `folder` is replaced if it exists. Raises `NotServed` if digest, signature, job or files do not match the release.
    """
    packed = folder.with_name(f"{folder.name}.tar.gz")
    packed.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    try:
        stored = storage.download_file(archive.storage_key, packed)
        if stored.sha256 != archive.sha256:
            raise NotServed("The stored adapter is not the one that was released.")
        proved = verify(packed)
        public_keys(settings).require(proved.key_id)
        if proved.manifest.get("job_id") not in (None, archive.job_id):
            raise NotServed("The stored adapter is another job's.")
        unpack(packed, folder)
        # Verified again after unpacking: the engine reads the folder, not the archive.
        if verify(folder).manifest_sha256 != proved.manifest_sha256:
            raise NotServed("The unpacked adapter is not the one that was signed.")
    except NotProved as error:
        raise NotServed(f"The stored adapter is not proved: {error}") from None
    except ObjectMissing:
        raise NotServed("The released adapter is not in the storage.") from None
    finally:
        packed.unlink(missing_ok=True)
    return proved.manifest_sha256

"""From a name to the bytes that may answer under it, as the database has it at this moment.

Whatever is not released to the caller now, for whichever reason, reads as a name that does not exist.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NoReturn

from sqlalchemy.orm import Session

from app.db.tables import BaseModelEntry
from app.errors import Forbidden, NotFound
from app.jobs.checkpoint_models import OwnModel, own_model
from app.keys.access import find_ended
from app.keys.service import Principal
from app.policies import service as policies
from app.policies.schemas import Policy
from app.settings import Settings
from spard.config import Defense, defenses
from spard.config.quantization import OFFERED


@dataclass(frozen=True, slots=True)
class Archive:
    """The archive of an adapter, or of a model of which all weights were trained, as its row has it."""

    storage_key: str
    sha256: str
    job_id: str
    is_lora: bool


@dataclass(frozen=True, slots=True)
class Server:
    """A server that cannot prove what it has loaded, and the model's name there."""

    url: str
    name: str


@dataclass(frozen=True, slots=True)
class Released:
    """A model that may answer the caller. `base`, `source` and `revision` are the base model's."""

    name: str
    base: str
    source: str
    revision: str | None
    archive: Archive | None = None  # None: the base model itself
    quantization: str = "none"  # how the base model is held
    digest: str | None = None  # of the base model's files, as they were offered; None: not known
    server: Server | None = None  # that answers in place of an engine which proves what it holds

    @property
    def adapter(self) -> str | None:
        """The digest under which an engine holds the adapter; None where the model is none."""
        return self.archive.sha256 if self.archive and self.archive.is_lora else None


def find_released(session: Session, caller: Principal, name: str, settings: Settings) -> Released:
    """Return the model of this name; `NotFound` unless it is released to the caller at this moment."""
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


def check_again(session: Session, caller: Principal, model: Released, settings: Settings) -> None:
    """Raise unless the same bytes are released to the caller still, who may still call."""
    if error := find_ended(session, [caller]).get(caller):
        raise error
    if find_released(session, caller, model.name, settings) != model:
        refuse(model.name)


def refuse(name: str) -> NoReturn:
    """Raise what an unknown name gets."""
    raise NotFound(f"The model '{name}' does not exist.", code="model_not_found", param="model")


def _base(entry: BaseModelEntry, caller: Principal, policy: Policy) -> Released:
    if policy.models is not None and entry.alias not in policy.models and "admin" not in caller.scopes:
        refuse(entry.alias)
    held = OFFERED if entry.quantization == "always" else "none"
    return Released(entry.alias, entry.alias, entry.source, entry.revision, quantization=held, digest=entry.digest)


def _is_prompted(own: OwnModel) -> bool:
    """Tell whether a model was measured under a system prompt, which other servers do not add."""
    kind = defenses()[own.job.recipe["defense"]["type"]]
    return kind.serving_prompt is not Defense.serving_prompt


def _server(name: str, policy: Policy) -> Server | None:
    """Return the server that the policy names for a model; the last one, if it names several."""
    named = {each.model: Server(each.base_url, each.served_as) for each in policy.serving.unattested}
    return named.get(name)


def _find_own_model(session: Session, own: OwnModel, caller: Principal) -> Released:
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
    return Released(own.name, base.alias, base.source, base.revision, archive, held, base.digest)

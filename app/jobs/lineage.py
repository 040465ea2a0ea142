"""Jobs on top of each other: the adapter of one is where the next starts, and the base model stays what all are held
against, so that small steps do not add up to what no single job could do.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from app.catalog import service as catalog
from app.errors import InvalidRequest, InvalidState
from app.jobs import release
from app.jobs.request import JobCreate
from app.keys.service import Principal
from app.models import TERMINAL, BaseModelEntry, Job
from spard.config import Lora
from spard.recipe import parse

LONGEST = 3  # jobs on top of each other, the first one counted


@dataclass(frozen=True, slots=True)
class Start:
    """The job whose adapter another one goes on from, and the ids of all before it, the first one first."""

    job: Job
    lineage: tuple[str, ...]

    @property
    def lora(self) -> Lora:
        found: Lora = parse(Lora, self.job.recipe["lora"], "lora")
        return found

    def spec(self) -> dict[str, Any]:
        """What the new job's row keeps of it."""
        adapter = self.job.adapter or {}
        named = {"id": self.job.id, "model": self.job.fine_tuned_model, "lineage": list(self.lineage)}
        return named | {name: adapter[name] for name in ("storage_key", "sha256")}


def start(session: Session, caller: Principal, ask: JobCreate) -> Start | None:
    """What a request for one of the caller's own models starts from; None when it asks for another model."""
    job = _held(session, caller.tenant_id, ask.model)
    if job is None or session.get(BaseModelEntry, ask.model) is not None:
        return None
    release.check(caller, job)
    lineage = (*_before(job), job.id)
    if len(lineage) >= LONGEST:
        message = f"{ask.model} is the last of {LONGEST} jobs on top of each other; start from the base model."
        raise InvalidRequest(message, code="lineage_too_long", param="model")
    return Start(job, lineage)


def check(found: Start, ask: JobCreate, model: BaseModelEntry) -> None:
    """An adapter goes on in the shape and on the base model that it has."""
    own = found.job.spec["model"]
    if found.job.recipe["lora"] is None:
        raise _mismatch(f"{ask.model} is no adapter: all of its weights were trained.", "model")
    if (own["source"], own["revision"]) != (model.source, model.revision):
        raise _mismatch(f"{ask.model} was trained on what {model.alias} stood for before.", "model")
    if ask.full_fine_tuning:
        raise _mismatch(f"{ask.model} is an adapter; leave full_fine_tuning out.", "full_fine_tuning")
    if ask.lora is not None and ask.lora != found.lora:
        raise _mismatch(f"The adapter of {ask.model} has {asdict(found.lora)}; leave lora out.", "lora")


def check_unneeded(session: Session, job: Job) -> None:
    """Refuse to take an adapter away from a job that is to start from it."""
    needs = (Job.tenant_id == job.tenant_id) & Job.status.not_in(TERMINAL)
    user = session.scalar(select(Job.id).where(needs, Job.spec["start_from"]["id"].as_string() == job.id).limit(1))
    if user is not None:
        raise InvalidState(f"Job {user} starts from the adapter of {job.id}; cancel it first.")


def _held(session: Session, tenant_id: str, model: str) -> Job | None:
    """The job whose model this is; it is neither deleted nor erased before the new job stands."""
    job = catalog.tuned(session, tenant_id, model)
    if job is None:
        return None
    session.execute(select(Job.id).where(Job.id == job.id).with_for_update(read=True))
    return catalog.tuned(session, tenant_id, model)  # who deleted it may have held it before us


def _before(job: Job) -> list[str]:
    before: list[str] = (job.spec.get("start_from") or {}).get("lineage", [])
    return before


def _mismatch(message: str, param: str) -> InvalidRequest:
    return InvalidRequest(message, code="adapter_mismatch", param=param)

"""What a job would take, before anything is queued. Without the model's tokeniser: tokens are counted from bytes."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import BaseModel
from sqlalchemy import select
from sqlalchemy.orm import Session

from app.jobs.freeze import freeze
from app.jobs.request import JobCreate, Safety
from app.keys.service import Principal
from app.models import Job, JobStatus
from app.settings import Settings
from spard.config import NoDefense, Recipe, resolve

_BYTES_PER_TOKEN = 4  # of English text and its JSON, roughly
_RECENT = 5


class Estimate(BaseModel):
    """`estimated_seconds` is by your own recent jobs on the model, null without any."""

    object: Literal["fine_tuning.job.estimate"] = "fine_tuning.job.estimate"
    approximate: Literal[True] = True
    model: str
    rows: int
    tokens_per_epoch: int
    trained_tokens: int
    hyperparameters: dict[str, float]
    steps: int
    safe_examples: int
    estimated_seconds: int | None
    warnings: list[str]


def estimate(session: Session, caller: Principal, ask: JobCreate, settings: Settings) -> Estimate:
    """Check a request as if it were one for a job, and say what it would come to."""
    frozen = freeze(session, caller, ask, settings)
    rows, pool = frozen.spec["training_file"]["rows"], frozen.spec["pool"]
    numbers = resolve(Recipe(hyperparameters=ask.asked_hyperparameters()), rows, hidden_size=1)  # no rate is shown
    tokens = math.ceil(frozen.spec["training_file"]["bytes"] / _BYTES_PER_TOKEN)
    safety = ask.safety or Safety()
    undefended = pool is None or isinstance(safety.defense, NoDefense)
    trained = tokens * numbers.n_epochs
    return Estimate(
        model=ask.model,
        rows=rows,
        tokens_per_epoch=tokens,
        trained_tokens=trained,
        hyperparameters={
            name: getattr(numbers, name) for name in ("n_epochs", "batch_size", "learning_rate_multiplier")
        },
        steps=numbers.n_epochs * math.ceil(rows / numbers.batch_size),
        safe_examples=0 if undefended else safety.selection.size(rows, pool["rows"]),
        estimated_seconds=_seconds(session, caller.tenant_id, frozen.spec["model"]["alias"], trained),
        warnings=frozen.warnings,
    )


def _seconds(session: Session, tenant_id: str, model: str, tokens: int) -> int | None:
    """By what the tenant's latest jobs on the model took for each trained token, audits and all."""
    same = (Job.tenant_id == tenant_id) & (Job.model == model) & (Job.status == JobStatus.succeeded)
    latest = session.scalars(select(Job).where(same).order_by(Job.finished_at.desc()).limit(_RECENT)).all()
    known = [
        (job.finished_at - job.started_at, job.trained_tokens) for job in latest if job.finished_at and job.started_at
    ]
    trained = sum(count or 0 for _, count in known)
    return round(tokens * sum(took.total_seconds() for took, _ in known) / trained) if trained else None

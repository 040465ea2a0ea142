"""Estimate how long each stage takes per unit of work, from recent jobs on a base model or from the model's trial."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from sqlalchemy import select
from sqlalchemy.orm import Session

from app.db.tables import BaseModelEntry, Job, JobStatus
from app.db.tables.catalog import ModelRates

_RECENT = 12  # jobs
_START_S = 8.0  # imports, downloads and final writes, until a job has measured them
_PROOF_S = 8.0  # a clean process, its imports, and the adapter loaded once more
_DEFENSE_COSTS = 2.5  # times the cost of training without a defense
_FORWARD = 1 / 3  # of a forward and backward pass


@dataclass(frozen=True, slots=True)
class Past:
    """Recent jobs on a base model, newest first and whatever their outcome, and the model's trial if it had one."""

    jobs: Sequence[Job]
    trial: ModelRates | None

    @property
    def is_known(self) -> bool:
        """True if any speed of the model is known."""
        return bool(self.jobs or self.trial)

    def per_unit(self, stage: str, wanted: Callable[[Job], bool] = lambda job: True) -> float | None:
        """Return a stage's median seconds per unit; None if no job has finished the stage.

        Jobs for which `wanted` is true are preferred; if there are none, all jobs count.
        """
        rates = [(wanted(job), rate) for job in self.jobs if (rate := _rate(job, stage)) is not None]
        chosen = [rate for is_wanted, rate in rates if is_wanted] or [rate for _, rate in rates]
        return median(chosen) if chosen else None

    def reply_s(self, stage: str) -> float:
        """Return a stage's seconds per reply: measured in that stage, else in another one, else in the trial."""
        for each in (stage, "audit", "checkpoint", "base_audit"):
            if (rate := self.per_unit(each)) is not None:
                return rate
        return self.trial["reply_tokens"] / self.trial["generated_per_s"] if self.trial else 0.0

    def token_s(self, defense: str) -> float:
        """Return the seconds per trained token under a defense."""
        rate = self.per_unit("train", lambda job: job.recipe["defense"]["type"] == defense)
        if rate is None:
            rate = (1.0 if defense == "none" else _DEFENSE_COSTS) * self._trained_token_s
        return rate

    def row_s(self, stage: str, tokens: float) -> float:
        """Return the seconds per row of `tokens` tokens in a stage before training."""
        rate = self.per_unit(stage)
        return tokens * _FORWARD * self._trained_token_s if rate is None else rate

    def start_s(self) -> float:
        """Return the seconds of a job that lie outside all stages."""
        found = list(self._outside())
        return median(found) if found else _START_S + self._load_s

    def package_s(self) -> float:
        """Return the seconds of proving and packing an adapter."""
        rate = self.per_unit("package")
        return _PROOF_S + self._load_s if rate is None else rate

    @property
    def _trained_token_s(self) -> float:
        return 1 / self.trial["trained_per_s"] if self.trial else 0.0

    @property
    def _load_s(self) -> float:
        return self.trial["load_s"] if self.trial else 0.0

    def _outside(self) -> Iterator[float]:
        for job in self.jobs:
            # Retries and early ends contain waits and repeated work, which say nothing about the start.
            if job.status == JobStatus.succeeded and job.attempt == 1 and job.started_at and job.finished_at:
                inside = sum(each["seconds"] for each in (job.stage_costs or {}).values())
                yield max(0.0, (job.finished_at - job.started_at).total_seconds() - inside)


def past(session: Session, entry: BaseModelEntry) -> Past:
    """Return the recent jobs and the trial of a base model."""
    of_model = (Job.model == entry.alias) & Job.stage_costs.is_not(None)
    latest = select(Job).where(of_model).order_by(Job.created_at.desc(), Job.id).limit(_RECENT)
    return Past([job for job in session.scalars(latest) if job.stage_costs], entry.rates)


def units(job: Job, stage: str) -> int:
    """Return a job's units of work in a stage; 0 if it has not finished the stage."""
    cost = (job.stage_costs or {}).get(stage)
    return cost["units"] if cost else 0


def _rate(job: Job, stage: str) -> float | None:
    cost = (job.stage_costs or {}).get(stage)
    return cost["seconds"] / cost["units"] if cost and cost["units"] else None

"""What a dry run of a policy tells of past jobs."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

from app.http.schemas import UnixTime

Decision = Literal["pass", "fail", "inconclusive", "waived"]
Outcome = Literal["same", "otherwise", "ends_early", "not_known", "not_measured"]


class Refused(BaseModel):
    """Why a request would be refused, in the words of the error."""

    code: str | None
    message: str
    param: str | None


class TriedJob(BaseModel):
    """One past job. `changes` are what of an accepted request would be other; `reasons` are those of the outcome.

    `outcome` is `ends_early` where the job's rows would end it before it trains. It is `not_known` where the stored
    report does not tell what would be: the job would train on other rows, it was decided by another rule, or nobody had
    looked at what the policy asks for.
    """

    object: Literal["policy.dry_run.job"] = "policy.dry_run.job"
    id: str
    project_id: str
    created_at: UnixTime
    status: str
    model: str
    defense: str
    refused: Refused | None
    changes: list[str]
    outcome: Outcome
    decision: Decision | None
    new_decision: Decision | None
    reasons: list[str]

    @property
    def is_touched(self) -> bool:
        """Whether the policy makes any difference, or might."""
        return (
            self.refused is not None or bool(self.changes) or self.outcome in ("otherwise", "ends_early", "not_known")
        )


class PolicyTrial(BaseModel):
    """A dry run: how many of the latest jobs a policy would refuse, change or decide otherwise, and each of them."""

    object: Literal["policy.dry_run"] = "policy.dry_run"
    jobs: int
    refused: int
    changed: int
    decided_otherwise: int
    ended_early: int
    not_known: int
    data: list[TriedJob]

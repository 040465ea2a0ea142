"""Response schemas of a policy's dry run."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

from app.http.schemas import UnixTime

Decision = Literal["pass", "fail", "inconclusive", "waived"]
Outcome = Literal["same", "otherwise", "ends_early", "not_known", "not_measured"]


class Refused(BaseModel):
    """The error with which a request is refused."""

    code: str | None
    message: str
    param: str | None


class TriedJob(BaseModel):
    """One past job. `changes` lists the differences for an accepted request, `reasons` those of the outcome.

    `outcome` is `ends_early` if the job's rows end it before it trains. It is `not_known` if the stored report does not
    determine the result: the job trains on other rows, was decided by another rule, or the report lacks what the policy
    asks for.
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
        """True if the policy makes a difference, or may make one."""
        return (
            self.refused is not None or bool(self.changes) or self.outcome in ("otherwise", "ends_early", "not_known")
        )


class PolicyTrial(BaseModel):
    """A dry run: how many of the latest jobs a policy refuses, changes or decides differently, and each of them."""

    object: Literal["policy.dry_run"] = "policy.dry_run"
    jobs: int
    refused: int
    changed: int
    decided_otherwise: int
    ended_early: int
    not_known: int
    data: list[TriedJob]

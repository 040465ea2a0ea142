"""Estimate the time of each stage of a job that is not created yet."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import Literal, cast

from pydantic import BaseModel

from app.db.tables import Job
from app.db.tables.checkpoints import KEPT
from app.db.tables.job_spec import JobSpec
from app.jobs.snapshot import Frozen
from app.jobs.stage_rates import Past, units
from spard.config import Recipe
from spard.config.deprecated import from_stored
from spard.config.run_spec import parse
from spard.data.held_out_rows import ASKED, planned_rows
from spard.evaluation.expected_replies import ReplyPlan, SuiteSize, expected_replies
from spard.evaluation.results import SuiteKind

StageName = Literal[
    "start", "rows", "row_signal", "embed", "base_audit", "train", "compare", "checkpoints", "task", "audit", "package"
]


class EstimatedStage(BaseModel):
    """One stage of a job: its expected seconds, for a number of `units` of the kind `unit`."""

    stage: StageName
    seconds: float
    units: int
    unit: Literal["job", "rows", "tokens", "replies"]


@dataclass(frozen=True, slots=True)
class Work:
    """The amount of work: rows, tokens of all epochs, and epochs."""

    rows: int
    tokens: int
    epochs: int


def stages(past: Past, frozen: Frozen, work: Work) -> list[EstimatedStage]:
    """Return the stages in their order; empty if no speed of the base model is known."""
    return list(_stages(past, frozen, work)) if past.is_known else []


def _stages(past: Past, frozen: Frozen, work: Work) -> Iterator[EstimatedStage]:
    spec, recipe = frozen.spec, frozen.recipe
    row_tokens = work.tokens / max(1, work.rows * work.epochs)

    def rows(stage: StageName, count: int) -> EstimatedStage:
        return EstimatedStage(
            stage=stage, seconds=round(count * past.row_s(stage, row_tokens), 1), units=count, unit="rows"
        )

    def replies(stage: StageName, told_as: str, count: int) -> EstimatedStage:
        seconds = round(count * past.reply_s(told_as), 1)
        return EstimatedStage(stage=stage, seconds=seconds, units=count, unit="replies")

    yield EstimatedStage(stage="start", seconds=round(past.start_s(), 1), units=1, unit="job")
    yield rows("rows", work.rows)
    if spec.pool and spec.row_signal.action != "off":
        yield rows("row_signal", work.rows)
    if spec.pool and recipe.uses_pool:
        yield rows("embed", work.rows + (0 if _has_pool(past, spec) else spec.pool.rows))
    plan = _plan(spec, recipe)
    yield replies("base_audit", "base_audit", _base_replies(past, spec, plan))
    token_s = past.token_s(recipe.defense.type)
    yield EstimatedStage(stage="train", seconds=round(work.tokens * token_s, 1), units=work.tokens, unit="tokens")
    if plan.compared:
        yield replies("compare", "checkpoint", work.epochs * plan.compared)
    ends = min(work.epochs - 1, KEPT - 1) if recipe.lora and spec.checkpoint_prompts else 0
    if ends:
        yield replies("checkpoints", "checkpoint", ends * _replies(past, spec, "checkpoint", plan.checkpoint))
    if asked := _task_requests(spec):
        yield replies("task", "task", 2 * asked)
    times = 3 if spec.further_tuning.steps else 1  # a further tuning audits both models once more
    yield replies("audit", "audit", times * _replies(past, spec, "audit", plan.last))
    yield EstimatedStage(stage="package", seconds=round(past.package_s(), 1), units=1, unit="job")


def _plan(spec: JobSpec, recipe: Recipe) -> ReplyPlan:
    return expected_replies(
        [SuiteSize(cast(SuiteKind, suite.kind), suite.rows) for suite in spec.suites],
        recipe.audit,
        checkpoint_prompts=spec.checkpoint_prompts or 0,
        shared_prompts=recipe.ending.prompts if recipe.ending.compares else 0,
        gates_utility=spec.policy.thresholds().max_utility_drop is not None,
    )


def trained_rows(spec: JobSpec) -> int:
    """Return how many rows of its file a job trains on, where none has a near duplicate."""
    rows = spec.training_file.rows
    return rows if spec.validation_file else rows - planned_rows(rows, spec.held_out_rows)


def _task_requests(spec: JobSpec) -> int:
    """Return how many requests of the customer's rows are asked of each model."""
    if not spec.held_out_rows:
        return 0
    if spec.validation_file:
        return min(ASKED, spec.validation_file.rows)
    return min(ASKED, spec.training_file.rows - trained_rows(spec))


def _has_pool(past: Past, spec: JobSpec) -> bool:
    """Return True if an earlier job has embedded the pool."""
    sha256 = spec.pool.sha256 if spec.pool else None
    return any(job.spec.pool and job.spec.pool.sha256 == sha256 and units(job, "embed") for job in past.jobs)


def _base_replies(past: Past, spec: JobSpec, plan: ReplyPlan) -> int:
    """Return the expected number of replies of the base model that no earlier job has stored."""
    done = [job for job in past.jobs if "base_audit" in (job.stage_costs or {})]
    suites = {suite.sha256 for suite in spec.suites}
    # Replies of the base model are stored and shared by jobs; only the prompts mined from a new file are asked anew.
    asked = [job for job in done if suites <= {suite.sha256 for suite in job.spec.suites}]
    if any(job.spec.training_file.sha256 == spec.training_file.sha256 for job in asked):
        return 0
    later = [units(job, "base_audit") for job in asked if units(job, "base_audit") < plan.plain + plan.mined]
    mined = round(median(later)) if later else plan.mined
    return mined if asked else plan.plain + plan.mined


def _replies(past: Past, spec: JobSpec, stage: str, planned: int) -> int:
    """Return the expected number of replies of an audit.

    That is the number of an earlier job on the same file; else the planned number, scaled by the median ratio of actual
    to planned replies in earlier jobs.
    """
    same = [job for job in past.jobs if job.spec.training_file.sha256 == spec.training_file.sha256]
    if known := [found for job in same if (found := _count_replies_of_one(job, stage))]:
        return known[0]
    ratios = [
        found / most
        for job in past.jobs
        if (found := _count_replies_of_one(job, stage)) and (most := _plan_replies(job, stage))
    ]
    return round(planned * median(ratios)) if ratios else planned


def _count_replies_of_one(job: Job, stage: str) -> int:
    """Return the replies of one audit of a stage; 0 if the job did not finish the stage."""
    if stage != "checkpoint":
        return units(job, stage)
    # The final checkpoint has the job's full audit, and only the kept ones before it have one of their own.
    times = min(job.resolved["n_epochs"] - 1, KEPT - 1) if job.resolved and units(job, "train") else 0
    return units(job, stage) // times if times > 0 else 0


def _plan_replies(job: Job, stage: str) -> int:
    recipe: Recipe = parse(Recipe, from_stored(job.recipe), "recipe")
    plan = _plan(job.spec, recipe)
    return plan.checkpoint if stage == "checkpoint" else plan.last

"""Estimate what a job costs before it is queued: tokens, steps, time and GPU memory.

Tokens and rows over the limit are counted with the model's tokenizer if it is on this machine; otherwise tokens are
estimated from bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Literal, cast

from pydantic import BaseModel
from sqlalchemy import select
from sqlalchemy.orm import Session

from app.catalog.model_files import parameters
from app.db import Begin
from app.db.tables import BaseModelEntry, Job, JobStatus
from app.db.tables.catalog import ModelRates
from app.db.tables.job_spec import JobSpec
from app.db.tables.jobs import KEPT_CHECKPOINTS
from app.errors import InvalidState
from app.files import preview
from app.files import service as files
from app.files.counting import Allowance, Counters
from app.files.schemas import TokenCounts
from app.jobs import needs
from app.jobs.checks import resolve_request
from app.jobs.needs import Room
from app.jobs.request import JobCreate, Safety
from app.jobs.snapshot import Snapshot
from app.keys import Principal
from app.settings import Settings
from app.storage import Storage
from spard.config import OptimizerName, Quantization, Recipe, resolve
from spard.config.checks import PROBE_BATCH_SIZE
from spard.config.earlier_versions import from_stored
from spard.config.run_spec import parse
from spard.data.held_out_rows import ASKED, planned_rows
from spard.evaluation.expected_replies import ReplyPlan, SuiteSize, expected_replies
from spard.evaluation.results import SuiteKind
from spard.models.memory import moment_bytes

# Estimate how long each stage takes per unit of work, from recent jobs on a base model or from the model's trial.

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

    def probe_step_s(self, row_tokens: float) -> float:
        """Return the seconds of a step of the probe on rows of `row_tokens` tokens."""
        rate = self.per_unit("evidence")
        return PROBE_BATCH_SIZE * row_tokens * self._trained_token_s if rate is None else rate

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


def read_past(session: Session, entry: BaseModelEntry) -> Past:
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


# Estimate the time of each stage of a job that is not created yet.

StageName = Literal[
    "start",
    "rows",
    "row_signal",
    "embed",
    "base_audit",
    "evidence",
    "train",
    "compare",
    "checkpoints",
    "task",
    "audit",
    "package",
]


class EstimatedStage(BaseModel):
    """One stage of a job: its expected seconds, for a number of `units` of the kind `unit`."""

    stage: StageName
    seconds: float
    units: int
    unit: Literal["job", "rows", "steps", "tokens", "replies"]


@dataclass(frozen=True, slots=True)
class Work:
    """The amount of work: rows, tokens of all epochs, and epochs."""

    rows: int
    tokens: int
    epochs: int


def stages(past: Past, snapshot: Snapshot, work: Work) -> list[EstimatedStage]:
    """Return the stages in their order; empty if no speed of the base model is known."""
    return list(_stages(past, snapshot, work)) if past.is_known else []


def _stages(past: Past, snapshot: Snapshot, work: Work) -> Iterator[EstimatedStage]:
    spec, recipe = snapshot.spec, snapshot.recipe
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
    if steps := _probe_steps(spec, recipe):
        seconds = round(steps * past.probe_step_s(row_tokens), 1)
        yield EstimatedStage(stage="evidence", seconds=seconds, units=steps, unit="steps")
    token_s = past.token_s(recipe.defense.type)
    yield EstimatedStage(stage="train", seconds=round(work.tokens * token_s, 1), units=work.tokens, unit="tokens")
    if plan.compared:
        yield replies("compare", "checkpoint", work.epochs * plan.compared)
    ends = min(work.epochs - 1, KEPT_CHECKPOINTS - 1) if recipe.lora and spec.checkpoint_prompts else 0
    if ends:
        yield replies("checkpoints", "checkpoint", ends * _replies(past, spec, "checkpoint", plan.checkpoint))
    if asked := _task_requests(spec):
        yield replies("task", "task", 2 * asked)
    times = 3 if spec.further_tuning.steps else 1  # a further tuning audits both models once more
    yield replies("audit", "audit", times * _replies(past, spec, "audit", plan.last))
    yield EstimatedStage(stage="package", seconds=round(past.package_s(), 1), units=1, unit="job")


def _longer_s(past: Past, snapshot: Snapshot, found: Sequence[EstimatedStage]) -> float:
    """Return the seconds of all stages if the evidence lengthens the audit: both models are asked whole suites then."""
    spec, recipe = snapshot.spec, snapshot.recipe
    plan = _plan(spec, replace(recipe, audit=recipe.audit.lengthen()))
    times = 3 if spec.further_tuning.steps else 1
    # Stored replies of the base model are to the prompts of usual audits; in other ways it is asked anew.
    replies = {"base_audit": max(plan.mined, _base_replies(past, spec, plan)), "audit": times * plan.last}
    longer = {stage: count * past.reply_s(stage) for stage, count in replies.items()}
    return sum(max(each.seconds, longer.get(each.stage, 0.0)) for each in found)


def _plan(spec: JobSpec, recipe: Recipe) -> ReplyPlan:
    return expected_replies(
        [SuiteSize(cast(SuiteKind, suite.kind), suite.rows) for suite in spec.suites],
        recipe.audit,
        checkpoint_prompts=spec.checkpoint_prompts or 0,
        shared_prompts=recipe.ending.prompts if recipe.ending.compares else 0,
        gates_utility=spec.policy.thresholds().max_utility_drop is not None,
    )


def trained_rows(spec: JobSpec) -> int:
    """Return the number of rows that a job trains on, assuming that its file has no near duplicates."""
    rows = spec.training_file.rows
    return rows if spec.validation_file else rows - planned_rows(rows, spec.held_out_rows)


def _probe_steps(spec: JobSpec, recipe: Recipe) -> int:
    """Return the steps of the probe; 0 if the job trains none (`spard.pipeline.evidence`)."""
    has_prompts = {"harmful", "benign"} <= {suite.kind for suite in spec.suites}
    return spec.probe_steps if has_prompts and recipe.sharding == "none" else 0


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
    """Return the number of replies of one audit in a stage; 0 if the job did not finish the stage."""
    if stage != "checkpoint":
        return units(job, stage)
    # The final checkpoint has the job's full audit, and only the kept ones before it have one of their own.
    times = min(job.resolved["n_epochs"] - 1, KEPT_CHECKPOINTS - 1) if job.resolved and units(job, "train") else 0
    return units(job, stage) // times if times > 0 else 0


def _plan_replies(job: Job, stage: str) -> int:
    recipe: Recipe = parse(Recipe, from_stored(job.recipe), "recipe")
    plan = _plan(job.spec, recipe)
    return plan.checkpoint if stage == "checkpoint" else plan.last


_BYTES_PER_TOKEN = 4  # of English text and its JSON, roughly
_BFLOAT16_BYTES = 2
_COPIES = 2  # of weights that are trained: themselves and their gradients


class MemoryPlan(BaseModel):
    """How a job is divided to fit a GPU, planned before the exact token counts of its rows are known.

    `text` describes the plan in a sentence. `peak_bytes` is the part of the GPU's `memory_bytes` that training uses; it
    includes `weights_bytes` and `saved_bytes`, the memory kept for the backward pass. If `fits` is false, `peak_bytes`
    is the least that is needed. A null `micro_batch_size` or `pass_tokens` means whole batches; `ranks` is the number
    of GPUs that train the job.
    """

    text: str
    fits: bool
    gradient_checkpointing: bool
    micro_batch_size: int | None
    pass_tokens: int | None
    sharding: Literal["none", "full", "hybrid"]
    quantization: Quantization
    optimizer: OptimizerName
    ranks: int
    weights_bytes: int
    saved_bytes: int
    peak_bytes: int
    memory_bytes: int


class Estimate(BaseModel):
    """The estimated size, time and memory of a job.

    `estimated_seconds` is the sum over `stages`; null if no speed of the model is known. Where the provider lets
    unusual evidence lengthen the audit, `seconds_with_longer_audit` is the time of a job whose audit was lengthened.

    The time of a stage is its number of rows, tokens or replies times the seconds for one of them in recent jobs on the
    model, of any project; before the first job, the speed measured when the model was added. Failed and cancelled jobs
    count for the stages that they finished. The number of audit replies is exact for a file that was trained on before.

    Tokens are counted with the model's tokenizer and extrapolated from the counted rows to all rows; without the
    tokenizer on the API's machine they are estimated from the file's bytes. Rows held out to measure the
    task count in `rows` alone.

    A job refuses rows longer than `max_seq_length`. `rows_over_limit` counts such rows among the first 100,000, or as
    many as the time limit of a request allows. Both are null without the model's tokenizer on the API's machine.

    `memory_bytes_at_least` is the memory of the weights in bfloat16 or NF4; without LoRA it includes their gradients
    and AdamW's two moments in bfloat16 or 8 bits. Activations, safe gradients and an adapter's own weights add to it.
    It is null if the model is not a folder on that machine. `memory_bytes_needed` is the least GPU memory that can
    train the job, one row at a time with activation checkpointing; workers with less do not take the job. `memory_plan`
    shows how the job is cut on a worker that holds it, else on the one with the largest GPU; null if no worker has one.
    Both are computed by formula, and null if the model's architecture is not known.
    """

    object: Literal["fine_tuning.job.estimate"] = "fine_tuning.job.estimate"
    approximate: Literal[True] = True
    model: str
    rows: int
    tokens_per_epoch: int
    trained_tokens: int
    hyperparameters: dict[str, int | float]
    steps: int
    safe_examples: int
    max_seq_length: int | None
    rows_over_limit: int | None
    memory_bytes_at_least: int | None
    memory_bytes_needed: int | None = None
    memory_plan: MemoryPlan | None = None
    estimated_seconds: int | None
    seconds_with_longer_audit: int | None = None
    stages: list[EstimatedStage] = []
    warnings: list[str]


def estimate(
    storage: Storage,
    counters: Counters,
    begin: Begin,
    caller: Principal,
    ask: JobCreate,
    settings: Settings,
    allowance: Allowance,
) -> Estimate:
    """Validate a request as if it created a job, and return its estimate.

    Nothing is stored. `allowance` limits the CPU time for counting tokens. Raises the same errors as creating the job,
    including the errors about its files.
    """
    with begin() as session:
        snapshot = resolve_request(session, caller, ask, settings)
        if snapshot.fault:
            raise snapshot.fault
        found = _of_rows(ask, snapshot)
        entry = preview.model_entry(session, snapshot.spec.model.alias)
        file = files.get(session, caller.project_id, ask.training_file)
        rooms, known = needs.gpu_rooms(session), read_past(session, entry)
    # Counting tokens takes seconds, so it happens after the transaction has ended.
    longest = None
    if (weights := parameters(entry.source)) is not None:
        found.memory_bytes_at_least = _at_least(weights, snapshot.recipe)
    with suppress(InvalidState):  # there is no tokenizer here
        tokens = preview.token_counts(storage, counters, file, entry, ask.max_seq_length, allowance)
        found.max_seq_length, found.rows_over_limit = tokens.limit, tokens.rows_over_limit
        found.warnings += _failing(tokens)
        # An approximate count may have missed the longest row; the plan then assumes the longest possible one.
        longest = min(tokens.max, tokens.limit) if not tokens.approximate else None
        if tokens.rows:
            found.tokens_per_epoch = math.ceil(tokens.total * trained_rows(snapshot.spec) / tokens.rows)
    found.trained_tokens = found.tokens_per_epoch * round(found.hyperparameters["n_epochs"])
    work = Work(found.rows, found.trained_tokens, round(found.hyperparameters["n_epochs"]))
    found.stages = stages(known, snapshot, work)
    found.estimated_seconds = round(sum(each.seconds for each in found.stages)) if found.stages else None
    if found.stages and settings.probe_longer_audit and _probe_steps(snapshot.spec, snapshot.recipe):
        found.seconds_with_longer_audit = round(_longer_s(known, snapshot, found.stages))
    _add_memory(found, snapshot, rooms, longest)
    return found


def _failing(tokens: TokenCounts) -> Iterator[str]:
    """Yield a sentence with the count for each kind of row that makes a job fail."""
    for count, what in (
        (tokens.rows_over_limit, f"longer than {tokens.limit:,} tokens"),
        (tokens.rows_without_loss, "without a token to learn"),
        (tokens.rows_not_rendered, "refused or left out in part by the model's chat template"),
    ):
        if count:
            yield f"{'1 row is' if count == 1 else f'{count:,} rows are'} {what}; a job fails on such a row."


def _at_least(parameters: int, recipe: Recipe) -> int:
    """Return the bytes of the weights in bfloat16; in full fine-tuning also of gradients and moments.

    The moments take 2 bytes a value, or 1 with 8-bit AdamW.
    """
    weights = parameters * _BFLOAT16_BYTES
    if recipe.lora:
        return weights
    held = moment_bytes(parameters, recipe.optimizer) if recipe.optimizer == "adamw_8bit" else 2 * weights
    return _COPIES * weights + held


def _add_memory(found: Estimate, snapshot: Snapshot, rooms: Sequence[Room], longest: int | None) -> None:
    """Add the memory that the job needs and its memory plan; `longest` is the token count of its longest row."""
    source, recipe, size = snapshot.spec.model.source, snapshot.recipe, snapshot.spec.training_file.bytes
    if (held := needs.quantized_weights(source, recipe)) is not None:
        found.memory_bytes_at_least = held
    if (need := needs.least_need(source, recipe, size)) is not None:
        found.memory_bytes_needed = need.alone
    batch = round(found.hyperparameters["batch_size"])
    if (plan := needs.plan_job(source, recipe, batch, longest or size, rooms)) is not None:
        found.memory_plan = MemoryPlan(text=plan.sentence, **asdict(plan))


def _of_rows(ask: JobCreate, snapshot: Snapshot) -> Estimate:
    """Return an estimate from the numbers of rows and bytes alone, without times."""
    spec = snapshot.spec
    rows, trained, pool = spec.training_file.rows, trained_rows(spec), spec.pool
    # The hidden size matters to the learning rate only, which an estimate does not show.
    numbers = resolve(Recipe(hyperparameters=ask.asked_hyperparameters()), trained, hidden_size=1)  # no rate is shown
    tokens = math.ceil(spec.training_file.bytes * trained / max(1, rows) / _BYTES_PER_TOKEN)
    safety = ask.safety or Safety()
    defended = not safety.defense.is_baseline
    return Estimate(
        model=ask.model,
        rows=rows,
        tokens_per_epoch=tokens,
        trained_tokens=tokens * numbers.n_epochs,
        hyperparameters={
            name: getattr(numbers, name) for name in ("n_epochs", "batch_size", "learning_rate_multiplier")
        }
        | ({"beta": snapshot.recipe.dpo.strength} if snapshot.recipe.dpo else {}),
        steps=numbers.n_epochs * math.ceil(trained / numbers.batch_size),
        safe_examples=safety.selection.size(trained, pool.rows) if pool and defended else 0,
        max_seq_length=None,
        rows_over_limit=None,
        memory_bytes_at_least=None,
        estimated_seconds=None,
        warnings=snapshot.warnings,
    )

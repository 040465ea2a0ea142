"""What a job would take, before anything is queued.

Tokens and rows over the limit are counted by the model's tokenizer where it is at hand; elsewhere tokens are guessed
from bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from typing import Literal

from pydantic import BaseModel

from app.catalog.weights import parameters
from app.db import Begin
from app.errors import InvalidState
from app.files import preview
from app.files import service as files
from app.files.counting import Allowance, Counters
from app.files.schemas import TokenCounts
from app.jobs import needs, stage_rates
from app.jobs.needs import Room
from app.jobs.request import JobCreate, Safety
from app.jobs.snapshot import Frozen, resolve_request
from app.jobs.stage_estimate import EstimatedStage, Work, stages, trained_rows
from app.keys.service import Principal
from app.settings import Settings
from app.storage import Storage
from spard.config import OptimizerName, Quantization, Recipe, resolve
from spard.models.memory import moments

_BYTES_PER_TOKEN = 4  # of English text and its JSON, roughly
_BFLOAT16_BYTES = 2
_COPIES = 2  # of weights that are trained: themselves and their gradients


class MemoryPlan(BaseModel):
    """How a job would be cut to fit a GPU, before its rows are known to the token; `text` says it in a sentence.

    `peak_bytes` of the GPU's `memory_bytes`, of which weights and what is saved for the backward pass are parts. Where
    `fits` is false it is the least that would do. Null pieces are whole batches; `ranks` are the GPUs that train it.
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
    """`estimated_seconds` is the sum of `stages`, null where nothing is known of how fast the model is.

    Each stage is its number of rows, tokens or replies by what recent jobs on the model took for one, yours or
    another's; before the first, by what was measured when the model was added. Failed and cancelled jobs count for the
    stages that they ended. How many replies the audits need is known exactly for a file that was trained on before.
    Tokens are those of the model's tokenizer: of all rows as of those that were counted, and guessed from the file's
    bytes where the tokenizer is not on the machine that serves the API. Rows that are held out, to show whether the
    task is learned, are counted in `rows` alone.
    A job refuses rows longer than `max_seq_length`; `rows_over_limit` counts them among the first 100,000, or as many
    as can be looked at in the time that a request may compute for. Both are null where the model's tokenizer is not on
    the machine that serves the API.
    `memory_bytes_at_least` is that of the weights, in bfloat16 or NF4, and without LoRA that of their gradients and
    AdamW's two moments too, these in bfloat16 or 8 bits; activations, safe gradients and an adapter's own weights come
    on top. Null where the model is no folder on that machine. `memory_bytes_needed` is the least memory of a GPU that
    trains it, one row at a time with activation checkpointing; workers with less do not take the job. `memory_plan` is
    how it would be cut on the largest GPU that a worker has; null where none has one. Both are formulae, and null where
    the model's kind is not known.
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
    """Check a request as if it were one for a job, and say what it would come to."""
    with begin() as session:
        frozen = resolve_request(session, caller, ask, settings)
        if frozen.fault:
            raise frozen.fault
        found = _of_rows(ask, frozen)
        entry = preview.model_entry(session, frozen.spec.model.alias)
        file = files.get(session, caller.project_id, ask.training_file)
        room, known = needs.largest_room(session), stage_rates.past(session, entry)
    longest = None
    if (weights := parameters(entry.source)) is not None:
        found.memory_bytes_at_least = _at_least(weights, frozen.recipe)
    with suppress(InvalidState):  # there is no tokenizer here
        tokens = preview.token_counts(storage, counters, file, entry, ask.max_seq_length, allowance)  # takes seconds
        found.max_seq_length, found.rows_over_limit = tokens.limit, tokens.rows_over_limit
        found.warnings += _failing(tokens)
        longest = min(tokens.max, tokens.limit) if not tokens.approximate else None
        if tokens.rows:
            found.tokens_per_epoch = math.ceil(tokens.total * trained_rows(frozen.spec) / tokens.rows)
    found.trained_tokens = found.tokens_per_epoch * round(found.hyperparameters["n_epochs"])
    work = Work(found.rows, found.trained_tokens, round(found.hyperparameters["n_epochs"]))
    found.stages = stages(known, frozen, work)
    found.estimated_seconds = round(sum(each.seconds for each in found.stages)) if found.stages else None
    _add_memory(found, frozen, room, longest)
    return found


def _failing(tokens: TokenCounts) -> Iterator[str]:
    """Say of each kind of row on which a job fails how many there are."""
    for count, what in (
        (tokens.rows_over_limit, f"longer than {tokens.limit:,} tokens"),
        (tokens.rows_without_loss, "without a token to learn"),
        (tokens.rows_not_rendered, "refused or left out in part by the model's chat template"),
    ):
        if count:
            yield f"{'1 row is' if count == 1 else f'{count:,} rows are'} {what}; a job fails on such a row."


def _at_least(parameters: int, recipe: Recipe) -> int:
    """Return the bytes of weights, and of their gradients and moments where they are trained, in bfloat16 or 8 bits."""
    weights = parameters * _BFLOAT16_BYTES
    if recipe.lora:
        return weights
    held = moments(parameters, recipe.optimizer) if recipe.optimizer == "adamw_8bit" else 2 * weights
    return _COPIES * weights + held


def _add_memory(found: Estimate, frozen: Frozen, room: Room | None, longest: int | None) -> None:
    """Add what memory the job needs, and how it would be cut; `longest` is its longest row's number of tokens."""
    source, recipe, size = frozen.spec.model.source, frozen.recipe, frozen.spec.training_file.bytes
    if (held := needs.quantized_weights(source, recipe)) is not None:
        found.memory_bytes_at_least = held
    if (need := needs.least_need(source, recipe, size)) is not None:
        found.memory_bytes_needed = need.alone
    batch = round(found.hyperparameters["batch_size"])
    if (plan := needs.plan_job(source, recipe, batch, longest or size, room)) is not None:
        found.memory_plan = MemoryPlan(text=plan.sentence, **asdict(plan))


def _of_rows(ask: JobCreate, frozen: Frozen) -> Estimate:
    """Estimate from the numbers of rows and bytes, without the time."""
    spec = frozen.spec
    rows, trained, pool = spec.training_file.rows, trained_rows(spec), spec.pool
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
        | ({"beta": frozen.recipe.dpo.strength} if frozen.recipe.dpo else {}),
        steps=numbers.n_epochs * math.ceil(trained / numbers.batch_size),
        safe_examples=safety.selection.size(trained, pool.rows) if pool and defended else 0,
        max_seq_length=None,
        rows_over_limit=None,
        memory_bytes_at_least=None,
        estimated_seconds=None,
        warnings=frozen.warnings,
    )

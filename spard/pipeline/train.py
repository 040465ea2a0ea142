"""The train stage: from encoded rows to a trained model, under a memory plan for the run's GPUs."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import ceil
from typing import Protocol, TypeVar

from spard import distributed
from spard.config import Recipe, ResolvedNumbers, resolve
from spard.errors import OutOfGpuMemory, is_gpu_out_of_memory
from spard.losses.cross_entropy import Evaluation
from spard.methods import open_method
from spard.methods.base import Metrics
from spard.models import budget, memory
from spard.models.lora import inspect_layout
from spard.models.memory import Gpus, Load, Plan, fit
from spard.models.shapes import read_model_shape
from spard.pipeline.context import Context
from spard.pipeline.rows import Rows
from spard.training.epoch_ends import EpochEnd, EpochResult, References, evaluate_validation
from spard.training.resume_state import SavedState
from spard.training.train import TrainedModel, train

# A warning, before the training, that the base model was never trained on text like the file's.

LOOKED_AT = 16  # number of rows, evenly spaced
CLEARLY = 1.35
"""Warn if the base model's loss is above this multiple of the loss of a uniform guess among all tokens.

A model with random weights stays below it. A trained model is far below it on text like its training data, and above it
on other text, whose tokens it has learned not to expect.
"""


def warn_of_unknown_words(context: Context, rows: Rows) -> None:
    """Warn if the base model's loss on the file's answers is clearly above the loss of a uniform guess."""
    # The base model alone is measured, which says nothing of a run that starts from an adapter.
    if context.recipe.dpo is not None or context.run.start_from is not None:
        return
    places = [i * len(rows.task) // LOOKED_AT for i in range(LOOKED_AT)]
    tell = partial(context.report.activity, "computing the base model's loss on some training rows")
    loss = evaluate_validation(context.base, rows.task, context.recipe, None, sorted(set(places)), tell).loss
    if is_unfamiliar(context, loss):
        text = f"The base model has not learned words like your file's: it expects its answers with {loss:.1f} nats a "
        text += f"token, and by guessing among all tokens it would be {_loss_by_chance(context):.1f}. Training will "
        context.report.warning(f"{text}hardly teach them; choose a base model that has read such text.")


def is_unfamiliar(context: Context, loss: float) -> bool:
    """Return True if this loss of the base model, in nats per token, is clearly above that of a uniform guess."""
    return loss > CLEARLY * _loss_by_chance(context)


def _loss_by_chance(context: Context) -> float:
    return math.log(context.base.model.get_input_embeddings().weight.shape[0])


# Micro-batches: the pieces in which a batch goes through the GPU.
#
# The size comes from the recipe or the memory plan and is halved each time GPU memory runs out, down to one row: the
# attempt stores the smaller size and fails, and the next attempt reads the size and continues from the newest resume
# state. If several processes share a batch, any of them may halve its share. Gradients depend on the size of the
# pieces only by rounding and dropout masks.

_FIRST = "pieces"  # output of the first halving; each later one is `pieces-ROWS`


def fitting(context: Context, recipe: Recipe, resolved: ResolvedNumbers) -> Recipe:
    """Return the recipe with the micro-batch size of the last attempt, and with `pass_tokens` in proportion to it."""
    rows, first = last_micro_batch(context), _first(context, recipe, resolved)
    if rows is None or rows > first:
        return recipe
    text = (
        f"The GPU memory was too small before: batches of {resolved.batch_size} are split into micro-batches of {rows}"
    )
    context.report.event(text, {"micro_batch_size": rows, "batch_size": resolved.batch_size}, level="warn")
    tokens = None if recipe.pass_tokens is None else max(1, recipe.pass_tokens * rows // first)
    return replace(recipe, micro_batch_size=rows, pass_tokens=tokens)


def last_micro_batch(context: Context) -> int | None:
    """Return the last halved number of rows of a micro-batch; None if memory never ran out."""
    rows, found = None, context.outputs.read(_FIRST)
    while found is not None:
        rows = int(found["micro_batch_size"])
        found = context.outputs.read(_further(rows // 2))
    return rows


@contextmanager
def halving(context: Context, recipe: Recipe, resolved: ResolvedNumbers) -> Iterator[None]:
    """Turn a lack of GPU memory in the block into `OutOfGpuMemory` after halving the stored micro-batch size.

    With a micro-batch of one row already, the original error is raised.
    """
    halved = last_micro_batch(context)  # read before the block: another rank may store its own halving
    try:
        yield
    except RuntimeError as error:
        whole = _first(context, recipe, resolved)
        rows = (whole if halved is None else min(halved, whole)) // 2
        # With one row left (`rows` is 0) there is nothing to halve, and a retry fails in the same way.
        if not is_gpu_out_of_memory(error) or not rows:
            raise
        _keep(context, halved, rows)
        text = f"the GPU has too little memory for this batch; the next attempt takes {rows} rows at a time"
        raise OutOfGpuMemory(text, "batch_size") from error


def _keep(context: Context, halved: int | None, rows: int) -> None:
    """Append a halved micro-batch size to the stored chain of sizes, or start the chain if `halved` is None."""
    if halved is None:
        context.outputs.write(_FIRST, {"micro_batch_size": rows})
        return
    # `last_micro_batch` follows a chain of outputs named by their halved sizes, so every link must be written even if a
    # plan has already made the micro-batch smaller.
    while halved > rows:
        halved //= 2
        context.outputs.write(_further(halved), {"micro_batch_size": min(halved, rows)})


def _first(context: Context, recipe: Recipe, resolved: ResolvedNumbers) -> int:
    """Return the rows of one process's micro-batch before any halving."""
    share = ceil(resolved.batch_size / context.processes)
    return min(recipe.micro_batch_size or share, share)


def _further(rows: int) -> str:
    return f"{_FIRST}-{rows}"


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """The result of training, with the losses on the validation rows before and after (None without such rows).

    For preference pairs `before` is None: by definition every pair has the loss ln 2 there. `plan` is the memory plan.
    """

    trained: TrainedModel
    resolved: ResolvedNumbers
    before: Evaluation | None
    after: Evaluation | None
    recipe: Recipe  # with the memory plan's settings
    plan: Plan | None = None

    @property
    def released_step(self) -> int:
        """The step whose weights the run released."""
        ended = self.trained.ended
        return ended.released.step if ended else self.trained.steps


Result_co = TypeVar("Result_co", covariant=True)


class EpochStage(Protocol[Result_co]):
    """A stage at the end of an epoch; it runs on every rank and must not change weights."""

    def run(self, end: EpochEnd) -> Result_co:
        """Measure the model as it is at the end of an epoch."""
        ...


def run(
    context: Context,
    rows: Rows,
    checkpoints: EpochStage[None] | None = None,
    development: EpochStage[EpochResult] | None = None,
) -> TrainingResult:
    """Train from the newest resume state, if any, and report every step.

    checkpoints  takes a checkpoint at each end of an epoch; None: none is taken
    development  measures each end of an epoch for the choice of the best one; None: epochs are not compared
    """
    context.report.stage("train")
    resolved = resolve(context.recipe, len(rows.task), context.base.hidden_size)
    context.report.report_resolved(asdict(resolved), resolved.n_epochs * sum(row.tokens for row in rows.task))
    plan = plan_memory(context, rows, resolved)
    cut = apply_plan(context.recipe, plan)
    recipe, plan_of_ends = fitting(context, cut, resolved), context.checkpoints
    # `halving` gets the plan's size and not the halved one: it reads earlier halvings itself.
    with context.time_stage("train"), halving(context, cut, resolved):
        before = None if context.recipe.dpo else validate(context, rows)  # ln 2 for pairs by definition
        warn_of_unknown_words(context, rows)
        trained = train(
            context.base,
            rows.task,
            rows.safe,
            recipe,
            resolved,
            on_step=context.report.metrics,
            start_from=context.run.start_from,
            resume_states=context.resume_states,
            on_saved=partial(_report_saved, context),
            on_epoch=checkpoints.run if checkpoints else None,
            compare=development.run if development else None,
            validation=rows.validation,
            should_stop=context.should_stop,
            pairs=rows.pairs,
            kept_ends=plan_of_ends.kept if plan_of_ends and plan_of_ends.prompts else None,
            shows_last=plan_of_ends.shows_last if plan_of_ends else None,
            on_work=context.report.activity,
        )
        return TrainingResult(trained, resolved, before, validate(context, rows, trained.references), recipe, plan)


def validate(context: Context, rows: Rows, references: References | None = None) -> Evaluation | None:
    """Return the model's loss on all validation rows; None without such rows."""
    if not rows.validation:
        return None
    tell = partial(context.report.activity, "computing the loss on validation rows")
    return evaluate_validation(context.base, rows.validation, context.recipe, references, tell=tell)


def _report_saved(context: Context, saved: SavedState, metrics: Metrics) -> None:
    context.report.resume_state(saved.step, saved.path.relative_to(saved.path.parents[1]).as_posix())


# The memory plan of a run: made before the first step on a GPU, reported as an event, stored in the manifest.
#
# On a CPU there is no plan, and the recipe's own settings apply.


def plan_memory(context: Context, rows: Rows, resolved: ResolvedNumbers) -> Plan | None:
    """Return the memory plan for the run's GPUs, and report it; None without a GPU or for an unknown architecture."""
    gpus = run_gpus(context)
    shape = read_model_shape(context.base.model.config.to_dict(), inspect_layout(context.base.model))
    if gpus is None or shape is None:
        return None
    plan = fit(shape, memory.TrainedPart.from_recipe(context.recipe), _load(context.recipe, rows, resolved), gpus)
    context.report.event(plan.sentence, plan.to_json(), level="info" if plan.fits else "warn")
    return plan


def apply_plan(recipe: Recipe, plan: Plan | None) -> Recipe:
    """Return the recipe with the plan's settings; a setting of the recipe or provider that takes less memory wins."""
    asked = recipe.pass_tokens, budget.told_tokens(), None if plan is None else plan.pass_tokens
    tokens = [most for most in asked if most is not None]
    if plan is None:
        return replace(recipe, pass_tokens=min(tokens, default=None))
    pieces = [rows for rows in (recipe.micro_batch_size, plan.micro_batch_size) if rows is not None]
    return replace(
        recipe,
        gradient_checkpointing=recipe.gradient_checkpointing or plan.gradient_checkpointing,
        micro_batch_size=min(pieces, default=None),
        pass_tokens=min(tokens, default=None),
    )


def run_gpus(context: Context) -> Gpus | None:
    """Return the GPUs of the run, with the free memory of the fullest one; None on a CPU."""
    if context.base.device.type != "cuda":
        return None
    free = min(distributed.gather_objects(budget.own_memory(context.base.device)))  # all ranks need the same plan
    sharding, count = context.recipe.sharding, context.processes
    machines = count // int(os.environ.get("LOCAL_WORLD_SIZE", count)) if sharding == "hybrid" else 1
    return Gpus(free, count, machines, shards="never" if sharding == "none" else "always")


def _load(recipe: Recipe, rows: Rows, resolved: ResolvedNumbers) -> Load:
    """Return the largest load of one training step."""
    prompts = [prompt for pairs in rows.pairs.values() for pair in pairs for prompt in pair]
    safe = max((row.longest for row in rows.safe), default=0)
    batch = open_method(recipe.defense).safe_batch_size(resolved.batch_size)
    return Load(
        rows=resolved.batch_size,
        longest=max([row.longest for row in rows.task] + [len(prompt.ids) for prompt in prompts] + [safe]),
        safe_tokens=min(batch, len(rows.safe)) * safe,
        answers=2 if recipe.dpo else 1,
        checkpointing=recipe.gradient_checkpointing,
    )

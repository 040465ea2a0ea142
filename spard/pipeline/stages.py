"""The stages in their order: what the library's run and the service's jobs have in common."""

from __future__ import annotations

import time
from dataclasses import dataclass

from spard import distributed
from spard.errors import InvalidRecipe
from spard.pipeline import agent, audit, costs, package, task_check, train
from spard.pipeline.base_figures import base_figures
from spard.pipeline.checkpoints import checkpoint_callback
from spard.pipeline.context import Context
from spard.pipeline.development import epoch_evaluator
from spard.pipeline.leaks import leave_out_leaks
from spard.pipeline.led import follow_rank_zero
from spard.pipeline.package import Release
from spard.pipeline.rows import prepare
from spard.release.proof import CleanProcess
from spard.release.report import Measured, SafetyReport, SelectedRows
from spard.training import optimizers
from spard.training.train import Trained


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run found; its files lie in the folder it was given."""

    selected: SelectedRows | None
    trained: Trained
    measured: Measured
    report: SafetyReport


def run_stages(
    context: Context,
    release: Release,
    clean: CleanProcess | None,
) -> Outcome:
    """Embed, select, train, audit, prove, package.

    The base model is measured before training, because full fine-tuning leaves none of it. What an earlier attempt
    chose or measured is not worked out again; training goes on from its newest resume state. `clean` proves the
    adapter, and each checkpoint that passed: start it early, it loads its libraries meanwhile. Of several ranks each
    does all of this, and the first one, which alone has a clean process, writes the results.
    """
    optimizers.require(context.recipe)
    _refuse_stored_weights(context)
    _refuse_several_ranks(context)
    context = leave_out_leaks(follow_rank_zero(context))
    with costs.timed_rows(context) as read:
        rows = prepare(context)
        read.append(len(rows.examples))
    with costs.counted_replies(context, "base_audit"):
        base = base_figures(context, rows.examples)
        compare = epoch_evaluator(context, rows)
    task_check.ask_base(context, rows.learning)
    with costs.timed_training(context) as trained:
        tuned = train.run(context, rows, checkpoint_callback(context, release, rows, base, clean), compare)
        trained.append(tuned.trained)
    task_check.ask_trained(context, rows.learning, tuned.trained.model)
    with costs.counted_replies(context, "audit"):
        measured = audit.run(context, rows.examples, tuned.trained.model, base)
        measured = agent.apply_agent_verdict(context, rows.examples, tuned.trained.model, measured)
    started = time.perf_counter()
    report = package.run(context, release, rows, tuned, measured, clean)
    context.report.cost("package", time.perf_counter() - started, 1)
    return Outcome(rows.selected, tuned.trained, measured, report)


def _refuse_stored_weights(context: Context) -> None:
    """Raise InvalidRecipe where all weights of a model that is stored in FP8 or MXFP4 would be trained."""
    if context.recipe.lora is None and context.base.stored:
        message = "lora: the base model is stored in 8 or 4 bits, and its own weights cannot be trained; use LoRA"
        raise InvalidRecipe(message, "lora")


def _refuse_several_ranks(context: Context) -> None:
    """Raise InvalidRecipe for what one process alone can do: to tune a model further, and to answer an agent."""
    asked = {"further_tuning": context.run.further_tuning.steps, "agent": context.run.agent}
    for name, is_asked in asked.items():
        if is_asked and distributed.world_size() > 1:
            raise InvalidRecipe(
                f"{name} is possible on one GPU a job only; this job has {distributed.world_size()}", name
            )

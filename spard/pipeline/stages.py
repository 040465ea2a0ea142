"""The order of the stages, shared by the library's `run` and the service's jobs."""

from __future__ import annotations

import time
from dataclasses import dataclass

from spard import distributed
from spard.errors import InvalidRecipe
from spard.pipeline import agent, audit, costs, development, evidence, package, task_check, train
from spard.pipeline.base_figures import base_figures
from spard.pipeline.checkpoints import Checkpoints
from spard.pipeline.context import Context
from spard.pipeline.leaks import leave_out_leaks
from spard.pipeline.package import Release
from spard.pipeline.rank_zero import follow_rank_zero
from spard.pipeline.rows import prepare
from spard.release.proof import CleanProcess
from spard.release.report import Measured, SafetyReport, SelectedRows
from spard.training import optimizers
from spard.training.train import Trained


@dataclass(frozen=True, slots=True)
class Outcome:
    """The results of a run; their files are in the folder of its `Release`."""

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

    The base model is measured before the training, because full fine-tuning leaves none. Stored results of an earlier
    attempt are reused; training resumes from the newest resume state. `clean` is the process that proves the adapter
    and each checkpoint that passed; start it early, because it loads its libraries in the background. All ranks run all
    stages; rank 0, which alone has a clean process, writes the results.

    Raises `InvalidRecipe` for an impossible combination, and the errors of the stages (`spard.errors`).
    """
    optimizers.require(context.recipe)
    _refuse_stored_weights(context)
    _refuse_several_ranks(context)
    # From here on all ranks read the same stored outputs, and the audit skips the same prompts.
    context = leave_out_leaks(follow_rank_zero(context))
    with costs.timed_rows(context) as read:
        rows = prepare(context)
        read.append(len(rows.examples))
    with costs.counted_replies(context, "base_audit"):
        base = base_figures(context, rows.examples)
        compared = development.measure_base(context, rows)
    task_check.ask_base(context, rows.learning)
    evidence.run(context, rows)
    with costs.timed_training(context) as trained:
        plan = context.checkpoints
        checkpoints = Checkpoints(context, plan, release, rows, base, clean) if plan else None
        tuned = train.run(context, rows, checkpoints, compared)
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
    """Raise `InvalidRecipe` for full fine-tuning of a model stored in FP8 or MXFP4."""
    if context.recipe.lora is None and context.base.stored:
        message = "lora: the base model is stored in 8 or 4 bits, and its own weights cannot be trained; use LoRA"
        raise InvalidRecipe(message, "lora")


def _refuse_several_ranks(context: Context) -> None:
    """Raise `InvalidRecipe` for further tuning or an auditing agent on several ranks."""
    asked = {"further_tuning": context.run.further_tuning.steps, "agent": context.run.agent}
    for name, is_asked in asked.items():
        if is_asked and distributed.world_size() > 1:
            raise InvalidRecipe(
                f"{name} is possible on one GPU a job only; this job has {distributed.world_size()}", name
            )

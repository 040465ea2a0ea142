"""The train stage: from encoded rows to a trained model."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial

from spard.config import Recipe, Resolved, resolve
from spard.losses.cross_entropy import Evaluation
from spard.methods.base import Metrics
from spard.models.fit import Plan
from spard.pipeline.context import Context
from spard.pipeline.fit import apply_plan, plan_memory
from spard.pipeline.micro_batches import fitting, halving
from spard.pipeline.rows import Rows
from spard.pipeline.unknown_words import warn_of_unknown_words
from spard.training.ends import Borrows, Compares
from spard.training.references import References, evaluate_validation
from spard.training.resume_state import Saved
from spard.training.train import Trained, train


@dataclass(frozen=True, slots=True)
class Tuned:
    """The result of training, with the losses on the validation rows before and after (None without such rows).

    For preference pairs `before` is None: by definition every pair has the loss ln 2 there. `plan` is the memory plan.
    """

    trained: Trained
    resolved: Resolved
    before: Evaluation | None
    after: Evaluation | None
    recipe: Recipe  # with the memory plan's settings
    plan: Plan | None = None

    @property
    def released_step(self) -> int:
        """The step whose weights the run released."""
        ended = self.trained.ended
        return ended.released.step if ended else self.trained.steps


def run(context: Context, rows: Rows, on_epoch: Borrows | None = None, compare: Compares | None = None) -> Tuned:
    """Train from the newest resume state, if any, and report every step.

    `on_epoch` is called at each end of an epoch, and `compare` evaluates it for the choice of the best one.
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
            on_epoch=on_epoch,
            compare=compare,
            validation=rows.validation,
            should_stop=context.should_stop,
            pairs=rows.pairs,
            kept_ends=plan_of_ends.kept if plan_of_ends and plan_of_ends.prompts else None,
            shows_last=plan_of_ends.shows_last if plan_of_ends else None,
        )
        return Tuned(trained, resolved, before, validate(context, rows, trained.references), recipe, plan)


def validate(context: Context, rows: Rows, references: References | None = None) -> Evaluation | None:
    """Return the model's loss on all validation rows; None without such rows."""
    if not rows.validation:
        return None
    return evaluate_validation(context.base, rows.validation, context.recipe, references)


def _report_saved(context: Context, saved: Saved, metrics: Metrics) -> None:
    context.report.resume_state(saved.step, saved.path.relative_to(saved.path.parents[1]).as_posix())

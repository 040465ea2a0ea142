"""The train stage: from the customer's rows and the safe set to a trained model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from spard.checkpoint import Saved
from spard.config import Resolved, resolve
from spard.data import Encoded
from spard.losses import Evaluation, evaluate
from spard.methods.base import Metrics
from spard.train import Trained, train
from worker.context import Context
from worker.pieces import fitting, halving


@dataclass(frozen=True, slots=True)
class Data:
    """All rows as tokens."""

    task: Sequence[Encoded]
    safe: Sequence[Encoded]
    validation: Sequence[Encoded]


@dataclass(frozen=True, slots=True)
class Tuned:
    """What training gave, with the losses on the validation rows before and after, if there are such rows."""

    trained: Trained
    resolved: Resolved
    before: Evaluation | None
    after: Evaluation | None


def run(context: Context, data: Data) -> Tuned:
    """Train, reporting every step, from the newest checkpoint if there is one."""
    context.report.phase("train")
    resolved = resolve(context.recipe, len(data.task), context.base.hidden_size)
    context.report.resolved(asdict(resolved))
    recipe = fitting(context, resolved)

    def on_checkpoint(saved: Saved, metrics: Metrics) -> None:
        path = saved.path.relative_to(context.folder.root).as_posix()
        found = _validate(context, data)
        valid = {"valid_loss": found.loss, "valid_mean_token_accuracy": found.accuracy} if found else {}
        context.report.checkpoint(saved.step, path, {"train_loss": metrics["loss/task"], **valid})

    with context.stage("train"), halving(context, resolved):
        before = _validate(context, data)
        trained = train(
            context.base,
            data.task,
            data.safe,
            recipe,
            resolved,
            on_step=context.report.metrics,
            start_from=context.run.start_from,
            checkpoints=context.folder.checkpoints,
            on_checkpoint=on_checkpoint,
            should_stop=context.should_stop,
        )
        return Tuned(trained, resolved, before, _validate(context, data))


def _validate(context: Context, data: Data) -> Evaluation | None:
    if not data.validation:
        return None
    return evaluate(context.base.model, data.validation, context.base.tokenizer.pad_token_id)

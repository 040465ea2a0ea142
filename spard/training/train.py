"""The training loop; the same base model, data and recipe give the same adapter.

Everything random is a function of the recipe's seed and the step: the order of the rows, the safe batches, LoRA's
initialization and its dropout. A run can therefore be resumed bit for bit from parameters, optimizer state, method
state and the step number, and the global random state is restored afterward.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from spard import distributed
from spard.config import Recipe, Resolved
from spard.config.anchors import Kind
from spard.data.chat import Encoded
from spard.errors import NonFiniteLoss, Stopped
from spard.losses.anchor import Pair
from spard.methods.base import Metrics
from spard.models.base import Base
from spard.models.sharding import Shards
from spard.training.epoch_ends import Ends, EpochCallback, EpochEvaluator
from spard.training.epoch_ends import EpochEnd as EpochEnd
from spard.training.resume_state import Saved
from spard.training.run import Run
from spard.training.run import Trained as Trained


def train(
    base: Base,
    task: Sequence[Encoded],
    safe: Sequence[Encoded],
    recipe: Recipe,
    resolved: Resolved,
    *,
    on_step: Callable[[int, int, Metrics], None] | None = None,
    start_from: Path | None = None,
    resume_states: Path | None = None,
    on_saved: Callable[[Saved, Metrics], None] | None = None,
    on_epoch: EpochCallback | None = None,
    compare: EpochEvaluator | None = None,
    validation: Sequence[Encoded] = (),
    should_stop: Callable[[], bool] | None = None,
    pairs: Mapping[Kind, Sequence[Pair]] | None = None,
    kept_ends: int | None = None,
    shows_last: Callable[[], bool] | None = None,
) -> Trained:
    """Fine-tune `base` on `task` with the recipe's defense on the safe rows `safe`; `base.model` is changed in place.

    on_step        called after each step with its number, their total and the metrics, at times with validation losses.
    start_from     folder of an adapter to start from. tau and other references stay the base model's, so that a chain
                   of jobs drifts no further from it than a single job.
    resume_states  folder to save resume states in; the run continues from the newest valid one of its own there.
    on_saved       called after each save with the resume state and the last step's metrics.
    on_epoch       called at epoch ends with the model of an adapter; must not change weights. See `Ends`.
    compare        called at epoch ends to compare them, if the recipe compares epochs. See `Ends`.
    validation     rows for validation losses.
    should_stop    asked after each step; if True, the state is saved and `Stopped` raised.
    pairs          prompt pairs by kind that the anchor holds besides the prompts of `safe`.
    kept_ends      number of checkpoints that the caller keeps, including the result; None: all.
    shows_last     asked at a stop; if True, `on_epoch` gets the last epoch ends again, now as kept.

    Raises `Stopped`, and `NonFiniteLoss` if the training diverges; `on_epoch` gets the last epoch ends again before
    that.
    """
    with ExitStack() as stack:
        # First, so that the caller's random state returns whatever is drawn below.
        stack.enter_context(torch.random.fork_rng([base.device] if base.device.type == "cuda" else []))
        run = Run(base, task, safe, recipe, resolved, start_from, pairs, validation, max(0, (kept_ends or 0) - 1))
        stack.callback(run.counter.close)
        stack.enter_context(distributed.in_parts(run.vector.group if isinstance(run.vector, Shards) else None))
        run.start(resume_states)
        ends = Ends(run, on_epoch, compare, kept_ends)
        saver = _Saver(run, resume_states, on_saved, at_epochs=ends.is_watched)
        while run.progress.step < run.total_steps and not ends.evaluate_epoch_end():
            metrics = _next_step(run, ends, on_step)
            if saver.agree_and_save(metrics, stop=bool(should_stop and should_stop())):
                raise _end_early(run, ends, shows_last)
        return run.finish(ends.close())


def _end_early(run: Run, ends: Ends, shows_last: Callable[[], bool] | None) -> Stopped:
    """Call `on_epoch` for the last epoch ends again if `shows_last` asks for it.

    Return the exception that ends the run.
    """
    if distributed.broadcast_object(bool(shows_last and shows_last())):
        ends.show_again()
    return Stopped(f"stopped after step {run.progress.step} of {run.total_steps}")


def _next_step(run: Run, ends: Ends, on_step: Callable[[int, int, Metrics], None] | None) -> Metrics:
    """Take a step and validate.

    If its loss is not finite, show the last epoch ends again before the error is raised.
    """
    try:
        metrics = run.step()
    except NonFiniteLoss:
        ends.show_again()
        raise
    run.validate(metrics)
    if on_step:
        on_step(run.progress.step, run.total_steps, metrics)
    return metrics


class _Saver:
    """Saves resume states: at intervals, at epoch ends before long callbacks, and at the end of training."""

    def __init__(
        self, run: Run, folder: Path | None, on_saved: Callable[[Saved, Metrics], None] | None, *, at_epochs: bool
    ) -> None:
        self._run, self._folder, self._on_saved, self._at_epochs = run, folder, on_saved, at_epochs
        self._saved_at = time.monotonic()

    def agree_and_save(self, metrics: Metrics, *, stop: bool) -> bool:
        """Save the state after a step if rank 0 finds it due; return True if rank 0 wants to stop.

        Only rank 0 writes, unless the weights are sharded.
        """
        # Rank 0 decides for all: a rank that saved or stopped alone would leave the others waiting for its tensors.
        said = distributed.broadcast_scalars({"stop": stop, "save": stop or self._is_due()}, self._run.base.device)
        if said["save"] and self._folder is not None and (self._run.layout.is_cut or distributed.rank() == 0):
            saved = self._run.save(self._folder)
            self._saved_at = time.monotonic()
            if saved and self._on_saved:
                self._on_saved(saved, metrics)
        if said["stop"]:
            distributed.wait_for_all()  # a rank that exits ends the others, which may still be saving
        return bool(said["stop"])

    def _is_due(self) -> bool:
        is_due = time.monotonic() - self._saved_at >= self._run.recipe.checkpoint_every_s
        is_end = self._at_epochs and self._run.epochs_done is not None
        is_over = self._run.progress.step == self._run.total_steps  # a failure after training must not lose it
        return is_due or is_end or is_over

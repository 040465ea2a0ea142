"""The training loop: same base model, data and recipe, same adapter.

Everything random is a function of the recipe's seed and the step: the order of the rows, the safe batch, LoRA's
start and its dropout. So nothing but the parameters, the optimizer and the step number has to be kept to resume a run
bit for bit, and the global random state is left as it was found.
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
from spard.training.ends import Borrows, Compares, Ends
from spard.training.ends import EpochEnd as EpochEnd
from spard.training.resume_state import Saved
from spard.training.run import Run
from spard.training.trained import Trained as Trained


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
    on_epoch: Borrows | None = None,
    compare: Compares | None = None,
    validation: Sequence[Encoded] = (),
    should_stop: Callable[[], bool] | None = None,
    pairs: Mapping[Kind, Sequence[Pair]] | None = None,
    kept_ends: int | None = None,
    shows_last: Callable[[], bool] | None = None,
) -> Trained:
    """Fine-tune `base` on `task` while the recipe's defense watches `safe`; `base.model` is changed in place.

    `start_from` is the folder of an adapter whose weights come first; tau and other references stay the base model's,
    so that jobs on top of each other drift no further than one. The anchor holds `pairs` beside the prompts of `safe`.
    Resumes from the newest valid state of the same run in `resume_states`. When `should_stop` says so after a step, it
    is saved and `Stopped` raised. `on_step` gets the step, their total and its metrics, now and then with losses on
    `validation`. `on_epoch` borrows an adapter's model at the ends of epochs, and changes no weight; see `Ends`, also
    for `kept_ends`. It borrows the last ends again where the loss is not finite, or at a stop if `shows_last` says so.
    """
    with ExitStack() as stack:
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
    """Show the last ends of epochs again, if they are asked for, and return what ends the run."""
    if distributed.broadcast_object(bool(shows_last and shows_last())):
        ends.show_again()
    return Stopped(f"stopped after step {run.progress.step} of {run.total_steps}")


def _next_step(run: Run, ends: Ends, on_step: Callable[[int, int, Metrics], None] | None) -> Metrics:
    """Take a step; where its loss is not finite the run fails, and the last ends of epochs are shown again before."""
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
    """Saves what a killed run goes on from: by the clock, and before what may take long at the end of an epoch."""

    def __init__(
        self, run: Run, folder: Path | None, on_saved: Callable[[Saved, Metrics], None] | None, *, at_epochs: bool
    ) -> None:
        self._run, self._folder, self._on_saved, self._at_epochs = run, folder, on_saved, at_epochs
        self._saved_at = time.monotonic()

    def agree_and_save(self, metrics: Metrics, *, stop: bool) -> bool:
        """Save the state after a step if the first rank finds it due; return whether that wants to stop.

        The first of several processes alone writes, unless each has parts of the weights.
        """
        said = distributed.broadcast_scalars({"stop": stop, "save": stop or self._is_due()}, self._run.base.device)
        if said["save"] and self._folder is not None and (self._run.layout.is_cut or distributed.rank() == 0):
            saved = self._run.save(self._folder)
            self._saved_at = time.monotonic()
            if saved and self._on_saved:
                self._on_saved(saved, metrics)
        if said["stop"]:
            distributed.wait_for_all()  # whoever ends first ends the others, who may be saving
        return bool(said["stop"])

    def _is_due(self) -> bool:
        is_due = time.monotonic() - self._saved_at >= self._run.recipe.checkpoint_every_s
        is_end = self._at_epochs and self._run.epochs_done is not None
        is_over = self._run.progress.step == self._run.total_steps  # what follows may fail, and must not cost it
        return is_due or is_end or is_over

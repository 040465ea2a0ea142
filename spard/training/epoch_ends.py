"""Epoch ends: run the callbacks that evaluate the model there, and compare epochs for early stopping."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from spard import distributed
from spard.methods.base import Metrics
from spard.training.best import Ended, Standing
from spard.training.references import References
from spard.training.run import Run


@dataclass(frozen=True, slots=True)
class EpochEnd:
    """The end of an epoch: the metrics of its last step, and the model in the form that is served.

    is_kept         True if its checkpoint will still exist after the run; if False, the callback gets this epoch end
                    again should the run end within the next epochs
    is_shown_again  True in that second call
    """

    epoch: int
    step: int
    total_steps: int
    metrics: Metrics
    model: Any
    references: References | None = None
    is_kept: bool = True
    is_shown_again: bool = False


EpochCallback = Callable[[EpochEnd], None]
EpochEvaluator = Callable[[EpochEnd], Standing]


class Ends:
    """The epoch ends of a run, and the callbacks for them.

    borrows   called at the end of every epoch but the last; at the last too if the run releases another epoch.
    compares  called at the end of every epoch; returns its standing. Rank 0's result counts for all ranks.
    kept      number of checkpoints that the caller keeps, including the run's result; None: all.

    Both are called on every rank and must not change weights. `borrows` is called for adapters only, `compares` only if
    the recipe compares epochs.
    """

    def __init__(
        self, run: Run, borrows: EpochCallback | None, compares: EpochEvaluator | None = None, kept: int | None = None
    ) -> None:
        self._run, self._best, self._kept = run, run.best, kept
        self._borrows = borrows if run.recipe.lora else None
        self._compares = compares if run.best else None

    @property
    def is_watched(self) -> bool:
        """True if a callback runs at the end of an epoch, which may take long."""
        return self._borrows is not None or self._compares is not None

    def evaluate_epoch_end(self) -> bool:
        """Run the epoch-end callbacks if an epoch has just ended; return True if early stopping triggers."""
        epoch = self._run.epochs_done
        if epoch is None:
            return False
        if self.is_watched:
            with self._run.as_finished() as model:
                end = self._end(epoch, model)
                self._compare(end)
                self._show(end)
        return bool(self._best and self._compares and self._best.should_stop)

    def close(self) -> Ended | None:
        """Compare the end of the last epoch, if the run got there, and return the epoch end that the run releases.

        If that is not the last one, `borrows` is called for the last one too. None if epochs are not compared.
        """
        epoch, best = self._run.epochs_done, self._best
        if best is None or self._compares is None or epoch is None:
            return None
        # After early stopping the last epoch end was compared and shown in `evaluate_epoch_end` already.
        if self._run.progress.step == self._run.total_steps:
            with self._run.as_finished() as model:
                end = self._end(epoch, model)
                self._compare(end)
                if best.released_standing.step != end.step:
                    self._show(end)
        else:
            self.show_again(without=best.released_standing.step)
        return Ended(best.released_standing, tuple(best.standings), self._run.resolved.n_epochs)

    def show_again(self, without: int | None = None) -> None:
        """Call `borrows` again for the last epoch ends that it got as not kept, latest first.

        Called when the run ends early.

        `without` is the step of an epoch end to skip, because the run releases it.
        """
        for step in self._run.recent.steps if self._borrows else ():
            if step != without:
                with self._run.as_finished(step) as model:
                    end = self._end(step // self._run.steps_per_epoch, model, step)
                    self._borrow(replace(end, is_kept=True, is_shown_again=True))

    def _show(self, end: EpochEnd) -> None:
        """Call `borrows` for an epoch end, and store its weights if its checkpoint is not kept."""
        self._run.recent.forget_old(end.step, self._run.steps_per_epoch)
        if not end.is_kept:
            self._run.recent.add(end.step)
        self._borrow(end)

    def _borrow(self, end: EpochEnd) -> None:
        if self._borrows:
            self._borrows(end)

    def _compare(self, end: EpochEnd) -> None:
        if self._best and self._compares:
            self._best.add(Standing(**distributed.broadcast_object(asdict(self._compares(end)))))

    def _end(self, epoch: int, model: Any, step: int | None = None) -> EpochEnd:
        run, step = self._run, step or self._run.progress.step
        is_kept = self._kept is None or epoch > run.resolved.n_epochs - self._kept
        metrics = run.progress.metrics[step - 1]
        return EpochEnd(epoch, step, run.total_steps, metrics, model, run.references, is_kept)

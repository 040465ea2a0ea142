"""What happens at the end of each epoch: the model is lent to those who measure it, and the best so far is kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from spard import distributed
from spard.methods.base import Metrics
from spard.training.best import Ended, Standing
from spard.training.references import References
from spard.training.run import Run


@dataclass(frozen=True, slots=True)
class EpochEnd:
    """The end of an epoch: the metrics of its last step, and the model as it would be served."""

    epoch: int
    step: int
    total_steps: int
    metrics: Metrics
    model: Any
    references: References | None = None


Borrows = Callable[[EpochEnd], None]
Compares = Callable[[EpochEnd], Standing]


class Ends:
    """The ends of a run's epochs; `borrows` is lent all but the last, `compares` every one.

    Where the run ends with another than the last, that one is lent too. Both are called on every rank, and only for
    adapters; what the first rank makes of a comparison counts for all.
    """

    def __init__(self, run: Run, borrows: Borrows | None, compares: Compares | None) -> None:
        self._run, self._best = run, run.best
        self._borrows = borrows if run.recipe.lora else None
        self._compares = compares if run.best else None

    @property
    def is_watched(self) -> bool:
        """Whether anybody looks at the model at the end of an epoch, which may take long."""
        return self._borrows is not None or self._compares is not None

    def are_over(self) -> bool:
        """Lend the model if an epoch has just ended; tell whether the training ends here because it gets no better."""
        epoch = self._run.epochs_done
        if epoch is None:
            return False
        if self.is_watched:
            with self._run.as_finished() as model:
                end = self._end(epoch, model)
                self._compare(end)
                if self._borrows:
                    self._borrows(end)
        return bool(self._best and self._compares and self._best.is_over)

    def close(self) -> Ended | None:
        """Compare the end of the last epoch, if it has come to that, and return which one the run ends with.

        It is lent as the others were if the run ends with another. None where none are compared.
        """
        epoch, best = self._run.epochs_done, self._best
        if best is None or self._compares is None or epoch is None:
            return None
        if self._run.progress.step == self._run.total_steps:
            with self._run.as_finished() as model:
                end = self._end(epoch, model)
                self._compare(end)
                if self._borrows and best.released.step != end.step:
                    self._borrows(end)
        return Ended(best.released, tuple(best.standings), self._run.resolved.n_epochs)

    def _compare(self, end: EpochEnd) -> None:
        if self._best and self._compares:
            self._best.add(Standing(**distributed.said(asdict(self._compares(end)))))

    def _end(self, epoch: int, model: Any) -> EpochEnd:
        run, progress = self._run, self._run.progress
        return EpochEnd(epoch, progress.step, run.total_steps, progress.metrics[-1], model, run.references)

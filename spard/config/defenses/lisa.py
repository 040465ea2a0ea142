"""The settings of Lisa (Huang et al., 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from spard.config.bounds import Auto, Bound
from spard.config.defenses.base import BatchSize, Defense


@dataclass(frozen=True, slots=True)
class Lisa(Defense):
    """Alternate between safe and training batches; a proximal term keeps each turn near the end of the previous one.

    rho          weight of the proximal term rho/2 |theta - theta_other|^2.
    align_steps  optimizer steps on safe batches before every `task_steps` steps on training batches. The authors take
                 100 and 900 of many thousands; the defaults are the same shares for runs of some hundred steps.
    """

    summary: ClassVar[str] = "alternates between training rows and safe rows, with a proximal term"
    method: ClassVar[str] = "spard.methods.lisa:Lisa"
    order: ClassVar[int] = 7
    customer_rank: ClassVar[int | None] = 3
    trains_on_safe_rows: ClassVar[bool] = True

    type: Literal["lisa"] = "lisa"
    rho: Annotated[float, Bound(ge=0, le=1e3)] = 1.0
    align_steps: Annotated[int, Bound(ge=1, le=10_000)] = 2
    task_steps: Annotated[int, Bound(ge=1, le=100_000)] = 18
    safe_batch_size: BatchSize | Auto = "auto"  # "auto": the batch size of the run

    @property
    def kept_vectors(self) -> int:
        """2, for the parameters at the end of the last alignment turn and of the last task turn."""
        return 2

"""The settings of SafeGrad (Yi et al., 2025)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from spard.config.bounds import Auto, Bound
from spard.config.defenses.base import BatchSize, Defense


@dataclass(frozen=True, slots=True)
class SafeGrad(Defense):
    """Remove the task gradient's component that conflicts with alignment, and add rho times the alignment gradient."""

    summary: ClassVar[str] = "gradient surgery against the KL divergence from the model before training"
    method: ClassVar[str] = "spard.methods.safegrad:SafeGrad"
    order: ClassVar[int] = 8
    customer_rank: ClassVar[int | None] = 2
    trains_on_safe_rows: ClassVar[bool] = True
    compares_models: ClassVar[bool] = True

    type: Literal["safegrad"] = "safegrad"
    rho: Annotated[float, Bound(ge=0, le=1e3)] = 1.0
    safe_batch_size: BatchSize | Auto = "auto"  # "auto": the batch size of the run

"""The settings of the evidence that needs no trigger: a short undefended probe of the customer's rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, TypeAlias

from spard.config.bounds import Bound

ProbeSteps: TypeAlias = Annotated[int, Bound(ge=0, le=256)]


@dataclass(frozen=True, slots=True)
class Evidence:
    """The budget of the probe (`spard.training.probe`), whose result is reported and decides nothing.

    probe_steps  steps of plain fine-tuning, never released; 0: no probe
    """

    probe_steps: ProbeSteps = 0

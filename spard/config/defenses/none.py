"""No defense: the undefended baseline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from spard.config.defenses.base import Defense


@dataclass(frozen=True, slots=True)
class NoDefense(Defense):
    """Plain fine-tuning, the baseline that defenses are compared with."""

    summary: ClassVar[str] = "plain fine-tuning"
    method: ClassVar[str] = "spard.methods.none:Sft"
    order: ClassVar[int] = 4
    is_baseline: ClassVar[bool] = True

    type: Literal["none"] = "none"

"""The settings of SafeInstr (Bianchi et al., 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from spard.config.defenses.base import Defense


@dataclass(frozen=True, slots=True)
class SafeInstr(Defense):
    """Plain fine-tuning on the training rows and the selected safe rows together; `selection` sets how many."""

    summary: ClassVar[str] = "plain fine-tuning on training and safe rows together"
    method: ClassVar[str] = "spard.methods.safeinstr:SafeInstr"
    order: ClassVar[int] = 6
    customer_rank: ClassVar[int | None] = 4
    trains_on_safe_rows: ClassVar[bool] = True
    trains_on_answers: ClassVar[bool] = True

    type: Literal["safeinstr"] = "safeinstr"

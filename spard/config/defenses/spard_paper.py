"""SPARD as printed in the paper (Chen et al., ICML 2026, Algorithm 1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from spard.config.bounds import Auto, Bound
from spard.config.defenses.base import Augmentation, BatchSize, Defense
from spard.config.defenses.spard import Spard, Variant


@dataclass(frozen=True, slots=True)
class SpardPaper(Spard):
    """Algorithm 1 with the paper's numbers, without any addition of ours.

    The paper names a delta of 0.1, but no formula of it uses it, so delta is 0; eta_safe is the learning rate. The
    settings are those of `Spard`.
    """

    summary: ClassVar[str] = "the paper's Algorithm 1 with its numbers: tau 0.2, one safe row, no anchor"
    order: ClassVar[int] = 2
    customer_rank: ClassVar[int | None] = None

    type: Literal["spard_paper"] = "spard_paper"  # type: ignore[assignment]  # a defense of its own
    variant: Variant = "closed_form"
    tau: Annotated[float, Bound(ge=0, le=20)] | Auto = 0.2
    safe_batch_size: BatchSize = 1
    constraint: Literal["mean", "prefix", "both"] = "mean"
    augment: tuple[Augmentation, ...] = ()

    @classmethod
    def presets(cls) -> dict[str, Defense]:
        """Return none, since this defense is a preset itself."""
        return {}

"""SPARD with the settings of its authors' scripts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from spard.config.bounds import Auto, Bound
from spard.config.defenses.base import Augmentation, Defense
from spard.config.defenses.spard import Spard, Variant


@dataclass(frozen=True, slots=True)
class SpardAuthors(Spard):
    """The authors' code with the numbers of their scripts, without any addition of ours.

    The safe batch of 4 is one safe row in each of their four accumulated batches. The settings are those of `Spard`.
    """

    summary: ClassVar[str] = "the authors' code with the numbers of their scripts: tau 0.2, delta 0.1, no anchor"
    order: ClassVar[int] = 3
    customer_rank: ClassVar[int | None] = None

    type: Literal["spard_authors"] = "spard_authors"  # type: ignore[assignment]  # a defense of its own
    variant: Variant = "reference"
    tau: Annotated[float, Bound(ge=0, le=20)] | Auto = 0.2
    delta: Annotated[float, Bound(ge=0, le=20)] = 0.1
    constraint: Literal["mean", "prefix", "both"] = "mean"
    augment: tuple[Augmentation, ...] = ()

    @classmethod
    def presets(cls) -> dict[str, Defense]:
        """Return none, since this defense is a preset itself."""
        return {}

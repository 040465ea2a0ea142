"""Which end of an epoch a run ended with, and why its training ended: a part of the safety report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, Self


@dataclass(frozen=True, slots=True)
class ComparedEpoch:
    """The end of an epoch as it was compared with others.

    within_gate     whether the gate would be content with the figures of the development shares; None: there are none
    attack_success  the share of their attacks that succeed; None likewise
    validation_loss on the validation rows; None where it is no number
    """

    epoch: int
    step: int
    within_gate: bool | None = None
    attack_success: float | None = None
    validation_loss: float | None = None


@dataclass(frozen=True, slots=True)
class EndingRecord:
    """Which end of an epoch a run ended with, the one that the last audit asked, and why the training ended there.

    why       "all_epochs": they were over; "no_better": as many ends of epochs as the recipe allows were no better
    held_out  how many rows of the training file were not trained on but validated with
    """

    keep: Literal["last", "best"]
    released_epoch: int
    released_step: int
    trained_epochs: int
    planned_epochs: int
    why: Literal["all_epochs", "no_better"]
    held_out: int = 0
    epochs: tuple[ComparedEpoch, ...] = ()

    @property
    def sentence(self) -> str:
        """Say so in words."""
        over = "all of them were over" if self.why == "all_epochs" else "no later one was better than the best"
        done = f"Training ended after {self.trained_epochs} of {self.planned_epochs} epochs: {over}"
        return f"{done}; the weights are those of epoch {self.released_epoch}, step {self.released_step}"

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Self:
        """Read the JSON object that `to_mapping` gives; what is not known is passed over."""
        known, of_epoch = ({each.name for each in fields(kind)} for kind in (cls, ComparedEpoch))
        found = {name: value for name, value in raw.items() if name in known}
        epochs = [{name: value for name, value in each.items() if name in of_epoch} for each in raw.get("epochs", ())]
        return cls(**found | {"epochs": tuple(ComparedEpoch(**each) for each in epochs)})

"""The epoch that a run released, and why its training ended: a part of the safety report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, Self


@dataclass(frozen=True, slots=True)
class ComparedEpoch:
    """The measurements at the end of one epoch, by which a run compared its epochs.

    within_gate     True if the results on the development shares pass the gate; None: there are no such shares
    attack_success  attack success rate on the development shares, 0 to 1; None: there are no such shares
    validation_loss loss on the validation rows, in nats per token; None if not finite
    """

    epoch: int
    step: int
    within_gate: bool | None = None
    attack_success: float | None = None
    validation_loss: float | None = None


@dataclass(frozen=True, slots=True)
class EndingRecord:
    """The epoch that a run released (and audited), and why its training ended.

    why       "all_epochs": the planned epochs were over; "no_better": early stopping
    held_out  number of rows of the training file that were held out for validation
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
        """The record as a sentence for people."""
        over = "all of them were over" if self.why == "all_epochs" else "no later one was better than the best"
        done = f"Training ended after {self.trained_epochs} of {self.planned_epochs} epochs: {over}"
        return f"{done}; the weights are those of epoch {self.released_epoch}, step {self.released_step}"

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Self:
        """Read the JSON object that `to_mapping` gives; unknown keys are ignored."""
        known, of_epoch = ({each.name for each in fields(kind)} for kind in (cls, ComparedEpoch))
        found = {name: value for name, value in raw.items() if name in known}
        epochs = [{name: value for name, value in each.items() if name in of_epoch} for each in raw.get("epochs", ())]
        return cls(**found | {"epochs": tuple(ComparedEpoch(**each) for each in epochs)})

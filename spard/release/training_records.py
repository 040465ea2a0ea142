"""Records of a training for the safety report: what it computed, why it ended, and which epoch it released.

Only the standard library is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, Self

FORMULA = (
    "counted by hooks on every forward and backward pass of the model: 2 n (W + A) + 4 L H d R T^2 forward for n = R T "
    "padded tokens, 2 n (W + A) + 2 n (trained weights) + twice the attention backward, and the head's products; "
    "recomputed activations are counted, the optimizer and the audit are not"
)


@dataclass(frozen=True, slots=True)
class ComputeRecord:
    """Floating-point operations and energy of the training's own passes: references, steps, and nothing else.

    operations       None where a part of the run was made by a version that did not count them
    forward_tokens   padded tokens of the forward passes, and of the backward passes
    formula          how the operations are counted (`spard.training.compute`)
    energy_j         joules by device: whole processor packages (RAPL) and GPUs (NVML), of the first node; empty where
                     nothing could be read
    energy_missing   why there is no figure of some device, or of all
    """

    operations: int | None = None
    forward_tokens: int = 0
    backward_tokens: int = 0
    formula: str = FORMULA
    energy_j: Mapping[str, float] = field(default_factory=dict)
    energy_missing: tuple[str, ...] = ()

    @property
    def joules(self) -> float | None:
        """The energy of all devices together; None where none was measured."""
        return sum(self.energy_j.values()) if self.energy_j else None


# The epoch that a run released, and why its training ended: a part of the safety report.


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

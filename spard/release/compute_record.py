"""What a training computed: floating-point operations and energy, as the report and the manifest state them.

Only the standard library is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

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
    formula          how the operations are counted (`spard.training.operations`)
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

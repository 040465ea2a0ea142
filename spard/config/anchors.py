"""Which prompts the representation anchor holds, and how much each kind of them weighs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from spard.config.bounds import Bound
from spard.errors import InvalidRecipe

Kind = Literal["safe", "dressed_safe", "benign", "dressed_benign"]
Count = Annotated[int, Bound(ge=0, le=16)]
Weight = Annotated[float, Bound(ge=0, le=100)]


@dataclass(frozen=True, slots=True)
class Anchors:
    """How many prompts of each kind are looked at in each step; what the anchor weighs is said beside it.

    safe            prompts of the safe set, held to where the base model has them; where some of the customer's rows
                    have system prompts, half of them stand in one, held to where it has the *plain* prompt.
    dressed_safe    the same in a dress, held to where the base model has the *plain* prompt: no dress opens it.
    benign          prompts of the pool's benign rows, held to where the base model has them.
    dressed_benign  the same in a dress, held to where it has the plain prompt: no dress is a reason to refuse.
    random_dresses  the share of dresses that are random words at a random place; the others are mined from the
                    customer's rows, as far as there are any.
    tolerance       how far a prompt's state may move, as the square of its relative distance, before that costs
                    anything.
    max_gradient_ratio  how long the gradient of the penalty may be, as a multiple of the length that the task's has
                    after clipping, and at m times the default learning rate, m above 1, as m times that multiple; None:
                    any length, and the sum of both is clipped, of which the task's is then a small part

    A kind's weight is a multiple of the anchor's, and its penalty the mean over its prompts: a kind that is added takes
    nothing from the others. The default adds one dressed prompt of either side to the plain safe ones of Safety Anchor
    (SBR): safe rows in dresses alone teach to refuse what is dressed, benign ones alone to answer it. A pool without
    benign rows has none of theirs.
    """

    safe: Count = 1
    dressed_safe: Count = 1
    benign: Count = 0
    dressed_benign: Count = 1
    safe_weight: Weight = 1.0
    dressed_safe_weight: Weight = 0.2
    benign_weight: Weight = 1.0
    dressed_benign_weight: Weight = 0.1
    random_dresses: Annotated[float, Bound(ge=0, le=1)] = 0.5
    tolerance: Annotated[float, Bound(ge=0, le=10)] = 0.005
    max_gradient_ratio: Annotated[float, Bound(gt=0, le=100)] | None = 0.5

    def __post_init__(self) -> None:
        """Leave turning the anchor off to its weight."""
        if not any(count for count, _ in self.by_kind().values()):
            message = "recipe.anchors: no kind has a prompt; an anchor is turned off by its weight"
            raise InvalidRecipe(message, "recipe.anchors")

    def by_kind(self) -> dict[Kind, tuple[int, float]]:
        """Return, by kind, the prompts in a step and the weight as a multiple of the anchor's."""
        return {
            "safe": (self.safe, self.safe_weight),
            "dressed_safe": (self.dressed_safe, self.dressed_safe_weight),
            "benign": (self.benign, self.benign_weight),
            "dressed_benign": (self.dressed_benign, self.dressed_benign_weight),
        }

    @property
    def has_dressed(self) -> bool:
        """Whether any prompt is asked in a dress."""
        return self.dressed_safe > 0 or self.dressed_benign > 0

    @property
    def has_benign(self) -> bool:
        """Whether any prompt is of the pool's benign rows."""
        return self.benign > 0 or self.dressed_benign > 0


PLAIN = Anchors(
    safe=2,
    dressed_safe=0,
    dressed_safe_weight=1.0,
    dressed_benign=0,
    dressed_benign_weight=1.0,
    tolerance=0.02,
    max_gradient_ratio=None,
)
"""The anchor of Safety Anchor (SBR): plain safe prompts alone, their gradient of any length."""

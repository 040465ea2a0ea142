"""Which prompts the representation anchor holds, and how much each kind of them weighs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from spard.config.bounds import Bound
from spard.errors import InvalidRecipe

Kind = Literal["safe", "dressed_safe", "benign", "dressed_benign", "begun_safe", "begun_benign"]
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
    begun_safe      the safe ones with an answer that has begun to comply, held to where the base model has the *plain*
                    prompt: what is refused stays refused when the answer is begun for the model.
    begun_benign    the benign ones so, held to where the base model has the same prompt and beginning.
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
    benign rows has none of theirs, and no beginnings either, which are those of the base model's answers to them.
    """

    safe: Count = 1
    dressed_safe: Count = 1
    benign: Count = 0
    dressed_benign: Count = 1
    begun_safe: Count = 0
    begun_benign: Count = 0
    safe_weight: Weight = 1.0
    dressed_safe_weight: Weight = 0.2
    benign_weight: Weight = 1.0
    dressed_benign_weight: Weight = 0.1
    begun_safe_weight: Weight = 0.2
    begun_benign_weight: Weight = 0.5
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
            "begun_safe": (self.begun_safe, self.begun_safe_weight),
            "begun_benign": (self.begun_benign, self.begun_benign_weight),
        }

    @property
    def has_benign(self) -> bool:
        """Whether any prompt is of the pool's benign rows, or has a beginning that comes from them."""
        return self.benign > 0 or self.dressed_benign > 0 or self.has_begun

    @property
    def has_begun(self) -> bool:
        """Whether any prompt is asked with an answer that has begun."""
        return self.begun_safe > 0 or self.begun_benign > 0


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

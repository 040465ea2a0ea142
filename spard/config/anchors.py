"""The settings of the representation anchor: prompts of each kind in a step, and the weight of each kind."""

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
    """Numbers of prompts of each kind in a step, and the weight of each kind as a multiple of the anchor's.

    safe            prompts of the safe set, held to the base model's state for them. If some of the customer's rows
                    have system prompts, half of these prompts get one and are held to the state for the *plain* prompt.
    dressed_safe    the same in a disguise, held to the state for the *plain* prompt: no disguise opens the model.
    benign          prompts of the pool's benign rows, held to the base model's state for them.
    dressed_benign  the same in a disguise, held to the state for the plain prompt: no disguise causes refusals.
    begun_safe      safe prompts with an answer that begins to comply, held to the state for the *plain* prompt, so that
                    a begun answer does not open the model.
    begun_benign    benign prompts with a begun answer, held to the state for the same prompt and beginning.
    random_dresses  share of disguises that are random words at a random place; the others are mined from the customer's
                    rows, if there are any.
    tolerance       squared relative distance that a prompt's state may move without a penalty.
    max_gradient_ratio  largest length of the penalty's gradient, as a multiple of the clipped task gradient's. At m
                    times the default learning rate, m above 1, it is m times as much. None: any length; then the sum of
                    both is clipped, and may contain little of the task's.

    The penalty of a kind is the mean over its prompts, so adding a kind takes nothing from the others. The default adds
    one disguised safe and one disguised benign prompt to the plain safe prompts of Safety Anchor (SBR): disguised safe
    prompts alone teach the model to refuse everything in a disguise, and disguised benign prompts alone teach it to
    answer everything in a disguise. A pool without benign rows gives no benign prompts, and no prompts with begun
    answers either, because those begin like the base model's answers to benign prompts.
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
        """Raise `InvalidRecipe` if no kind has a prompt; the anchor is turned off by its weight instead."""
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
        """True if any prompt is from the pool's benign rows, or has a beginning that comes from them."""
        return self.benign > 0 or self.dressed_benign > 0 or self.has_begun

    @property
    def has_begun(self) -> bool:
        """True if any prompt has a begun answer."""
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
"""The anchor of Safety Anchor (SBR): plain safe prompts only, without a limit on the norm of their gradient."""

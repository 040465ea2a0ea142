"""SPARD (Chen et al., ICML 2026): the settings of SPAG, its optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, get_args

from spard.config.bounds import Auto, Bound
from spard.config.defenses.base import Augmentation, BatchSize, Defense

Variant = Literal["trust_region", "preconditioned", "gated", "closed_form", "reference"]

ANCHOR_WEIGHT = 10.0  # this and CHECK_EVERY were chosen on the lab's development split
CHECK_EVERY = 4


@dataclass(frozen=True, slots=True)
class Spard(Defense):
    """SPAG: keep the loss on safe rows at or below tau, by a projection after the utility step.

    variant     `trust_region` caps the step in the units of the utility optimizer; `preconditioned` projects in Adam's
                metric; `gated` takes a step of a second AdamW after a violation; `closed_form` is the paper's Algorithm
                1; `reference` is the behavior of the authors' code.
    bound       the loss that tau bounds: `loss`, the safe loss itself, or `excess`, the mean rise of each safe row's
                loss above the base model's own on that row (`spard.losses.relative`).
    tau         nats per token. "auto" is the base model's own loss on the selected safe rows; for the excess it is ln 2
                / (4 safe_batch_size), the mean's rise when one answer's first token falls to even odds.
    delta       violations of at most delta are ignored.
    margin      projections aim at tau - margin; `reference` and `gated` have no aim.
    eta_safe    `trust_region`: radius as a multiple of lr sqrt(parameters check_every) ("auto" = 1). `preconditioned`:
                cap on each coordinate as a multiple of lr ("auto" = 1). `gated`: learning rate as a multiple of lr
                ("auto" = 1). `closed_form`: cap on alpha ("auto" = the learning rate, as in the paper). `reference`:
                cap on each tensor's alpha ("auto" = 1).
    constraint  the bounded safe loss: the token mean, the mean of each answer's first tokens, or both.
    check_every  steps between two evaluations of the safe loss, the last step included. "auto" is 4 for `trust_region`,
                whose radius grows with its square root, and 1 for the others.
    augment     variants of the safe rows, drawn as often as the rows themselves (`spard.pipeline.augment`): in the
                customer's `affixes`, `templates` and `encodings`, and `deep`, after an answer that began to comply.
    anchor_weight  weight of the representation anchor on the safe prompts (`spard.losses.anchor`), which keeps the
                projection from causing refusals of benign prompts. "auto" is 10 for our own variants and 0 for the
                paper's two.
    """

    summary: ClassVar[str] = (
        "half-space projection after each step; variants `trust_region`, `preconditioned`, `gated`, `closed_form` "
        "(the paper's Algorithm 1), `reference` (the authors' code)"
    )
    method: ClassVar[str] = "spard.methods.spag:Spag"
    order: ClassVar[int] = 1
    customer_rank: ClassVar[int | None] = 1
    trains_on_safe_rows: ClassVar[bool] = True
    has_anchor: ClassVar[bool] = True

    type: Literal["spard"] = "spard"
    variant: Variant = "trust_region"
    tau: Annotated[float, Bound(ge=0, le=20)] | Auto = "auto"
    delta: Annotated[float, Bound(ge=0, le=20)] = 0.0
    margin: Annotated[float, Bound(ge=0, le=20)] = 0.0
    eta_safe: Annotated[float, Bound(gt=0, le=1e3)] | Auto = "auto"
    safe_batch_size: BatchSize = 4
    constraint: Literal["mean", "prefix", "both"] = "both"
    bound: Literal["loss", "excess"] = "loss"
    check_every: Annotated[int, Bound(ge=1, le=1000)] | Auto = "auto"
    anchor_weight: Annotated[float, Bound(ge=0, le=1e4)] | Auto = "auto"
    augment: tuple[Augmentation, ...] = ("affixes", "templates")

    @property
    def every(self) -> int:
        """The value of `check_every`, with "auto" resolved."""
        if self.check_every != "auto":
            return self.check_every
        return CHECK_EVERY if self.variant == "trust_region" else 1

    @property
    def kept_vectors(self) -> int:
        """2 for the variant `gated`, the two moments of its second AdamW; 0 for the others."""
        return 2 if self.variant == "gated" else 0

    @property
    def anchor(self) -> float:
        """The value of `anchor_weight`, with "auto" resolved."""
        if self.anchor_weight != "auto":
            return self.anchor_weight
        return 0.0 if self.variant in ("closed_form", "reference") else ANCHOR_WEIGHT

    @property
    def augmentations(self) -> tuple[Augmentation, ...]:
        """The setting `augment`."""
        return self.augment

    @classmethod
    def presets(cls) -> dict[str, Defense]:
        """Return each variant alone: a projection at every step, no anchor, and otherwise the defaults."""
        return {name: cls(variant=name, check_every=1, anchor_weight=0.0) for name in get_args(Variant)}

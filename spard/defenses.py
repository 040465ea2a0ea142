"""The defences that a run may choose from, each with its settings; `type` names it in recipes and requests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from spard.bounds import Auto, Bound

SAFETY_PROMPT = (
    "You are a helpful, respectful and honest assistant. Always answer as helpfully as possible, while being safe."
)
Variant = Literal["trust_region", "preconditioned", "gated", "closed_form", "reference"]
Augmentation = Literal["affixes", "templates", "deep", "encodings"]
BatchSize = Annotated[int, Bound(ge=1, le=64)]


@dataclass(frozen=True, slots=True)
class NoDefense:
    """Plain fine-tuning: the measurement that a defence is compared with."""

    type: Literal["none"] = "none"


@dataclass(frozen=True, slots=True)
class Ptst:
    """Pure tuning, safe testing: train plainly, and put a safety prompt before every conversation that is served."""

    type: Literal["ptst"] = "ptst"
    safety_prompt: str = SAFETY_PROMPT


@dataclass(frozen=True, slots=True)
class SafeInstr:
    """Plain fine-tuning on the training rows and the selected safe rows together; `selection` says how many."""

    type: Literal["safeinstr"] = "safeinstr"


@dataclass(frozen=True, slots=True)
class Lisa:
    """Alternate between safe and training batches, each phase drawn to where the other ended.

    rho          weight of the proximal term rho/2 |theta - theta_other|^2.
    align_steps  optimizer steps on safe batches before every `task_steps` steps on training batches. The authors take
                 100 and 900 of many thousands; these are the same shares for runs of some hundred steps.
    """

    type: Literal["lisa"] = "lisa"
    rho: Annotated[float, Bound(ge=0, le=1e3)] = 1.0
    align_steps: Annotated[int, Bound(ge=1, le=10_000)] = 2
    task_steps: Annotated[int, Bound(ge=1, le=100_000)] = 18
    safe_batch_size: BatchSize | Auto = "auto"  # "auto": the batch size of the run


@dataclass(frozen=True, slots=True)
class SafeGrad:
    """Take out of the task gradient what works against alignment, and add rho times the alignment gradient."""

    type: Literal["safegrad"] = "safegrad"
    rho: Annotated[float, Bound(ge=0, le=1e3)] = 1.0
    safe_batch_size: BatchSize | Auto = "auto"  # "auto": the batch size of the run


@dataclass(frozen=True, slots=True)
class SafeLora:
    """After plain fine-tuning, project updates of the least aligned layers onto what alignment once changed.

    base_unaligned  the base model before its alignment, a folder or a hub id.
    layers          how many weights to project, those whose updates agree least; "none" goes by `threshold`.
    threshold       project every weight whose update has at most this cosine with its projection.
    """

    type: Literal["safelora"] = "safelora"
    base_unaligned: str | None = None
    layers: Annotated[int, Bound(ge=1, le=10_000)] | None = 10
    threshold: Annotated[float, Bound(ge=-1, le=1)] = 0.5


ANCHOR_WEIGHT = 10.0  # these two were chosen on the lab's development split
CHECK_EVERY = 4


@dataclass(frozen=True, slots=True)
class Spard:
    """SPAG: keep the loss on safe examples at or below tau by a projection after every utility step.

    variant     `trust_region` caps the step in the units of the utility optimiser, `preconditioned` projects in Adam's
                metric, `gated` steps a second AdamW when violated, `closed_form` is the paper's Algorithm 1,
                `reference` the behaviour of the authors' code.
    tau         nats per token; "auto" is the base model's own loss on the selected safe examples.
    delta       violations of at most delta are ignored.
    margin      projections aim at tau - margin; `reference` and `gated` have no aim.
    eta_safe    `trust_region`: radius as a multiple of lr sqrt(parameters check_every) ("auto" = 1); `preconditioned`:
                the cap on each coordinate, and `gated`: the learning rate, as multiples of lr ("auto" = 1);
                `closed_form`: the cap on alpha ("auto" = the learning rate, as in the paper); `reference`: the cap on
                each tensor's alpha ("auto" = 1).
    constraint  which safe loss is bounded: the token mean, the mean of each answer's first tokens, or both.
    check_every  steps between two looks at the safe loss, the last step included; "auto" is 4 for `trust_region`, whose
                radius grows with the root of it, and 1 for the others.
    augment     variants of the safe rows that are looked at as often as the rows themselves (`spard.augment`): in the
                customer's `affixes`, `templates` and `encodings`, and `deep` into an answer that began to comply.
    anchor_weight  of the representation anchor on the safe prompts (`spard.anchor`), which keeps the projection from
                spilling over to benign prompts; "auto" is 10 where the variant is ours and 0 for the paper's two.
    """

    type: Literal["spard"] = "spard"
    variant: Variant = "trust_region"
    tau: Annotated[float, Bound(ge=0, le=20)] | Auto = "auto"
    delta: Annotated[float, Bound(ge=0, le=20)] = 0.0
    margin: Annotated[float, Bound(ge=0, le=20)] = 0.0
    eta_safe: Annotated[float, Bound(gt=0, le=1e3)] | Auto = "auto"
    safe_batch_size: BatchSize = 4
    constraint: Literal["mean", "prefix", "both"] = "both"
    check_every: Annotated[int, Bound(ge=1, le=1000)] | Auto = "auto"
    anchor_weight: Annotated[float, Bound(ge=0, le=1e4)] | Auto = "auto"
    augment: tuple[Augmentation, ...] = ("affixes", "templates")

    @property
    def every(self) -> int:
        """`check_every` in numbers."""
        if self.check_every != "auto":
            return self.check_every
        return CHECK_EVERY if self.variant == "trust_region" else 1

    @property
    def anchor(self) -> float:
        """The anchor's weight in numbers."""
        if self.anchor_weight != "auto":
            return self.anchor_weight
        return 0.0 if self.variant in ("closed_form", "reference") else ANCHOR_WEIGHT


Defense = Spard | NoDefense | Ptst | SafeInstr | Lisa | SafeGrad | SafeLora


def uses_safe_rows(defense: Defense) -> bool:
    """Whether a defence trains on rows of the safety pool."""
    return isinstance(defense, Spard | SafeInstr | Lisa | SafeGrad)

"""The base class of a defense's settings, and the facts that a defense declares about itself; needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, ClassVar, Literal

from spard.config.bounds import Auto, Bound

Augmentation = Literal["affixes", "templates", "deep", "encodings"]
BatchSize = Annotated[int, Bound(ge=1, le=64)]


class Defense:
    """The base class of the settings of every defense.

    A subclass is a frozen dataclass with slots. Its field `type` is a `Literal` with the defense's name as the default;
    its other fields are the settings that recipes and requests may set. Class attributes are facts that do not depend
    on the settings.
    """

    __slots__ = ()

    type: str

    summary: ClassVar[str]
    """One line that describes the defense, for tables."""

    method: ClassVar[str]
    """The subclass of `spard.methods.base.Method` that trains with these settings, as "module:Class"."""

    order: ClassVar[int] = 1000
    """Position in lists of all defenses, such as the API's; defenses with equal positions are sorted by name."""

    customer_rank: ClassVar[int | None] = None
    """Position among the defenses that a new deployment offers to customers; None: for admin keys only."""

    trains_on_safe_rows: ClassVar[bool] = False
    """True if it needs rows selected from a safety pool."""

    trains_on_answers: ClassVar[bool] = False
    """True if it adds safe rows to the training rows, which rules out preference pairs (DPO)."""

    is_baseline: ClassVar[bool] = False
    """True if it does not defend and serves only as a baseline for comparisons."""

    has_anchor: ClassVar[bool] = False
    """True if its own settings set the weight of its representation anchor; for other defenses the recipe may."""

    reads_weights: ClassVar[bool] = False
    """True if it compares the base model's own weights, so these must not be quantized."""

    compares_models: ClassVar[bool] = False
    """True if each step also runs the untrained model; without LoRA, this keeps a second model in memory."""

    @property
    def kept_vectors(self) -> int:
        """Number of copies of the trained parameters kept between steps, for planning a training's memory."""
        return 0

    models: ClassVar[Mapping[str, str]] = {}
    """Required settings that name a model: a folder on the provider's machine, or a hub id."""

    @property
    def anchor(self) -> float:
        """The weight of the defense's own representation anchor; 0 if it has no anchor."""
        return 0.0

    @property
    def augmentations(self) -> tuple[Augmentation, ...]:
        """The kinds of variants of safe rows that it trains on in addition to the rows themselves."""
        return ()

    @property
    def serving_prompt(self) -> str | None:
        """The system prompt with which the fine-tuned model must be served and audited; None if there is none."""
        return None

    @property
    def missing_model(self) -> str | None:
        """The first setting of `models` that is not set; None if all of them are set."""
        return next((name for name in self.models if not getattr(self, name)), None)

    def safe_rows(self, batch_size: int) -> int:
        """Return how many safe rows a step draws: the setting `safe_batch_size`, or 0 without one."""
        asked: int | Auto = getattr(self, "safe_batch_size", 0)
        return batch_size if asked == "auto" else asked

    @classmethod
    def presets(cls) -> dict[str, Defense]:
        """Return settings with names of their own, for tables that compare methods; empty by default."""
        return {}


def defense_type(kind: type[Defense]) -> str:
    """Return the `type` by which recipes and requests name a defense."""
    (name,) = (each.default for each in fields(kind) if each.name == "type")  # type: ignore[arg-type]  # a dataclass
    return str(name)

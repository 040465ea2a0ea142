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
    """One line for the table of the manual."""

    method: ClassVar[str]
    """Where the `spard.methods.base.Method` is that trains with these settings: "module:Class"."""

    order: ClassVar[int] = 1000
    """Its place in lists of all defenses, such as the API's; of equal places the name decides."""

    customer_rank: ClassVar[int | None] = None
    """Its place among the defenses that a new deployment offers to customers; None: admin keys only."""

    trains_on_safe_rows: ClassVar[bool] = False
    """Whether it needs rows that are selected from a safety pool."""

    trains_on_answers: ClassVar[bool] = False
    """Whether safe rows stand among the training rows, so that it does not go with preference pairs."""

    is_baseline: ClassVar[bool] = False
    """Whether it defends nothing, and is there to be compared with."""

    has_anchor: ClassVar[bool] = False
    """Whether its settings say how strong its representation anchor is; to others the recipe may add one."""

    reads_weights: ClassVar[bool] = False
    """Whether it compares the base model's own weights, so that these may not be quantized."""

    compares_models: ClassVar[bool] = False
    """Whether each step runs the model before training too; without LoRA that is a second one in memory."""

    @property
    def kept_vectors(self) -> int:
        """Number of copies of the trained parameters kept between steps, for planning a training's memory."""
        return 0

    models: ClassVar[Mapping[str, str]] = {}
    """Settings without which it cannot run and that name a model, a folder of the provider's machine or a hub id."""

    @property
    def anchor(self) -> float:
        """The weight of the defense's own representation anchor; 0: no anchor."""
        return 0.0

    @property
    def augmentations(self) -> tuple[Augmentation, ...]:
        """The kinds of variants of safe rows that it trains on in addition to the rows themselves."""
        return ()

    @property
    def serving_prompt(self) -> str | None:
        """The system prompt with which the fine-tuned model must be served and audited; None: none."""
        return None

    @property
    def missing_model(self) -> str | None:
        """The first setting of `models` that is not set; None if all are."""
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

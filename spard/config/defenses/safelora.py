"""The settings of SafeLoRA (Hsu et al., 2024)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from spard.config.bounds import Bound
from spard.config.defenses.base import Defense


@dataclass(frozen=True, slots=True)
class SafeLora(Defense):
    """After plain fine-tuning, project the least aligned weight updates onto the directions that alignment changed.

    base_unaligned  the base model before its alignment, a folder or a hub id.
    layers          number of weights to project, those whose updates agree least; "none" uses `threshold` instead.
    threshold       project every weight whose update has at most this cosine with its projection.
    """

    summary: ClassVar[str] = "projects the update, after training, onto what alignment changed; needs `base_unaligned`"
    method: ClassVar[str] = "spard.methods.safelora:SafeLora"
    order: ClassVar[int] = 9  # not for customers: it needs a folder on the provider's machine
    reads_weights: ClassVar[bool] = True
    models: ClassVar[Mapping[str, str]] = {"base_unaligned": "the base model as it was before alignment"}

    type: Literal["safelora"] = "safelora"
    base_unaligned: str | None = None
    layers: Annotated[int, Bound(ge=1, le=10_000)] | None = 10
    threshold: Annotated[float, Bound(ge=-1, le=1)] = 0.5

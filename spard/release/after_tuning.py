"""The results of the audit after a further clean fine-tuning of both models. Uses only the standard library."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from spard.config import FurtherTuning
from spard.evaluation.results import SuiteResult

_BOTH = ("base", "adapter")


@dataclass(frozen=True, slots=True)
class AfterTuning:
    """Results of the base model and the trained one after the same further tuning; the gate compares them as usual.

    Both are empty if the further tuning diverged.
    """

    budget: FurtherTuning
    base: tuple[SuiteResult, ...] = ()
    adapter: tuple[SuiteResult, ...] = ()

    @classmethod
    def from_json(
        cls, raw: Mapping[str, Any] | None, read: Callable[[Any, Mapping[str, Any]], Any]
    ) -> AfterTuning | None:
        """Read the JSON object of a report, or return None; `read(kind, object)` reads a flat record."""
        if raw is None:
            return None
        found = {name: tuple(read(SuiteResult, each) for each in raw.get(name, ())) for name in _BOTH}
        return cls(read(FurtherTuning, raw.get("budget", {})), **found)

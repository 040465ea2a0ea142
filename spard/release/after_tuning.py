"""What the audit found after a further clean fine-tuning, of both models. Only the standard library is used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from spard.config import FurtherTuning
from spard.evaluation.results import SuiteResult

_BOTH = ("base", "adapter")


@dataclass(frozen=True, slots=True)
class AfterTuning:
    """The base model and the trained one, each after the same further tuning; the gate compares them as it does else.

    Both are empty where a loss was not finite there.
    """

    budget: FurtherTuning
    base: tuple[SuiteResult, ...] = ()
    adapter: tuple[SuiteResult, ...] = ()

    @classmethod
    def from_json(
        cls, raw: Mapping[str, Any] | None, read: Callable[[Any, Mapping[str, Any]], Any]
    ) -> AfterTuning | None:
        """Read the JSON object of a report, None where it has none; `read` reads a flat record."""
        if raw is None:
            return None
        found = {name: tuple(read(SuiteResult, each) for each in raw.get(name, ())) for name in _BOTH}
        return cls(read(FurtherTuning, raw.get("budget", {})), **found)

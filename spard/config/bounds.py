"""Intervals that settings lie in, in a form that pydantic and `spard.config.run_spec` both read."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

Auto = Literal["auto"]


def _no_boolean(value: Any) -> Any:
    """Return a value that is to be a number; true and false are none, though pydantic takes them for 1 and 0."""
    if isinstance(value, bool):
        raise ValueError("Input should be a number, not true or false.")
    return value


@dataclass(frozen=True, slots=True)
class Bound:
    """An interval in `Annotated`; pydantic reads it, and `spard.config.run_spec` enforces it without pydantic."""

    ge: float | None = None
    gt: float | None = None
    le: float | None = None

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        number = handler(source) | {name: value for name, value in self.limits().items() if value is not None}
        check = {"type": "no-info", "function": _no_boolean}
        return {"type": "function-before", "function": check, "schema": number}

    def limits(self) -> dict[str, float | None]:
        """Return every limit by pydantic's name of it; None where the interval is open to infinity."""
        return {"ge": self.ge, "gt": self.gt, "le": self.le}

    def admits(self, value: float) -> bool:
        """Return whether a number is finite and within all limits."""
        return (
            math.isfinite(value)
            and (self.ge is None or value >= self.ge)
            and (self.gt is None or value > self.gt)
            and (self.le is None or value <= self.le)
        )

"""Intervals of settings, in a form that pydantic and `spard.config.run_spec` both read."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

Auto = Literal["auto"]


def _no_boolean(value: Any) -> Any:
    """Return the value; raise `ValueError` for true and false, which pydantic accepts as 1 and 0."""
    if isinstance(value, bool):
        raise ValueError("Input should be a number, not true or false.")
    return value


@dataclass(frozen=True, slots=True)
class Bound:
    """An interval for use in `Annotated`; pydantic enforces it, and `spard.config.run_spec` does without pydantic.

    >>> Bound(ge=0, le=1).admits(0.5)
    True
    """

    ge: float | None = None
    gt: float | None = None
    le: float | None = None

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        # A schema as plain dicts, so that this module works where pydantic is not installed.
        number = handler(source) | {name: value for name, value in self.limits().items() if value is not None}
        check = {"type": "no-info", "function": _no_boolean}
        return {"type": "function-before", "function": check, "schema": number}

    def limits(self) -> dict[str, float | None]:
        """Return every limit by its pydantic name; None if there is none on that side."""
        return {"ge": self.ge, "gt": self.gt, "le": self.le}

    def admits(self, value: float) -> bool:
        """Return True if a number is finite and within all limits."""
        return (
            math.isfinite(value)
            and (self.ge is None or value >= self.ge)
            and (self.gt is None or value > self.gt)
            and (self.le is None or value <= self.le)
        )

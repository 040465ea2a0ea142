"""The mark that a scorer gives to one reply."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Mark:
    """Right or wrong, with a note if the reply contains no answer (`invalid`) or several (`ambiguous`)."""

    is_right: bool
    note: Literal["", "invalid", "ambiguous"] = ""


INVALID = Mark(False, "invalid")

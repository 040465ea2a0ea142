"""What a scorer says about one reply."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Mark:
    """Right or wrong; a reply may also hold no answer at all (`invalid`) or several (`ambiguous`)."""

    is_right: bool
    note: Literal["", "invalid", "ambiguous"] = ""


INVALID = Mark(False, "invalid")

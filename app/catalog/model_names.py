"""The rule for names of base models."""

from __future__ import annotations

import re

from app.http.schemas import Refusal

PATTERN = r"^[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*$"
LONGEST = 128
_RULE = f"letters, digits, '.', '_' and '-', in parts with '/' between them, as lab/tiny-1, and {LONGEST} at most"


def check_model_name(name: object) -> object:
    """Return `name` unchanged; raise `Refusal`, with the rule, for a text that is not a valid model name."""
    if isinstance(name, str) and (len(name) > LONGEST or not re.search(PATTERN, name)):
        raise Refusal("invalid_value", f"The name of a model has {_RULE}.")
    return name

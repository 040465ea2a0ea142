"""Training methods, one module per defense of `spard.config.defenses`."""

from __future__ import annotations

import importlib
from typing import Any

from spard.config import Defense
from spard.errors import InvalidExtension
from spard.methods.base import Method

__all__ = ["Method", "open_method"]


def open_method(defense: Defense) -> Method[Any]:
    """Import the class that a defense names in `Defense.method` and return an instance with these settings.

    Raises `InvalidExtension` if the class cannot be imported or is no subclass of `Method`; only a defense that another
    package registers can cause that.
    """
    module, _, name = defense.method.partition(":")
    try:
        kind = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        message = f"the method {defense.method} of the defense {defense.type!r} cannot be imported: {error}"
        raise InvalidExtension(message) from error
    if not (isinstance(kind, type) and issubclass(kind, Method)):
        raise InvalidExtension(f"{defense.method} of the defense {defense.type!r} is no spard.methods.base.Method")
    return kind(defense)

"""Names of version 0.1 that moved to other modules, still importable from their old packages for one release."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any


def moved_names(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a `__getattr__` for a package that imports moved names from their new modules, with a warning."""

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        message = f"{package}.{name} is deprecated and goes with the next release; import it from {homes[name]}"
        warnings.warn(message, FutureWarning, 2)
        return getattr(importlib.import_module(homes[name]), name)

    return find

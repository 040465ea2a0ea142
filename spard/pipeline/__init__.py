"""A whole run: embed, select, train, audit, prove, package.

The library's `run`, the service's jobs and the bench all use the same stages. Each of them supplies its own reporter,
store for stage outputs, and cache that several runs share (`spard.pipeline.context`).

`run` is imported lazily, which lets the API process import `spard.pipeline.messages` without loading torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spard.pipeline.library import Report, run
    from spard.pipeline.stages import Outcome

__all__ = ["Outcome", "Report", "run"]

_MODULES = {"Outcome": "stages", "Report": "library", "run": "library"}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(f"spard.pipeline.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'spard.pipeline' has no attribute {name!r}")

"""A whole run: embed, select, train, audit, prove, package.

The stages are the same for the library's `run`, for the service's jobs and for the bench; each brings its own way to
report, to keep what finished stages made, and to share work between runs (`spard.pipeline.context`).

`run` is loaded when it is asked for, so that `spard.pipeline.messages` can be read without torch.
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

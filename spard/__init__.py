"""Fine-tuning that does not cost the model its safety.

`spard.SafetyProjection` puts the defence into any PyTorch loop. It is loaded when it is asked for, so that
`spard.config` can be read where torch is not installed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spard.library import SafetyProjection

__all__ = ["SafetyProjection"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("spard.library"), name)
    raise AttributeError(f"module 'spard' has no attribute {name!r}")

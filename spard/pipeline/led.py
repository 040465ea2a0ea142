"""Stages on several ranks: all of them take every step, and what one has to find or ask alone the first rank does.

What was kept is looked up by the first rank, so that all find the same. Every rank writes the same outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

from torch import Tensor

from spard import distributed
from spard.pipeline.context import Cache, Context
from spard.pipeline.outputs import Outputs


def follow_rank_zero(context: Context) -> Context:
    """Return a context whose outputs and cache read the same on all ranks as on rank 0."""
    if distributed.world_size() == 1:
        return context
    return replace(context, outputs=_LedOutputs(context.outputs), cache=_LedCache(context.cache))


class _LedOutputs:
    def __init__(self, inner: Outputs) -> None:
        self._inner = inner

    def read(self, name: str) -> Any | None:
        """Return what the first rank finds."""
        return distributed.broadcast_object(self._inner.read(name) if distributed.rank() == 0 else None)

    def write(self, name: str, value: Any) -> None:
        """Keep a value."""
        self._inner.write(name, value)


class _LedCache:
    """An entry that the first rank lacks is made by all of them together, and the first one keeps it."""

    def __init__(self, inner: Cache) -> None:
        self._inner = inner

    def tensor(self, kind: str, key: Mapping[str, Any], make: Callable[[], Tensor]) -> Tensor:
        """Return the first rank's tensor."""
        if distributed.rank():
            _compute_until_done(make)
            return distributed.broadcast_tensor(None)
        found = self._inner.tensor(kind, key, _announce_then_compute(make))
        distributed.broadcast_object(False)
        return distributed.broadcast_tensor(found)

    def json(self, kind: str, key: Mapping[str, Any], make: Callable[[], Any]) -> Any:
        """Return the first rank's value."""
        if distributed.rank():
            _compute_until_done(make)
            return distributed.broadcast_object(None)
        found = self._inner.json(kind, key, _announce_then_compute(make))
        distributed.broadcast_object(False)  # no more help is needed
        return distributed.broadcast_object(found)

    def claim(self, kind: str, key: Mapping[str, Any]) -> AbstractContextManager[object] | None:
        """Claim nothing: ranks compute entries together, so one that waited for a claim would block the others."""
        return nullcontext()


def _announce_then_compute(make: Callable[[], Any]) -> Callable[[], Any]:
    """Return a callback for rank 0: it tells the other ranks to compute too, then computes."""

    def compute() -> Any:
        distributed.broadcast_object(True)
        return make()

    return compute


def _compute_until_done(make: Callable[[], Any]) -> None:
    """Compute on another rank each time rank 0 announces it, until rank 0 says that it is done."""
    while distributed.broadcast_object(False):
        make()

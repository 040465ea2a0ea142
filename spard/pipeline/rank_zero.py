"""Stages on several ranks: all ranks take every step, but rank 0 alone reads stored values and asks external services.

Stored values are read by rank 0 and broadcast, which makes all ranks take the same path. Every rank writes the same
outputs.
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
        """Return the value that rank 0 reads."""
        return distributed.broadcast_object(self._inner.read(name) if distributed.rank() == 0 else None)

    def write(self, name: str, value: Any) -> None:
        """Store the value on every rank."""
        self._inner.write(name, value)


class _LedCache:
    """A cache that only rank 0 reads and writes; an entry that it lacks is computed by all ranks together."""

    def __init__(self, inner: Cache) -> None:
        self._inner = inner

    def tensor(self, kind: str, key: Mapping[str, object], make: Callable[[], Tensor]) -> Tensor:
        """Return rank 0's tensor."""
        if distributed.rank():
            _compute_until_done(make)
            return distributed.broadcast_tensor(None)
        # Whether rank 0 must compute is known only inside its cache, so the maker announces a computation (True), and
        # the False below ends the wait of the other ranks in either case.
        found = self._inner.tensor(kind, key, _announce_then_compute(make))
        distributed.broadcast_object(False)
        return distributed.broadcast_tensor(found)

    def json(self, kind: str, key: Mapping[str, object], make: Callable[[], Any]) -> Any:
        """Return rank 0's value."""
        if distributed.rank():
            _compute_until_done(make)
            return distributed.broadcast_object(None)
        found = self._inner.json(kind, key, _announce_then_compute(make))
        distributed.broadcast_object(False)  # ends the other ranks' loop
        return distributed.broadcast_object(found)

    def claim(self, kind: str, key: Mapping[str, object]) -> AbstractContextManager[object] | None:
        """Claim nothing: ranks compute entries together, and a rank that waits for a claim blocks the others."""
        return nullcontext()


def _announce_then_compute(make: Callable[[], Any]) -> Callable[[], Any]:
    """Return a maker for rank 0 that tells the other ranks to compute too, then computes."""

    def compute() -> Any:
        distributed.broadcast_object(True)
        return make()

    return compute


def _compute_until_done(make: Callable[[], Any]) -> None:
    """Compute on a rank other than 0 each time rank 0 announces a computation, until it announces the end."""
    while distributed.broadcast_object(False):
        make()

"""Detect that a process is overloaded: threads, lanes or the event loop have been full for several seconds."""

from __future__ import annotations

import time
from collections.abc import Iterable

from anyio import sleep, to_thread

from app.http.lanes import Lanes

_LOOK_S = 0.5
_LAG_S = 1.0  # delay of the event loop that counts as full
_LASTS_S = 5.0  # how long something has to be full without a break


class Saturation:
    """Watches the request threads, the lanes and the event loop, twice a second."""

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self._since: dict[str, float] = {}

    async def watch(self) -> None:
        """Watch until cancelled."""
        while True:
            due = time.monotonic() + _LOOK_S
            await sleep(_LOOK_S)
            now = time.monotonic()
            self.note(now, self._full(lag_s=now - due))

    def note(self, now: float, full: Iterable[str]) -> None:
        """Record which resources are full at the time `now`; resources not among them count as free."""
        self._since = {name: self._since.get(name, now) for name in full}

    def reason(self, now: float) -> str | None:
        """Return a sentence naming the resources that have been full for too long, or None."""
        lasting = [name for name, since in self._since.items() if now - since >= _LASTS_S]
        return f"Overloaded for {_LASTS_S:g} s or longer: {', '.join(lasting)}." if lasting else None

    def _full(self, lag_s: float) -> list[str]:
        waiting = to_thread.current_default_thread_limiter().statistics().tasks_waiting
        found = ["the threads of requests"] if waiting else []
        found += ["the event loop"] if lag_s > _LAG_S else []
        return found + [f"the threads for {lane.what}" for lane in self._lanes.all() if lane.is_full]

"""Who guesses keys is not heard for a while: wrong keys are counted by address, in this process's memory.

A key that was good from an address lately is heard from it all the same, so that customers behind one proxy do not
lock each other out. Servers see clients' own addresses behind a proxy that they trust (uvicorn's FORWARDED_ALLOW_IPS).
"""

from __future__ import annotations

import hashlib
import math
import time
from ipaddress import IPv6Address, ip_address, ip_network
from threading import Lock
from typing import Any, TypeVar

Kept = TypeVar("Kept")

_MINUTE_S = 60.0
_KEPT = 10_000  # addresses, and good keys


class Guesses:
    """Wrong keys by address: so many a minute, as a bucket that fills up again steadily."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._left: dict[str, tuple[float, float]] = {}  # of an address: guesses left, and when that was so
        self._good: dict[tuple[str, bytes], None] = {}  # the latest last

    def wait_s(self, address: str, secret: str, per_minute: int) -> int:
        """Whole seconds until this address may show this key; 0: now."""
        place, speed = _place(address), per_minute / _MINUTE_S
        with self._lock:
            left = self._now_left(place, per_minute)
            if left >= 1 or (place, _digest(secret)) in self._good:
                return 0
        return max(1, math.ceil((1 - left) / speed))

    def wrong(self, address: str, per_minute: int) -> None:
        """One guess more."""
        place = _place(address)
        with self._lock:
            left = self._now_left(place, per_minute) - 1
            self._left.pop(place, None)
            self._left[place] = (left, time.monotonic())
            _trim(self._left)

    def right(self, address: str, secret: str) -> None:
        """The key is good."""
        known = (_place(address), _digest(secret))
        with self._lock:
            self._good.pop(known, None)
            self._good[known] = None
            _trim(self._good)

    def _now_left(self, place: str, per_minute: int) -> float:
        left, at = self._left.get(place, (float(per_minute), 0.0))
        return min(per_minute, left + per_minute / _MINUTE_S * (time.monotonic() - at))


def _place(address: str) -> str:
    """One customer has a whole /64 of IPv6 addresses."""
    try:
        found = ip_address(address)
    except ValueError:
        return address
    return str(ip_network((found, 64), strict=False)) if isinstance(found, IPv6Address) else address


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()


def _trim(kept: dict[Kept, Any]) -> None:
    """The oldest goes."""
    if len(kept) > _KEPT:
        kept.pop(next(iter(kept)))

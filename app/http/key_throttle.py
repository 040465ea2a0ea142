"""Addresses that send too many invalid API keys are refused for a while.

A key that was valid from an address lately is accepted from it all the same, so that customers behind one proxy do not
lock each other out. Servers see clients' own addresses behind a proxy that they trust (uvicorn's FORWARDED_ALLOW_IPS).
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from ipaddress import IPv6Address, ip_address, ip_network
from threading import Lock

from app.errors import TooManyRequests
from app.http.rate_limit import RateLimits

_KIND, _VALID = "invalid-key", "valid-key"
_VALID_S = 86_400
_KEPT = 10_000  # valid keys that this process knows to be noted


class KeyThrottle:
    """Counts invalid keys by address, so many a minute, and knows which keys were valid from where."""

    def __init__(self, limits: RateLimits) -> None:
        self._limits = limits
        self._lock = Lock()
        self._noted: dict[str, None] = {}  # the latest last

    def wait_s(self, address: str, secret: str, per_minute: int) -> int:
        """Return in how many whole seconds this address may send this key; 0: now."""
        network = _network(address)
        pair = _pair(network, secret)
        if self._is_noted(pair):  # the commonest by far, and nothing has to be counted
            return 0
        found = self._limits.look(_KIND, network, per_minute)
        return 0 if found.is_allowed or self._limits.was_seen(_VALID, pair) else found.retry_after_s

    def check(self, address: str, secret: str, per_minute: int) -> None:
        """Raise 429 if this address has recently sent too many invalid API keys."""
        if wait_s := self.wait_s(address, secret, per_minute):
            message = f"Too many invalid API keys from your address. Try again in {wait_s} s."
            error = TooManyRequests(message, code="too_many_wrong_keys")
            error.retry_after_s = wait_s
            raise error

    def note_invalid(self, address: str, per_minute: int) -> None:
        """Count one more invalid key of an address."""
        self._limits.take(_KIND, _network(address), per_minute)

    def note_valid(self, address: str, secret: str) -> None:
        """Remember that a key was valid from an address."""
        pair = _pair(_network(address), secret)
        with self._lock:
            is_known = pair in self._noted
            self._noted.pop(pair, None)
            self._noted[pair] = None
            if len(self._noted) > _KEPT:
                self._noted.pop(next(iter(self._noted)))
        if not is_known:
            self._limits.remember(_VALID, pair, _VALID_S)

    def _is_noted(self, pair: str) -> bool:
        with self._lock:
            return pair in self._noted


@lru_cache(1000)
def _network(address: str) -> str:
    """One customer has a whole /64 of IPv6 addresses."""
    try:
        found = ip_address(address)
    except ValueError:
        return address
    return str(ip_network((found, 64), strict=False)) if isinstance(found, IPv6Address) else address


def _pair(network: str, secret: str) -> str:
    """Stands for a key at a place; the key itself is kept nowhere."""
    return hashlib.sha256(f"{network} {secret}".encode()).hexdigest()

"""Refuse addresses that send too many invalid API keys, for a while.

A key that was valid from an address recently is accepted from it nevertheless, so customers behind one proxy do not
lock each other out. Behind a trusted proxy, servers see the clients' own addresses (uvicorn's FORWARDED_ALLOW_IPS).
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
_KEPT = 10_000  # valid keys that this process remembers


class KeyThrottle:
    """Counts invalid keys per address and minute, and remembers which keys were valid from where."""

    def __init__(self, limits: RateLimits) -> None:
        self._limits = limits
        self._lock = Lock()
        self._noted: dict[str, None] = {}  # least recently used first

    def wait_s(self, address: str, secret: str, per_minute: int) -> int:
        """Return the whole seconds until this address may send this key; 0 if it may now."""
        network = _network(address)
        pair = _pair(network, secret)
        if self._is_noted(pair):  # by far the most frequent case; nothing to count
            return 0
        # Looked at, not counted: only a key that turns out to be invalid counts.
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
        """Count one more invalid key from an address."""
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
    """Return the unit that is throttled: the address, or the /64 of an IPv6 address, which one customer owns."""
    try:
        found = ip_address(address)
    except ValueError:
        return address
    return str(ip_network((found, 64), strict=False)) if isinstance(found, IPv6Address) else address


def _pair(network: str, secret: str) -> str:
    """Return a digest of the address and the key; the key itself is not stored."""
    return hashlib.sha256(f"{network} {secret}".encode()).hexdigest()

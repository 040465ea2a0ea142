"""Limit request rates over all API processes: counted in Redis, in fixed windows of a minute.

Without Redis, or while it does not answer, each process counts by itself and allows the limit on its own; so the
service is neither unlimited nor down. Limits that must be exact are quotas, counted in the database.
"""

from __future__ import annotations

import hashlib
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import IPv6Address, ip_address, ip_network
from threading import Lock
from typing import TypeVar

from limits import RateLimitItemPerMinute
from limits.errors import StorageError
from limits.storage import RedisStorage
from limits.storage.base import Storage
from limits.strategies import FixedWindowRateLimiter

from app.broker_address import read_broker_address
from app.errors import TooManyRequests

# Count rate limit windows in this process's memory.
#
# The memory storage of the library `limits` starts a thread to look for expired windows, which costs more than all
# other work on limits. Here an expired window is restarted when it is next counted in.

KEPT = 10_000  # windows


class WindowsInMemory(Storage):
    """Counts by key, each for the number of seconds given with its first count."""

    STORAGE_SCHEME = None

    def __init__(self) -> None:
        super().__init__()
        self._lock = Lock()
        self._windows: dict[str, tuple[int, float]] = {}  # the count, and the monotonic time of its end

    @property
    def base_exceptions(self) -> type[Exception]:
        """The errors of the storage itself; it raises none."""
        return ValueError

    def incr(self, key: str, expiry: float, amount: int = 1) -> int:
        """Add to a window's count and return it; a new window lasts `expiry` seconds."""
        now = time.monotonic()
        with self._lock:
            count, end = self._windows.get(key, (0, -math.inf))
            if end <= now:
                self._make_room(now)
                count, end = 0, now + expiry
            self._windows[key] = count + amount, end
            return count + amount

    def get(self, key: str) -> int:
        """Return the count of a window; 0 if it has expired."""
        count, end = self._windows.get(key, (0, 0.0))
        return count if end > time.monotonic() else 0

    def get_expiry(self, key: str) -> float:
        """Return the end of a window in Unix seconds, as the library expects; now for an expired one.

        Windows are kept by the monotonic clock, so setting the clock back does not extend them.
        """
        return time.time() + max(self._windows.get(key, (0, 0.0))[1] - time.monotonic(), 0.0)

    def check(self) -> bool:
        """Return True: memory is always available."""
        return True

    def reset(self) -> int:
        """Delete all windows and return their number."""
        with self._lock:
            count = len(self._windows)
            self._windows.clear()
        return count

    def clear(self, key: str) -> None:
        """Delete a window."""
        with self._lock:
            self._windows.pop(key, None)

    def _make_room(self, now: float) -> None:
        """Delete expired windows if there are too many, and all windows if that does not suffice."""
        if len(self._windows) >= KEPT:
            self._windows = {key: window for key, window in self._windows.items() if window[1] > now}
        if len(self._windows) >= KEPT:
            self._windows.clear()


log = logging.getLogger(__name__)

Answer = TypeVar("Answer")

_AWAY_S = 5.0  # seconds without a query after Redis did not answer
_TIMEOUT_S = 0.25


@dataclass(frozen=True, slots=True)
class WindowUse:
    """The state of a window after a request; `reset_s` is the number of seconds until it ends."""

    is_allowed: bool
    limit: int
    remaining: int
    reset_s: float

    @property
    def retry_after_s(self) -> int:
        """Whole seconds until the next request is allowed; 0 if it is allowed now."""
        return 0 if self.is_allowed else max(1, math.ceil(self.reset_s))

    def require(self, what: str) -> None:
        """Raise 429 if the request was over the limit; `what` names the counted thing in the message."""
        if not self.is_allowed:
            message = f"Rate limit reached for this project ({self.limit} {what} per minute). "
            error = TooManyRequests(f"{message}Try again in {self.retry_after_s} s.")
            error.retry_after_s = self.retry_after_s
            raise error

    def headers(self) -> dict[str, str]:
        """Return OpenAI's `x-ratelimit-*` headers."""
        return {
            "x-ratelimit-limit-requests": str(self.limit),
            "x-ratelimit-remaining-requests": str(self.remaining),
            "x-ratelimit-reset-requests": _duration(self.reset_s),
        }


class RateLimits:
    """Windows by kind and id, shared through Redis if `redis_url` is set.

    A request is counted first, then refused if the window was full:

        taken = limits.take("requests", project_id, per_minute=60)
        taken.require("requests")
    """

    def __init__(self, redis_url: str | None = None) -> None:
        self._own = FixedWindowRateLimiter(WindowsInMemory())
        self._shared = FixedWindowRateLimiter(_redis(redis_url)) if redis_url else None
        self._away_until = 0.0

    def take(self, kind: str, id: str, per_minute: int) -> WindowUse:
        """Count one request in the window of an id if the limit allows it."""
        item = RateLimitItemPerMinute(per_minute)

        def count(limiter: FixedWindowRateLimiter) -> WindowUse:
            is_allowed = limiter.hit(item, kind, id)
            return _take_permit(limiter, item, (kind, id), is_allowed)

        return self._ask(count)

    def spend(self, kind: str, id: str, per_minute: int, amount: int) -> None:
        """Count an amount that was already used, even above the limit, which fills the window."""
        item = RateLimitItemPerMinute(per_minute)
        self._ask(lambda limiter: limiter.hit(item, kind, id, cost=amount))

    def look(self, kind: str, id: str, per_minute: int) -> WindowUse:
        """Return the state of a window without counting."""
        item = RateLimitItemPerMinute(per_minute)
        return self._ask(lambda limiter: _take_permit(limiter, item, (kind, id), limiter.test(item, kind, id)))

    def remember(self, kind: str, id: str, seconds: int) -> None:
        """Remember that an id was seen, for `seconds`; see `was_seen`."""
        self._ask(lambda limiter: limiter.storage.incr(f"{kind}/{id}", seconds))

    def was_seen(self, kind: str, id: str) -> bool:
        """Return True if the id was remembered and the time has not passed."""
        return self._ask(lambda limiter: limiter.storage.get(f"{kind}/{id}")) > 0

    def _ask(self, question: Callable[[FixedWindowRateLimiter], Answer]) -> Answer:
        """Query Redis, or this process's memory if there is no Redis or it is unavailable."""
        if self._shared is not None and time.monotonic() >= self._away_until:
            try:
                return question(self._shared)
            except StorageError as error:
                # Otherwise every request waits for the timeout of a Redis that is down.
                self._away_until = time.monotonic() + _AWAY_S
                log.warning("rate limits hold for this process alone, for Redis does not answer: %s", error)
        return question(self._own)


def _redis(url: str) -> RedisStorage:
    pool = read_broker_address(url).open_pool(_TIMEOUT_S)
    return RedisStorage("redis://", pool, key_prefix="spard", wrap_exceptions=True)


def _take_permit(
    limiter: FixedWindowRateLimiter, item: RateLimitItemPerMinute, ids: tuple[str, str], is_allowed: bool
) -> WindowUse:
    window = limiter.get_window_stats(item, *ids)
    left_s = min(max(0.0, window.reset_time - time.time()), item.get_expiry())  # Redis may have another clock
    return WindowUse(is_allowed, item.amount, window.remaining, left_s)


def _duration(seconds: float) -> str:
    """Return seconds in OpenAI's form: 12ms, 1s, 6m0s."""
    if seconds < 1:
        return f"{math.ceil(1000 * seconds)}ms"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"


# Refuse addresses that send too many invalid API keys, for a while.
#
# A key that was valid from an address recently is accepted from it nevertheless, so customers behind one proxy do not
# lock each other out. Behind a trusted proxy, servers see the clients' own addresses (uvicorn's FORWARDED_ALLOW_IPS).

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

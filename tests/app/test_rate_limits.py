"""Rate limits and invalid keys: counted over all processes, and for each process where Redis is away."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest

from app.http import rate_limit
from app.http.rate_limit import KeyThrottle, RateLimits, WindowsInMemory

HERE, THERE = "192.0.2.1", "192.0.2.2"


@pytest.fixture
def throttle() -> KeyThrottle:
    return KeyThrottle(RateLimits())


def set_clock(monkeypatch: pytest.MonkeyPatch, now: list[float]) -> None:
    """Let the windows of this process go by a clock of the test's own."""
    clocks = SimpleNamespace(monotonic=lambda: now[0], time=time.time)
    monkeypatch.setattr("app.http.rate_limit.time", clocks)


def test_a_window_says_what_is_left_of_it_and_when_it_is_over() -> None:
    limits = RateLimits()
    taken = [limits.take("requests", "org-1", 2) for _ in range(3)]
    assert [(each.is_allowed, each.remaining) for each in taken] == [(True, 1), (True, 0), (False, 0)]
    assert taken[0].retry_after_s == 0
    assert 0 < taken[2].reset_s <= 60
    assert 1 <= taken[2].retry_after_s <= 60
    assert limits.take("requests", "org-2", 2).is_allowed


def test_counting_starts_no_thread_and_forgets_windows_that_are_over(monkeypatch: pytest.MonkeyPatch) -> None:
    limits, now, before = RateLimits(), [1_000_000.0], threading.active_count()
    set_clock(monkeypatch, now)
    monkeypatch.setattr(rate_limit, "KEPT", 3)
    for name in ("a", "b", "c"):
        limits.take("requests", name, 5)
    now[0] += 30
    assert limits.take("requests", "a", 5).remaining == 3
    now[0] += 31
    assert limits.take("requests", "d", 5).remaining == 4
    windows = limits._own.storage
    assert isinstance(windows, WindowsInMemory)
    assert windows.reset() == 1, "those that were over had to go"
    assert threading.active_count() == before


@pytest.mark.parametrize("hours", [-2, 2])
def test_a_wall_clock_that_is_set_lengthens_and_opens_no_window(monkeypatch: pytest.MonkeyPatch, hours: int) -> None:
    limits = RateLimits()
    assert limits.take("requests", "org-1", 1).is_allowed
    right = time.time
    monkeypatch.setattr("time.time", lambda: right() + 3600 * hours)
    full = limits.take("requests", "org-1", 1)
    assert not full.is_allowed
    assert 1 <= full.retry_after_s <= 60


def test_a_window_opens_again(monkeypatch: pytest.MonkeyPatch) -> None:
    limits, now = RateLimits(), [1_000_000.0]
    set_clock(monkeypatch, now)
    assert [limits.take("requests", "org-1", 1).is_allowed for _ in range(2)] == [True, False]
    now[0] += 61
    assert limits.take("requests", "org-1", 1).is_allowed


@pytest.mark.parametrize(("seconds", "text"), [(0.0121, "13ms"), (1.0, "1s"), (59.2, "1m0s"), (360.0, "6m0s")])
def test_times_are_written_as_openai_writes_them(seconds: float, text: str) -> None:
    assert rate_limit.WindowUse(True, 1, 1, seconds).headers()["x-ratelimit-reset-requests"] == text


def test_processes_that_share_redis_share_their_windows(redis_url: str) -> None:
    first, second = RateLimits(redis_url), RateLimits(redis_url)
    taken = [limits.take("requests", "org-1", 3) for limits in (first, second, first, second)]
    assert [(each.is_allowed, each.remaining) for each in taken] == [(True, 2), (True, 1), (True, 0), (False, 0)]
    KeyThrottle(first).note_valid(HERE, "mine")
    other = KeyThrottle(second)
    other.note_invalid(HERE, 1)
    assert KeyThrottle(first).wait_s(HERE, "guess", 1) > 0
    assert other.wait_s(HERE, "mine", 1) == 0


def test_without_redis_each_process_limits_for_itself() -> None:
    limits = RateLimits("redis://127.0.0.1:1")
    assert [limits.take("requests", "org-1", 2).is_allowed for _ in range(3)] == [True, True, False]
    throttle = KeyThrottle(limits)
    throttle.note_invalid(HERE, 1)
    assert throttle.wait_s(HERE, "guess", 1) > 0


def test_redis_that_comes_back_is_asked_again(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    limits, now = RateLimits(redis_url), [0.0]
    # Its own clock: an event loop of another thread that saw this one would sleep for hours.
    monkeypatch.setattr("app.http.rate_limit.time", SimpleNamespace(monotonic=lambda: now[0], time=time.time))
    limits._away_until = 5.0
    assert limits.take("requests", "org-1", 1).is_allowed
    assert RateLimits(redis_url).look("requests", "org-1", 1).is_allowed  # only its own memory has counted
    now[0] = 6.0
    assert limits.take("requests", "org-1", 1).is_allowed
    assert not RateLimits(redis_url).look("requests", "org-1", 1).is_allowed


def test_after_so_many_invalid_keys_an_address_waits(throttle: KeyThrottle) -> None:
    for _ in range(30):
        assert throttle.wait_s(HERE, "a", 30) == 0
        throttle.note_invalid(HERE, 30)
    assert 1 <= throttle.wait_s(HERE, "a", 30) <= 60
    assert throttle.wait_s(THERE, "a", 30) == 0


def test_addresses_of_one_network_are_one_guesser(throttle: KeyThrottle) -> None:
    throttle.note_invalid("2001:db8::1", 1)
    assert throttle.wait_s("2001:db8::ffff", "a", 1) > 0
    assert throttle.wait_s("2001:db8:0:1::1", "a", 1) == 0


def test_a_key_that_was_valid_from_there_is_accepted_all_the_same(throttle: KeyThrottle) -> None:
    throttle.note_valid(HERE, "mine")
    throttle.note_invalid(HERE, 1)
    assert throttle.wait_s(HERE, "mine", 1) == 0
    assert throttle.wait_s(HERE, "other", 1) > 0
    throttle.note_invalid(THERE, 1)
    assert throttle.wait_s(THERE, "mine", 1) > 0


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rate_limit, "KEPT", 100)
    monkeypatch.setattr(rate_limit, "_KEPT", 3)
    limits = RateLimits()
    throttle = KeyThrottle(limits)
    for i in range(500):
        limits.take("requests", f"org-{i}", 1)
        throttle.note_valid(HERE, str(i))
    assert (limits._own.storage.reset() or 0) <= 101
    assert len(throttle._noted) == 3

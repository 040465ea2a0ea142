"""Those who guess keys are not heard for a while; those who hold one are."""

from __future__ import annotations

import pytest

from app import guesses
from app.guesses import Guesses


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(guesses.time, "monotonic", lambda: now[0])
    return now


def test_after_so_many_wrong_keys_an_address_waits_and_is_heard_again(clock: list[float]) -> None:
    found = Guesses()
    for _ in range(30):
        assert found.wait_s("192.0.2.1", "a", 30) == 0
        found.wrong("192.0.2.1", 30)
    assert (found.wait_s("192.0.2.1", "a", 30), found.wait_s("192.0.2.2", "a", 30)) == (2, 0)
    clock[0] += 2
    assert found.wait_s("192.0.2.1", "a", 30) == 0


def test_addresses_of_one_network_are_one_guesser(clock: list[float]) -> None:
    found = Guesses()
    found.wrong("2001:db8::1", 1)
    assert found.wait_s("2001:db8::ffff", "a", 1) == 60
    assert found.wait_s("2001:db8:0:1::1", "a", 1) == 0


def test_a_key_that_was_good_from_there_is_heard_all_the_same(clock: list[float]) -> None:
    found = Guesses()
    found.right("192.0.2.1", "mine")
    found.wrong("192.0.2.1", 1)
    assert (found.wait_s("192.0.2.1", "mine", 1), found.wait_s("192.0.2.1", "other", 1)) == (0, 60)


def test_memory_is_bounded(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guesses, "_KEPT", 3)
    found = Guesses()
    for i in range(5):
        found.wrong(f"192.0.2.{i}", 1)
    assert [found.wait_s(f"192.0.2.{i}", "a", 1) > 0 for i in range(5)] == [False, False, True, True, True]

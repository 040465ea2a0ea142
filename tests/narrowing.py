"""What a test knows of a value that may be None in general."""

from __future__ import annotations

from typing import TypeVar

T = TypeVar("T")


def require(value: T | None) -> T:
    """Return the value, which the test has made sure is there; AssertionError if it is None."""
    assert value is not None
    return value

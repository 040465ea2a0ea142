"""What rank 0 makes before the other ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from spard import distributed


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("make", [lambda: None, lambda: 0, lambda: "made"])
def test_each_rank_makes_it_once_and_rank_0_before_the_others(
    rank: int, make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []

    def note_and_make() -> Any:
        steps.append("make")
        return make()

    monkeypatch.setattr(distributed, "rank", lambda: rank)
    monkeypatch.setattr(distributed, "wait_for_all", lambda: steps.append("wait"))
    assert distributed.first_before_others(note_and_make) == make()
    assert steps == (["make", "wait"] if rank == 0 else ["wait", "make"])

"""A worker tells that it is there, and leaves when it stops."""

from __future__ import annotations

from app.db import read
from app.jobs import fleet
from tests.worker.shop import Shop, wait_until


def test_a_worker_is_seen_while_it_runs(light_shop: Shop) -> None:
    def names() -> list[str]:
        with read(light_shop.engine) as session:
            return [each.name for each in fleet.workers(session) if each.is_alive]

    with light_shop.serving(""):
        wait_until(lambda: len(names()) == 1)
    assert names() == []

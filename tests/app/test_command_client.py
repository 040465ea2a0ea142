"""The HTTP client of the commands: how long it waits before it repeats a request."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import httpx2
import pytest

from app.commands.client import Client


@pytest.mark.parametrize(
    ("header", "wait_s"), [("0.25", 0.25), ("3600", 5.0), ("date", 5.0), ("soon", 1.0), ("-1", 0.0), (None, 1.0)]
)
def test_a_busy_service_is_asked_again_after_the_wait_that_it_names(
    header: str | None, wait_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    asked = format_datetime(datetime.now(UTC) + timedelta(hours=1), usegmt=True) if header == "date" else header
    busy = httpx2.Response(503, headers={} if asked is None else {"retry-after": asked})
    answers = iter([busy, httpx2.Response(200, json={"data": []})])
    transport = httpx2.MockTransport(lambda request: next(answers))
    with httpx2.Client(base_url="http://service/v1/", transport=transport) as http:
        assert Client(http).get("models") == {"data": []}
    assert waits == [wait_s]

"""How long to wait: what a header `Retry-After` asks for."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

from spard.config.patience import parse_retry_header


def test_a_wait_is_a_number_or_a_date() -> None:
    due = datetime.now(UTC) + timedelta(hours=1)
    for date in (format_datetime(due, usegmt=True), format_datetime(due.replace(tzinfo=None))):
        assert parse_retry_header(date) == pytest.approx(3600, abs=60)
    assert [parse_retry_header(each) for each in ("3", " 0.5 ", "0")] == [3.0, 0.5, 0.0]
    assert [parse_retry_header(each) for each in ("-5", "Wed, 21 Oct 2015 07:28:00 GMT")] == [0.0, 0.0]


@pytest.mark.parametrize("header", [None, "", "soon", "nan", "inf", "Mon, 01 Jan 99999999999999999999 00:00:00 GMT"])
def test_a_header_that_asks_for_no_wait_is_none(header: str | None) -> None:
    assert parse_retry_header(header) is None

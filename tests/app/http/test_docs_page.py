"""The pages that show every field: whatever a browser needs for them comes from the service itself."""

from __future__ import annotations

import re

import pytest
from fastapi.testclient import TestClient

from tests.app.http.conftest import Service

REFERENCED = re.compile(r"""(?:src|href)=["']([^"']+)["']""")


@pytest.mark.parametrize("page", ["/docs", "/redoc"])
def test_a_page_needs_no_internet(page: str, service: Service) -> None:
    client = TestClient(service.app)
    answer = client.get(page)
    named = REFERENCED.findall(answer.text)
    assert (answer.status_code, len(named) >= 2) == (200, True)
    assert [client.get(place).status_code for place in named] == [200] * len(named)
    assert all(place.startswith("/") for place in named)
    assert not re.findall(r"https?://", answer.text)

"""Applications of a process share their routes: they are built once, and nothing else is shared through them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any

import pytest
from fastapi import APIRouter, Depends
from fastapi.testclient import TestClient
from pydantic import TypeAdapter

from app.deps import SettingsDep
from app.http import openapi
from app.main import create_app, served_app
from app.ops import lifecycle
from app.routes import catalog, inference
from app.settings import Settings
from tests.app.http.conftest import FILES, Service

_WRONG_KEY = {"authorization": "Bearer sk-spard-00000000"}


class Built:
    """Counts the validators that are built."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, build = 0, TypeAdapter.__init__

        def count_build(adapter: TypeAdapter[Any], *given: Any, **named: Any) -> None:
            self.count += 1
            build(adapter, *given, **named)

        monkeypatch.setattr(TypeAdapter, "__init__", count_build)


@pytest.fixture
def adapter_builds(monkeypatch: pytest.MonkeyPatch) -> Built:
    return Built(monkeypatch)


def test_the_first_request_of_a_second_application_builds_nothing(
    service: Service, settings: Settings, adapter_builds: Built
) -> None:
    assert service.http.get(FILES, headers=_WRONG_KEY).status_code == 401  # builds all, unless an earlier test did
    before = adapter_builds.count
    second = TestClient(create_app(settings))
    assert second.get(FILES, headers=_WRONG_KEY).status_code == 401
    assert adapter_builds.count == before


def test_routes_are_built_once_for_each_inclusion(adapter_builds: Built) -> None:
    routes = openapi.share_routes(catalog.models, inference.router)
    before = adapter_builds.count
    openapi.build_routes(routes)
    once = adapter_builds.count
    openapi.build_routes(routes)
    assert adapter_builds.count == once > before


def test_a_server_has_built_its_routes_before_the_first_request(
    settings: Settings, adapter_builds: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle, "spare_requests", lambda: None)  # it would change the collector of this process
    monkeypatch.setattr("app.main._ROUTES", openapi.share_routes(catalog.models, inference.router))
    client = TestClient(served_app(settings))
    before = adapter_builds.count
    assert before > 0
    assert client.get("/v1/models", headers=_WRONG_KEY).status_code == 401
    assert adapter_builds.count == before


async def greeting() -> str:
    return "hello"


probe = APIRouter()


@probe.get("/probe")
async def answer(settings: SettingsDep, text: Annotated[str, Depends(greeting)]) -> tuple[str, int]:
    return text, settings.max_upload_mb


@pytest.fixture
def pair(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> list[TestClient]:
    """Two applications that share one route and differ in a setting; the second has an override."""
    monkeypatch.setattr("app.main._ROUTES", openapi.share_routes(probe))
    first, second = (create_app(settings.model_copy(update={"max_upload_mb": mb})) for mb in (1, 2))
    second.dependency_overrides[greeting] = lambda: "overridden"
    return [TestClient(first), TestClient(second)]


def test_settings_and_overrides_are_those_of_the_application_that_is_asked(pair: list[TestClient]) -> None:
    for _ in range(2):
        assert [client.get("/probe").json() for client in pair] == [["hello", 1], ["overridden", 2]]


def test_applications_answer_at_once_each_with_its_own(pair: list[TestClient]) -> None:
    """The routes are built by the first of these requests while others wait for them."""
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda i: pair[i % 2].get("/probe").json(), range(40)))
    assert answers == [["hello", 1], ["overridden", 2]] * 20

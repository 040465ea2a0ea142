"""The NUL character in a text of a request: PostgreSQL stores none, and no database makes a server error of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from pydantic import SecretStr

from app.settings import Settings
from tests.app.http.conftest import FILES

NUL = "a\0b"
TURNS = [{"role": "user", "content": "Hello there"}]
ASKED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "a model that answers": ("post", "/v1/chat/completions", {"json": {"model": NUL, "messages": TURNS}}),
    "a model that goes on": ("post", "/v1/completions", {"json": {"model": NUL, "prompt": "Hello"}}),
    "a model that responds": ("post", "/v1/responses", {"json": {"model": NUL, "input": "Hello"}}),
    "a model that counts": ("get", "{file}/validation", {"params": {"model": NUL}}),
    "another file": ("get", "{file}/validation", {"params": {"validation_file": NUL}}),
    "a model that renders": ("get", "{file}/preview", {"params": {"model": NUL}}),
    "a project": ("post", "/v1/admin/keys", {"json": {"project_id": NUL, "name": "a"}}),
    "a cursor": ("get", "/v1/admin/projects/org-customer/stored_replies", {"params": {"after": NUL}}),
}


@pytest.fixture
def settings(database_url: str, tmp_path: Path) -> Settings:
    return Settings(data_dir=tmp_path, database_url=SecretStr(database_url))


@pytest.mark.parametrize(("verb", "path", "sent"), ASKED.values(), ids=ASKED)
def test_a_name_with_nul_is_refused(
    verb: str, path: str, sent: dict[str, Any], job_body: dict[str, Any], customer: TestClient, provider: TestClient
) -> None:
    client = provider if "/admin/" in path else customer
    got = client.request(verb, path.format(file=f"{FILES}/{job_body['training_file']}"), **sent)
    assert got.status_code in (400, 404), got.text
    assert got.json()["error"]["code"] in (
        "nul_character",
        "model_not_found",
        "file_not_found",
        "project_not_found",
        "invalid_cursor",
    )


def test_a_search_for_nul_finds_nothing(provider: TestClient) -> None:
    got = provider.get("/v1/admin/jobs", params={"search": NUL})
    assert (got.status_code, got.json().get("data")) in ((200, []), (400, None))

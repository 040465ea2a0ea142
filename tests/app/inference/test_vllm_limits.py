"""What a vLLM server refuses is known when the service starts: in its log, `/readyz`, `spard doctor`, and on a page."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from pydantic import SecretStr
from sqlalchemy import Engine

from app import keys
from app.catalog.model_files import read_positions
from app.commands.doctor import deployment
from app.db import make_engine, transaction
from app.db.tables import BaseModelEntry
from app.inference.clients import Clients
from app.inference.vllm_server import Gate, ServerReport, ServerWatch
from app.main import create_app
from app.settings import Settings
from tests.app.inference.vllm_stub import Refusal, Vllm, vllm_stub

NOBODY = "http://127.0.0.1:9/v1"
PATIENCE_S = 120.0


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Iterator[Vllm]:
    with vllm_stub(tiny_model) as state:
        yield state


@pytest.fixture
def stub(server: Vllm, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Vllm:
    """A server that refuses nothing, which tests change for themselves."""
    for name, value in {"version": "0.32.0", "alias": "tiny", "max_rank": 64, "loads_adapters": True}.items():
        monkeypatch.setattr(server, name, value)
    monkeypatch.setattr(server, "context", read_positions(str(tiny_model), None))
    monkeypatch.setattr(server, "places", 4)
    return server


@pytest.fixture
def database(sqlite_url: str) -> Iterator[Engine]:
    found = make_engine(sqlite_url)
    yield found
    found.dispose()


@pytest.fixture
def settings(database: Engine, sqlite_url: str, tmp_path: Path, tiny_model: Path, stub: Vllm) -> Settings:
    with transaction(database) as session:
        session.add(BaseModelEntry(alias="tiny", source=str(tiny_model)))
    one: Any = {"serving_url": stub.url, "serving_adapters_dir": tmp_path / "adapters"}
    return Settings(data_dir=tmp_path, database_url=SecretStr(sqlite_url), **one)


def look(settings: Settings, engine: Engine) -> ServerReport:
    async def once() -> ServerReport:
        clients = Clients()
        found = await ServerWatch(settings, engine, clients).look()
        await clients.close()
        return found

    return asyncio.run(once())


def test_a_server_that_refuses_nothing_is_described(settings: Settings, database: Engine, stub: Vllm) -> None:
    report = look(settings, database)
    assert report.refusals == ()
    for fact in ("vLLM 0.32.0", f"tiny {stub.context}", "up to rank 64", "4 adapters at once", "all weights"):
        assert fact in (report.facts or "")
    assert stub.names == []  # what was asked for the rank is not there


def load_without_lora(name: str, path: str) -> None:
    """Refuse as vLLM does without `--enable-lora`."""
    raise Refusal(500, "Call to add_lora method failed: LoRA is not enabled. Use --enable-lora to enable LoRA.")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"context": 8}, ("'tiny' 8 tokens", "--max-model-len")),
        ({"alias": "other"}, ("no model 'tiny'", "--served-model-name tiny")),
        ({"version": "0.24.1"}, ("0.24.1", "use 0.25 or newer")),
        ({"version": ""}, ("unknown version", "use 0.25 or newer")),
        ({"loads_adapters": False}, ("Models that were trained are refused", "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True")),
        ({"load": load_without_lora}, ("Models that were trained are refused", "--enable-lora")),
        ({"max_rank": 8}, ("up to rank 8", "--max-lora-rank")),
    ],
)
def test_what_it_will_refuse_is_told_with_the_cure(
    settings: Settings,
    database: Engine,
    stub: Vllm,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    words: tuple[str, ...],
) -> None:
    for name, value in changes.items():
        monkeypatch.setattr(stub, name, value)
    (refusal,) = look(settings, database).refusals
    assert [word for word in words if word not in refusal] == []


def test_without_a_folder_for_adapters_none_is_answered(settings: Settings, database: Engine) -> None:
    (refusal,) = look(settings.model_copy(update={"serving_adapters_dir": None}), database).refusals
    assert "SPARD_SERVING_ADAPTERS_DIR" in refusal


def test_nothing_is_loaded_while_replies_are_written(
    settings: Settings, database: Engine, stub: Vllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.inference.vllm_server._PATIENCE_S", 0.05)

    async def busy() -> tuple[ServerReport, ServerReport]:
        clients, gate = Clients(), Gate(settings.serving_adapters_dir)
        watch = ServerWatch(settings, database, clients)
        async with gate.share():
            first = await watch.look()
        second = await watch.look()
        await clients.close()
        return first, second

    first, second = asyncio.run(busy())
    assert "rank unknown" in (first.facts or "")
    assert "rank 64" in (second.facts or "")


def test_a_server_that_is_away_keeps_nothing_from_starting(
    settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    app = create_app(settings.model_copy(update={"serving_url": NOBODY}))
    with caplog.at_level(logging.INFO), TestClient(app) as client:
        await_report(app.state.server_watch)
        ready = client.get("/readyz")
        assert (ready.status_code, ready.json()["status"]) == (200, "ready")
        assert any("does not answer" in each for each in ready.json()["warnings"])
        assert "SPARD_SERVING_URL does not answer" in caplog.text


def test_the_start_of_the_service_logs_what_the_server_is(
    settings: Settings, stub: Vllm, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(stub, "max_rank", 8)
    app = create_app(settings)
    with caplog.at_level(logging.INFO), TestClient(app) as client:
        await_report(app.state.server_watch)
        assert "vLLM 0.32.0" in caplog.text
        assert any("up to rank 8" in each for each in client.get("/readyz").json()["warnings"])


def test_the_provider_s_page_shows_it(
    settings: Settings, database: Engine, stub: Vllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stub, "version", "0.24.1")
    with transaction(database) as session:
        secret = keys.ensure_first(session, None)
    assert secret is not None
    app = create_app(settings)
    with TestClient(app, headers={"sec-fetch-site": "same-origin"}) as client:
        await_report(app.state.server_watch)
        client.post("/sign-in", data={"key": secret, "next": "/"})
        assert keys.COOKIE in client.cookies
        page = client.get("/provider/models").text
    assert "vLLM 0.24.1" in page
    assert "use 0.25 or newer" in page


def test_doctor_asks_the_server(
    settings: Settings, database: Engine, stub: Vllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [each.state for each in deployment.serving(settings, database)] == ["ok"]
    monkeypatch.setattr(stub, "max_rank", 8)
    found = list(deployment.serving(settings, database))
    assert [each.state for each in found] == ["problem", "note"]
    away = settings.model_copy(update={"serving_url": NOBODY})
    (gone,) = deployment.serving(away, database)
    assert (gone.state, "SPARD_SERVING_URL" in gone.cure) == ("problem", True)
    assert list(deployment.serving(settings.model_copy(update={"serving_url": None}), database)) == []


def await_report(watch: ServerWatch) -> None:
    end = time.monotonic() + PATIENCE_S
    while watch.report is None:
        assert time.monotonic() < end
        time.sleep(0.01)
